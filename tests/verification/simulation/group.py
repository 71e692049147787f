"""The process group of a simulated run: what `torch.distributed` does for the ranks, and how it fails with them."""

from collections.abc import Callable
from typing import Any

import torch

from tests.verification.simulation.world import Process, Thread, World, current_world


class Group:
    """A group of all ranks. A collective ends with an error where a rank that is needed has ended.

    Args:
        timeout_s: after which a collective gives up.
    """

    def __init__(self, world: World, size: int, timeout_s: float = 600.0) -> None:
        self.world, self.size, self.timeout_s = world, size, timeout_s
        self.members: dict[int, Process] = {}
        self._next = [0] * size  # the number of each rank's next collective
        self._given: dict[int, dict[int, Any]] = {}  # by collective and rank
        self._waiting: list[Thread] = []
        self._sent: dict[tuple[int, int], list[Any]] = {}

    def join(self, rank: int) -> None:
        process = self.world.process
        process.rank, process.num_ranks = rank, self.size
        self.members[rank] = process
        process.at_end.append(self._wake)

    def _wake(self) -> None:
        for thread in self._waiting:
            self.world.wake(thread)
        self._waiting = []

    def give(self, value: Any) -> int:
        """Begin a collective; return its number."""
        self.world.call("collective")
        rank = self.world.process.rank
        number = self._next[rank]
        self._next[rank] += 1
        self._given.setdefault(number, {})[rank] = value
        self._wake()
        return number

    def take(self, number: int, ranks: Callable[[], bool] | None = None) -> dict[int, Any]:
        """Wait until all ranks, or those of `ranks`, have given their part; return all parts."""
        given = self._given[number]
        self._wait(ranks or (lambda: len(given) == self.size))
        return given

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        end = self.world.now + self.timeout_s
        while not is_ready():
            if any(process.is_dead for process in self.members.values()):
                raise RuntimeError("Connection closed by peer")
            if self.world.now >= end:
                raise RuntimeError("Timed out waiting for a collective")
            self._waiting.append(self.world.thread)
            self.world.block(end - self.world.now)

    def send(self, value: Any, target: int) -> None:
        self.world.call("send")
        self._sent.setdefault((self.world.process.rank, target), []).append(value)
        self._wake()

    def receive(self, source: int) -> Any:
        self.world.call("receive")
        queue = self._sent.setdefault((source, self.world.process.rank), [])
        self._wait(lambda: bool(queue))
        return queue.pop(0)


def _broadcast(values: list[Any], src: int, group: Group) -> None:
    """The source does not wait for the others; those may not get anything if it is killed."""
    number = group.give([*values])
    if group.world.process.rank == src:
        return
    given = group.take(number, lambda: src in group._given[number])
    if group.members[src].status == -9 and group.world.random.random() < 0.5:
        raise RuntimeError("Connection closed by peer")
    values[:] = given[src]


def _gather(values: list[Any], value: Any, group: Group) -> None:
    given = group.take(group.give(value))
    values[:] = [given[rank] for rank in range(group.size)]


class _Work:
    def __init__(self, group: Group, number: int, tensor: torch.Tensor) -> None:
        self._group, self._number, self._tensor = group, number, tensor

    def wait(self) -> None:
        self._tensor.fill_(max(self._group.take(self._number).values()))


def _largest(tensor: torch.Tensor, op: Any, group: Group, async_op: bool) -> _Work:
    assert op == torch.distributed.ReduceOp.MAX and async_op
    return _Work(group, group.give(int(tensor)), tensor)


def _receive(tensor: torch.Tensor, source: int, group: Group) -> None:
    tensor.copy_(group.receive(source))


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "get_rank": lambda group=None: current_world().process.rank,
    "get_world_size": lambda group=None: current_world().process.num_ranks,
    "all_gather_object": _gather,
    "broadcast_object_list": _broadcast,
    "destroy_process_group": lambda group: None,
    "barrier": lambda group: group.take(group.give(None)),
    "all_reduce": _largest,
    "send": lambda tensor, target, group: group.send(tensor.clone(), target),
    "recv": _receive,
}
"""By their names in `torch.distributed`."""
