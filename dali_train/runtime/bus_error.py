"""Explaining SIGBUS, which kills a process that touches a page of a memory-mapped file that was truncated."""

import ctypes
import os
import signal
from typing import Any

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_installed: list[Any] = []  # ctypes frees callbacks without a reference


def explain_bus_errors(dataset: str) -> None:
    """Print one sentence before SIGBUS kills this process.

    Python's own handlers cannot do this: they run later on the main thread, while the failing instruction, mostly in a
    DALI thread, is retried at once. This handler runs in the failing thread, then lets the instruction fail again.
    """
    text = (
        f"dali-train: bus error (SIGBUS): a mapped file could not be read. A shard of {dataset} was truncated or "
        f"rewritten while in use, its disk failed, or /dev/shm is full: `dali-train data verify {dataset}` names the "
        "shard; restore it, and start again to resume\n"
    ).encode(errors="replace")
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def explain(number: int) -> None:
        os.write(2, text)
        libc.signal(number, None)  # SIG_DFL

    _installed[:] = [_Handler(explain)]
    libc.signal(signal.SIGBUS, ctypes.cast(_installed[0], ctypes.c_void_p))
