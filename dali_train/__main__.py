"""``python -m dali_train``, also as ``dali-train``."""

import os
import sys


def main() -> int:
    """Run the command line, for which this waits to import anything: Ctrl-C meanwhile is no error."""
    try:
        from dali_train import cli
    except KeyboardInterrupt:
        os.write(2, b"dali-train: stopped with Ctrl-C\n")
        os._exit(130)  # Python itself would end by the signal if it came inside a dataclass's generated code
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
