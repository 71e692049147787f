"""Faster import of torch."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing_torch() -> Iterator[None]:
    """Exempt the objects imported in this context from garbage collection: scanning half a million of them takes a
    fifth of the import time, and a third of a second in each later collection."""
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
