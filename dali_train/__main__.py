"""``python -m dali_train``, also as ``dali-train``."""

import io
import os
import sys
from typing import Any


def main() -> int:
    """Run the command line. Imports happen here, so that Ctrl-C during them ends quietly."""
    _open_missing_streams()
    _start_again_in_utf8()
    if sys.flags.optimize > 1:
        words = "python -OO (PYTHONOPTIMIZE=2) leaves docstrings out, without which DALI cannot be imported: unset it"
        print(f"dali-train: {words}, or use -O", file=sys.stderr)
        return 2
    try:
        from dali_train import cli
        from dali_train.runtime.process import end
    except KeyboardInterrupt:
        os.write(2, b"dali-train: stopped with Ctrl-C\n")
        os._exit(130)  # Python itself would end by the signal if it came inside a dataclass's generated code
    end(cli.main())


def _start_again_in_utf8() -> None:
    """Replace this process by one in Python's UTF-8 mode if the locale has another encoding (LC_ALL=C, ISO-8859-1) that
    Python may not leave: names of files and classes are UTF-8 on every machine, and in every process of a run, so
    processes that this one starts inherit the mode."""
    if sys.getfilesystemencoding() != "utf-8":
        words = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]  # the option holds where -E or -I hides the variable
        os.execve(sys.executable, words, {**os.environ, "PYTHONUTF8": "1"})


def _open_missing_streams() -> None:
    """Let a standard stream that is closed lead to nowhere: a run does not fail because nobody reads its output, and
    no file opened later takes the descriptor, into which libraries may print."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, descriptor)
            if nowhere != descriptor:
                os.close(nowhere)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
    # A run does not fail because its messages cannot be written: the disk is full, or the reader has left.
    errors = _Unfailing(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(errors, errors="backslashreplace", line_buffering=True, write_through=True)


class _Unfailing(io.FileIO):
    """A file that takes what it cannot write."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


if __name__ == "__main__":
    sys.exit(main())
