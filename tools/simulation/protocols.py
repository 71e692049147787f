"""The protocols that are simulated: which processes run the package's code, and what must hold.

A protocol is a class whose object is one history: its constructor starts the processes, `watch` is called between two
calls, and `end` when nothing is left to do.
"""

from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from dali_train.errors import ConfigError
from dali_train.runtime import lock
from dali_train.runtime.lock import BEAT_S, FILE, STALE_S, RunLock
from tools.simulation.disk import ROOT, Node
from tools.simulation.world import Clock, Machine, Process, ViolationError, World

RUN = Path(ROOT) / "run"


class Protocol:
    """One history of a protocol in `world`."""

    modules: ClassVar[tuple[ModuleType, ...]]  # whose clock and threads are simulated
    replaced: ClassVar[dict[str, Any]] = {}  # other names of those modules
    rates: ClassVar[dict[str, float]]

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        world.watch = self.watch

    def watch(self) -> None:
        """Raises ViolationError: an invariant does not hold between two calls."""

    def end(self) -> None:
        """Raises ViolationError: an invariant does not hold in the end."""

    def machines(self, most: int) -> list[Machine]:
        """Return one machine with its own disk, or several on a server's."""
        number = self.random.randint(1, most)
        self.world.disk.shared = number > 1
        self.world.disk.journaled = self.random.random() < 0.5
        return [Machine(f"n{number}", wall_offset=1.7e9 + self.random.uniform(-5, 5)) for number in range(number)]


class Lock(Protocol):
    """Starts of the same run, here and on other machines.

    A run that trains owns the lock; if it has lost the lock, even if nobody has it now, it ends at its next heartbeat.
    So two never train at once for longer than that. When all have ended, another start gets the lock in time.
    """

    modules = (lock,)
    rates = dict(switch=0.2, delay=0.01, freeze=0.02, kill=0.015, power=0.005, full=0.005, error=0.01, jump=0.01)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.training: dict[Process, bytes] = {}  # and the tokens in their locks
        self.lost: dict[Process, float] = {}  # those whose lock is another's or gone: until when they may train
        self.owner: Node | None = None  # the lock's file
        machines = self.machines(3)
        world.spawn(Machine("operator"), lambda: self._operate(machines), "operator")

    def _operate(self, machines: list[Machine]) -> int:
        """Start runs, wait for their ends, then start one more that must be able to."""
        world, random = self.world, self.random
        started = []
        for number in range(random.randint(2, 4)):
            started.append(
                world.spawn(random.choice(machines), lambda: self._train(random.randint(0, 2)), f"run {number}")
            )
            world.block(random.choice((0.0, 0.0, 0.3, 5.0, 40.0)) * random.random())
        for process in started:
            world.wait_for(process)
        world.stop_faults()
        began = world.now
        if world.wait_for(world.spawn(Machine("another"), lambda: self._train(0), "last run")) != 0:
            raise ViolationError("nobody trains, and another start does not get the lock")
        if world.now - began > STALE_S + BEAT_S:
            raise ViolationError(f"a start took {world.now - began:.1f} s, though nobody trains")
        return 0

    def _train(self, num_steps: int) -> int:
        try:
            held = RunLock(RUN, lambda _: None, {})
        except ConfigError:
            return 2
        process = self.world.process
        self.training[process] = held.holder.token.encode()
        self._look()
        for _ in range(num_steps):
            Clock.sleep(self.random.choice((0.1, 2.0, 8.0)))
        del self.training[process]
        held.release()
        return 0

    def watch(self) -> None:
        if self.training and self.world.disk.entry("run", FILE) is not self.owner:
            self._look()
        for process, end in [*self.lost.items()]:
            if process.is_dead or process not in self.training:
                del self.lost[process]
            elif process.is_awake and self.world.now > max(end, process.awake_since + BEAT_S) + process.held_up_s + 1.0:
                raise ViolationError(f"{process.name} trains on without the lock")

    def _look(self) -> None:
        self.owner = self.world.disk.entry("run", FILE)
        content = bytes(self.owner.data) if self.owner is not None else b""
        for process, token in self.training.items():
            if token not in content:
                self.lost.setdefault(process, self.world.now + BEAT_S - process.held_up_s)


PROTOCOLS: dict[str, type[Protocol]] = {"lock": Lock}
