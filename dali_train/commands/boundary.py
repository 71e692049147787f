"""The boundary of every command: a fault of input or a signal becomes one line and an exit status.

Only a bug passes it: its traceback is what helps to correct it.
"""

import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from dali_train.data.convert.datasets import DATASETS, advice
from dali_train.data.progress import LINE_INTERVAL_S
from dali_train.errors import NoDatasetError, UserError, explain, write_now
from dali_train.runtime.launch import is_first_on_host, leave_to_torchrun, tell_torchrun
from dali_train.runtime.process import importing_torch
from dali_train.text import printable

TERMINAL_INTERVAL_S = 1.0
"""Between two signs of life on a terminal while torch is imported."""


def run_command(name: str, work: Callable[[], int]) -> int:
    """Return the exit status of `work`, after printing its error as one line that begins with `name`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # its file has been replaced by a terminal, which cannot seek
                stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    try:
        status = work()
        _flush_output()
        return status
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads_on():
            return 1
        explained = explain(error)
        if explained is None:
            raise
        message, status = explained
        if isinstance(error, NoDatasetError):
            message = f"{error.problem}: {advice(error.root, DATASETS, indexing=error.indexing)}"
        reported_elsewhere = isinstance(error, UserError) and error.reported_elsewhere
    line = printable(f"{name}: {message}", keep="\n")
    if reported_elsewhere:
        leave_to_torchrun()
    else:  # in one write, including the line break, because several ranks may print at once
        tell_torchrun(line)
        sys.stderr.write(line + "\n")
    if status == 128 + signal.SIGINT and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C while Python ends is no error of its own
    return status


def _flush_output() -> None:
    """Write what was printed. Raises OSError: it cannot be written, with the output's name for the message."""
    try:
        sys.stdout.flush()
    except OSError as error:
        error.filename = "standard output"
        if not isinstance(error, BrokenPipeError):
            _silence_output()
        raise


def _nobody_reads_on() -> bool:
    """Return whether it is the standard output that is broken, as in `dali-train plan ... | head`, and silence it."""
    with suppress(OSError):  # in a notebook it is no file
        descriptor = sys.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            _silence_output()
            return True
    return False


def _silence_output() -> None:
    """Let what is left to write lead to nowhere: Python flushes it when it ends, and would fail again."""
    with suppress(OSError):  # in a notebook it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Import torch and what needs it. Ctrl-C then ends the process at once, with one line: raised inside an import,
    KeyboardInterrupt reaches code that takes it for a missing module, or an extension that ends the process."""

    def end(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT or "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun ends ranks after an error
            write_now(f"{name}: stopped with {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}\n")
        os._exit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            if signal.getsignal(number) is default:  # `train` has handlers of its own
                before[number] = signal.signal(number, end)
    ended = threading.Event()
    teller = threading.Thread(target=_tell_seconds, args=(ended,), daemon=True)
    if is_first_on_host():
        teller.start()
    try:
        with importing_torch():
            yield
    finally:
        ended.set()
        if teller.is_alive():
            teller.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell_seconds(ended: threading.Event) -> None:
    """Say now and then how long the imports have taken, until they have ended: from a network file system it may be
    minutes."""
    start_s, text = time.monotonic(), ""
    is_terminal = sys.stderr.isatty()
    while not ended.wait(TERMINAL_INTERVAL_S if is_terminal else LINE_INTERVAL_S):
        text = f"importing torch and DALI: {time.monotonic() - start_s:.0f} s"
        sys.stderr.write(f"\r{text}" if is_terminal else f"{text}\n")
        sys.stderr.flush()
    if is_terminal and text:
        sys.stderr.write(f"\r{' ' * len(text)}\r")
        sys.stderr.flush()
