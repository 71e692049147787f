"""A thread that prepares what is needed next."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """``next()`` gives what `produce` returns, call after call, in order; a thread keeps `depth` results ready.

    An exception in `produce` is raised by the ``next()`` that would have given its result.
    """

    def __init__(self, produce: Callable[[], Item], depth: int, name: str) -> None:
        self._produce = produce
        self._thread = ThreadPoolExecutor(1, name)
        self._ready: deque[Future[Item]] = deque(self._thread.submit(produce) for _ in range(depth))

    def next(self) -> Item:
        item = self._ready.popleft().result()
        self._ready.append(self._thread.submit(self._produce))
        return item
