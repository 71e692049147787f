"""``python -m dali_train``, also as ``dali-train``."""

import sys


def main() -> int:
    """Run the command line, for which this waits to import anything: Ctrl-C meanwhile is no error."""
    try:
        from dali_train import cli
    except KeyboardInterrupt:
        print("dali-train: stopped with Ctrl-C", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
