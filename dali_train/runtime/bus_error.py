"""A word on SIGBUS: it ends a process that touches a page of a mapped file which has become shorter."""

import ctypes
import os
import signal
from typing import Any

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_installed: list[Any] = []  # ctypes frees a callback that nobody holds


def explain_bus_errors(dataset: str) -> None:
    """Print one sentence before this process ends by SIGBUS.

    Python's own handlers cannot: they run later on the main thread, while the instruction that has failed is repeated
    at once, mostly in a thread of DALI's. This one runs where it fails, and lets it fail again without a handler.
    """
    text = (
        f"dali-train: bus error (SIGBUS): a mapped file could not be read. A shard of {dataset} was cut short or "
        f"written anew while in use, its disk failed, or /dev/shm is full: `dali-train data verify {dataset}` names "
        "the shard; restore it, and start again to resume\n"
    ).encode(errors="replace")
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def explain(number: int) -> None:
        os.write(2, text)
        libc.signal(number, None)  # SIG_DFL

    _installed[:] = [_Handler(explain)]
    libc.signal(signal.SIGBUS, ctypes.cast(_installed[0], ctypes.c_void_p))
