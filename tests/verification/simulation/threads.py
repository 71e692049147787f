"""The module `concurrent.futures` and `queue.SimpleQueue` of a simulated world."""

import concurrent.futures
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any

from tests.verification.simulation.world import Thread, current_world


class Future:
    """`concurrent.futures.Future`. In sets, as the package keeps them, the order is that in which they were made."""

    def __init__(self) -> None:
        self._number = current_world().number()
        self._outcome: tuple[Any, BaseException | None] | None = None
        self.waiting: list[Thread] = []

    def __hash__(self) -> int:
        return self._number

    def _end(self, value: Any, error: BaseException | None) -> None:
        self._outcome = value, error
        for thread in self.waiting:
            current_world().wake(thread)

    def set_result(self, value: Any) -> None:
        self._end(value, None)

    def set_exception(self, error: BaseException) -> None:
        self._end(None, error)

    def cancel(self) -> None:
        if self._outcome is None:
            self._end(None, CancelledError())

    def done(self) -> bool:
        return self._outcome is not None

    def exception(self) -> BaseException | None:
        wait([self])
        assert self._outcome is not None
        return self._outcome[1]

    def result(self) -> Any:
        if (error := self.exception()) is not None:
            raise error
        assert self._outcome is not None
        return self._outcome[0]


_Waited = namedtuple("_Waited", ("done", "not_done"))


def wait(
    futures: Iterable[Future], timeout: float | None = None, return_when: str = concurrent.futures.ALL_COMPLETED
) -> _Waited:
    """`concurrent.futures.wait` for all, or for the first."""
    world, futures = current_world(), [*futures]
    world.call("wait")
    end = None if timeout is None else world.now + timeout
    while (left := [future for future in futures if not future.done()]) and (end is None or world.now < end):
        if return_when == concurrent.futures.FIRST_COMPLETED and len(left) < len(futures):
            break
        for future in left:
            future.waiting.append(world.thread)
        world.block(None if end is None else end - world.now)
        for future in left:
            future.waiting.remove(world.thread)
    return _Waited({future for future in futures if future.done()}, {*left})


class Queue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._waiting: list[Thread] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        for thread in self._waiting[:1]:
            current_world().wake(thread)
        del self._waiting[:1]

    def get(self) -> Any:
        world = current_world()
        while not self._items:
            self._waiting.append(world.thread)
            world.block(None)
        return self._items.pop(0)


class Executor:
    """`concurrent.futures.ThreadPoolExecutor`."""

    def __init__(self, workers: int) -> None:
        self._num_workers = workers
        self._tasks = Queue()
        self._threads: list[Thread] = []
        self._waiting: list[Future] = []

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        future = Future()
        self._waiting.append(future)
        self._tasks.put((future, function, arguments))
        if len(self._threads) < self._num_workers:
            self._threads.append(Thread(target=self._work, name=f"worker {len(self._threads)}"))
            self._threads[-1].start()
        return future

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(function, item) for item in items]
        return (future.result() for future in futures)

    def shutdown(self, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future in self._waiting:
                future.cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, arguments = task
            self._waiting.remove(future)
            if future.done():  # cancelled
                continue
            try:
                future.set_result(function(*arguments))
            except Exception as error:  # not DeadError, nor pytest's own of a test that has taken too long
                future.set_exception(error)
