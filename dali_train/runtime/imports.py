"""Faster import of torch, and errors of optional packages that are not installed."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


def importing_torch() -> AbstractContextManager[None]:
    """Exempt the objects imported in this context from garbage collection: scanning half a million of them takes a
    fifth of the import time, and a third of a second in each later collection."""
    return nullcontext() if "torch" in sys.modules else uncollected()


@contextmanager
def uncollected() -> Iterator[None]:
    """Exempt the objects of this context, and all older ones, from garbage collection until the process ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # at the end Triton's extension names everything that was not collected
        gc.enable()


@contextmanager
def needing(package: str, *, extra: str, module: str) -> Iterator[None]:
    """Name the extra to install if an import in this context does not find `package`.

    Args:
        extra: the extra of this package, which the importing module ``dali_train.EXTRA`` is named after.
        module: ``__name__`` of the importing module; ``__main__`` ends the process with status 2.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"dali_train.{extra} needs {package} ({error}): pip install 'dali-train[{extra}]'"
        if module != "__main__":
            raise ImportError(message) from error
        print(message, file=sys.stderr)
        raise SystemExit(2) from None
