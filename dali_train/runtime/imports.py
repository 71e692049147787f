"""How torch is imported: in less time."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing_torch() -> Iterator[None]:
    """Keep the garbage collector away from what is imported within, which stays: looking for garbage among its half a
    million objects takes a fifth of the time to import them, and afterwards a third of a second each time."""
    fresh = "torch" not in sys.modules
    if fresh:
        gc.disable()
    try:
        yield
    finally:
        if fresh:
            gc.freeze()
            atexit.register(gc.unfreeze)  # at the end Triton's extension names everything that was not collected
            gc.enable()
