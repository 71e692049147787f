"""A simulated world for real code: machines, processes, threads and clocks, and what befalls them.

Threads are greenlets of one real thread. They switch only inside calls of the world: system calls on paths below
`ROOT`, waits, sleeps and locks. Each such call may also be where a process is killed or frozen, a machine loses power,
a disk is full or a clock jumps. All choices come from one generator, so that a history is a function of its seed.
"""

import errno
import heapq
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from greenlet import getcurrent, greenlet

from tests.verification.simulation.disk import Disk, Node

_CALL_S = 0.0005  # what a system call takes
_RETRY_S = 3.0  # what a failed call may cost a program that tries again
_MOST_CALLS = 100_000  # in one history: more are a loop without an end
_WRITES = frozenset({"open", "write", "mkdir", "link", "symlink", "rename", "utime"})  # fail on a full disk
_FAILS = frozenset(
    {
        "request",
        "answer",
        "open",
        "read",
        "write",
        "flush",
        "rename",
        "unlink",
        "scan",
        "stat",
        "utime",
        "mkdir",
        "symlink",
    }
)


class DeadError(BaseException):
    """Unwinds the stack of a process that has ended; no call of it has an effect any more."""


class ViolationError(Exception):
    """An invariant does not hold."""


FAULTS = {
    "delay": "the call takes up to 10 s",
    "freeze": "the process stops, for up to 4 min",
    "kill": "the process ends",
    "power": "the machine loses power",
    "full": "the disk is full, for up to 100 s",
    "error": "the call fails with EIO",
    "jump": "the machine's wall clock jumps",
}


@dataclass(eq=False)
class Machine:
    name: str
    boot: int = 1
    wall_offset: float = 1.7e9  # of the wall clock
    remembered: dict[Node, dict[str, tuple[float, Node | None]]] = field(default_factory=dict)
    """The names in directories of a shared disk, until when, and what they stood for."""


@dataclass(eq=False)
class Process:
    machine: Machine
    name: str
    pid: int
    started: float
    environ: dict[str, str]
    rank: int = 0
    num_ranks: int = 1
    threads: "list[Thread]" = field(default_factory=list)
    at_exit: list[Callable[[], Any]] = field(default_factory=list)  # called when it ends by itself
    at_end: list[Callable[[], Any]] = field(default_factory=list)  # called when it has ended in any way
    handlers: dict[int, Callable[[int, None], Any]] = field(default_factory=dict)  # of signals
    own: dict[str, Any] = field(default_factory=dict)  # objects that a module makes once in a process
    is_dead: bool = False
    status: int | None = None
    frozen_until: float = -1.0
    awake_since: float = 0.0
    held_up_s: float = 0.0  # by slow calls and failed ones, in all
    waiting: "list[Thread]" = field(default_factory=list)  # for its end

    @property
    def is_awake(self) -> bool:
        return not self.is_dead and self.frozen_until < 0


class Thread:
    """`threading.Thread` of a simulated process."""

    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        name: str = "thread",
        daemon: bool = False,
        process: Process | None = None,
    ) -> None:
        self._call = target, args, kwargs or {}
        self.name, self.daemon = name, daemon
        self.is_done, self.is_blocked, self.turn, self.woken = False, False, 0, False
        self.is_outside = False  # in code of another language
        self.joining: list[Thread] = []
        world = current_world()
        self.process = process or world.process
        self.greenlet = greenlet(self._run, world.hub)

    def start(self) -> None:
        world = current_world()
        self.process.threads.append(self)
        world.ready.append(self)
        world.call("start", self.name)

    def join(self, timeout: float | None = None) -> None:
        world = current_world()
        world.call("join", self.name)
        if not self.is_done:
            self.joining.append(world.thread)
            world.block(timeout)

    def is_alive(self) -> bool:
        return not self.is_done

    def _run(self) -> None:
        target, args, kwargs = self._call
        world = current_world()
        try:
            target(*args, **kwargs)
        except DeadError:
            return
        self.is_done = True
        for thread in self.joining:
            world.wake(thread)


class World:
    """One history.

    Args:
        rates: how often each of `FAULTS` happens per call, and how often (switch) another thread goes on.
        script: instead of chance, what happens at which call.
    """

    def __init__(
        self, seed: int, rates: dict[str, float], *, most_faults: int = 3, script: dict[int, str] | None = None
    ) -> None:
        self.random = Random(seed)
        self._switch_rate, self._most_faults = rates["switch"], most_faults
        self.script = script
        self.keep: str | None = None  # what a power failure keeps; None: by chance
        self.now = 0.0  # seconds
        self.calls = 0
        self.calls_with_faults: int | None = None  # until `stop_faults`
        self.disk = Disk(self)
        self.hub = getcurrent()
        self.ready: list[Thread] = []
        self._sleeping: list[tuple[float, int, Thread, int]] = []
        self._number = 100
        self._current: Thread | None = None
        self.processes: list[Process] = []
        self.stores: list[Any] = []  # object stores
        self.trace: list[tuple[float, str, str, str]] | None = None
        self.watch: Callable[[], None] = lambda: None  # called between two calls, may raise ViolationError
        self.violation: ViolationError | None = None  # that a thread has noticed
        self.num_faults = 0
        self._weights = {name: rate for name, rate in rates.items() if name in FAULTS and rate}
        self._fault_share = 0.0
        self._fuel = self._gap()

    # Threads and time

    @property
    def thread(self) -> Thread:
        assert self._current is not None
        return self._current

    @property
    def process(self) -> Process:
        assert self._current is not None
        return self._current.process

    def check_alive(self) -> None:
        """Raises DeadError: the calling process has ended."""
        if self._current is None or self._current.process.is_dead:
            raise DeadError

    def wall(self, machine: Machine | None = None) -> float:
        if machine is None:
            machine = None if self.disk.shared or self._current is None else self.process.machine
        return self.now + (machine.wall_offset if machine is not None else 1.7e9)

    def number(self) -> int:
        self._number += 1
        return self._number

    def spawn(
        self, machine: Machine, main: Callable[[], Any], name: str, environ: dict[str, str] | None = None
    ) -> Process:
        """Start a process. `main` is its main thread: what it returns is the exit status; an exception
        is none that the package documents, and ends the history."""
        process = Process(machine, name, self.number(), self.now, environ or {}, awake_since=self.now)
        self.processes.append(process)

        def run() -> None:
            status = main() or 0
            self._end_of_interpreter(process, status)

        thread = Thread(run, name="main", process=process)
        process.threads.append(thread)
        self.ready.append(thread)
        return process

    def _end_of_interpreter(self, process: Process, status: int) -> None:
        """As CPython ends: threads that are no daemons are waited for, then those registered to be told are told, then
        daemons stop wherever they are."""
        for thread in process.threads[1:]:
            if not thread.daemon and not thread.is_done:
                thread.join()
        for told in reversed(process.at_exit):
            told()
        aborts = any(thread.is_outside for thread in process.threads)  # C++ and Rust cannot unwind then
        self.end(process, -6 if aborts else status)

    def end(self, process: Process, status: int) -> None:
        """A process ends, in any way: from here on it has no effect. Its locks are released."""
        if process.is_dead:
            return
        process.is_dead, process.status = True, status
        self.note(f"{process.name} ends with status {status}")
        self.disk.close_all(process)
        for thread in process.waiting:
            self.wake(thread)
        for told in process.at_end:
            told()

    def wait_for(self, process: Process) -> int:
        """Wait for a process's end and return its status."""
        while not process.is_dead:
            process.waiting.append(self.thread)
            self.block(None)
        assert process.status is not None
        return process.status

    def lose_power(self, machine: Machine) -> None:
        """End all processes of a machine, and forget what is not on the disk."""
        for process in self.processes:
            if process.machine is machine:
                self.end(process, -9)
        machine.boot += 1
        machine.remembered.clear()
        if self.disk.shared:  # the server goes on; what this machine has not sent is lost
            self.disk.forget(machine)
        else:
            self.disk.lose_power(self.keep or self.random.choice(("none", "all", "some", "some")))

    def block(self, timeout: float | None) -> bool:
        """Let others go on until `wake`, or for `timeout` seconds; return whether woken."""
        thread = self.thread
        thread.turn += 1
        thread.woken, thread.is_blocked = False, True
        if timeout is not None:
            heapq.heappush(self._sleeping, (self.now + max(timeout, 0.0), self.number(), thread, thread.turn))
        self.hub.switch()
        if thread.process.is_dead:
            raise DeadError
        return thread.woken

    def wake(self, thread: Thread) -> None:
        if thread.is_blocked and not thread.process.is_dead:
            thread.turn += 1
            thread.woken, thread.is_blocked = True, False
            self.ready.append(thread)

    def run(self) -> None:
        """Go on until nothing is left to do. Raises ViolationError: an invariant is broken, or processes hang."""
        ready, sleeping, random = self.ready, self._sleeping, self.random.random
        try:
            while True:
                while sleeping and (sleeping[0][0] <= self.now or not ready):
                    at, _, thread, turn = heapq.heappop(sleeping)
                    if turn == thread.turn and not thread.process.is_dead:
                        self.now = max(self.now, at)
                        thread.turn += 1
                        thread.is_blocked = False
                        ready.append(thread)
                if not ready:
                    if hanging := [process.name for process in self.processes if not process.is_dead]:
                        raise ViolationError(f"{', '.join(hanging)} wait for ever")
                    return
                place = int(random() * len(ready))
                ready[place], ready[-1] = ready[-1], ready[place]
                thread = ready.pop()
                process = thread.process
                if process.is_dead:
                    continue
                if process.frozen_until > self.now:
                    thread.turn += 1
                    heapq.heappush(sleeping, (process.frozen_until, self.number(), thread, thread.turn))
                    continue
                if process.frozen_until >= 0:
                    process.frozen_until, process.awake_since = -1.0, self.now
                    self.note(f"{process.name} wakes")
                self._current = thread
                thread.greenlet.switch()
                self._current = None
                if self.violation is not None:
                    raise self.violation
                self.watch()
        finally:
            self._unwind()

    def _unwind(self) -> None:
        """End the stacks of all greenlets, which have no effect any more."""
        for process in self.processes:
            process.is_dead = True
            for thread in process.threads:
                self._current = thread
                while not thread.greenlet.dead:
                    with suppress(DeadError):  # of one that never began
                        thread.greenlet.throw(DeadError)
        self._current = None

    # Faults

    def stop_faults(self) -> None:
        """From here on, nothing fails any more."""
        self._weights, self.disk.full_until = {}, -1.0
        self.calls_with_faults = self.calls
        if self.script is not None:
            self.script = {}

    def note(self, what: str) -> None:
        if self.trace is not None:
            who = (self.process.name, self.thread.name) if self._current is not None else ("world", "")
            self.trace.append((self.now, *who, what))

    def call(self, name: str, path: str = "", torn: Callable[[], None] | None = None) -> None:
        """Note a system call: the point at which anything may happen.

        Args:
            torn: does a part of it, if the process is killed within.
        """
        thread = self._current
        if thread is None or thread.process.is_dead:
            raise DeadError
        self.calls += 1
        self.now += _CALL_S
        if self.trace is not None:
            self.note(f"{name} {path}")
        if self.disk.full_until > self.now and name in _WRITES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if self.script is not None:
            if self.calls in self.script:
                self._happen(self.script[self.calls], name, path, torn)
            elif self.calls > _MOST_CALLS:
                raise ViolationError(f"{_MOST_CALLS:,} calls and no end")
            return
        self._fuel -= 1
        if self._fuel <= 0:
            if self.calls > _MOST_CALLS:
                raise ViolationError(f"{_MOST_CALLS:,} calls and no end")
            self._fuel = self._gap()
            if self._weights and self.random.random() < self._fault_share:
                kind = self.random.choices([*self._weights], [*self._weights.values()])[0]
                self._happen(kind, name, path, torn)
            else:
                self._switch()

    def _gap(self) -> int:
        """Return after how many calls something happens next."""
        if self.script is not None:
            return 0
        if self.num_faults >= self._most_faults:
            self._weights = {}
        faults = sum(self._weights.values())
        total = self._switch_rate + faults
        if total <= 0:
            return _MOST_CALLS
        self._fault_share = faults / total
        return 1 + int(math.log(1.0 - self.random.random()) / math.log(1.0 - min(total, 0.99)))

    def _switch(self) -> None:
        self.ready.append(self.thread)
        thread = self.thread
        self.hub.switch()
        if thread.process.is_dead:
            raise DeadError

    def _happen(self, kind: str, name: str, path: str, torn: Callable[[], None] | None) -> None:
        self.num_faults += 1
        random, process = self.random, self.process
        self.note(f"here: {kind}")
        if kind == "kill" or kind == "power":
            if torn is not None:
                torn()
            if kind == "kill":
                self.end(process, -9)
            else:
                self.lose_power(process.machine)
            raise DeadError
        if kind == "freeze":
            process.frozen_until = self.now + random.choice((0.5, 2.0, 10.0, 29.0, 31.0, 70.0, 200.0)) * random.uniform(
                0.8, 1.2
            )
            self._switch()
        elif kind == "delay":
            delay_s = random.choice((0.05, 0.3, 1.0, 10.0)) * random.random()
            process.held_up_s += delay_s
            self.block(delay_s)
        elif kind == "full":
            self.disk.full_until = self.now + random.choice((0.0, 1.0, 100.0))
            if name in _WRITES:
                if torn is not None:
                    torn()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        elif kind == "error":
            if name in _FAILS:
                process.held_up_s += _RETRY_S
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        elif kind == "jump":
            process.machine.wall_offset += random.choice((-86_400.0, -60.0, -1.0, 1.0, 60.0, 86_400.0))


_WORLD: list[World] = []  # the current one


def current_world() -> World:
    return _WORLD[-1]


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        world = _WORLD[-1] if _WORLD else None
        if world is None or world._current is None or world.process.is_dead:  # in a finalizer
            return
        world.call("set")
        for thread in self._waiting:
            world.wake(thread)
        self._waiting = []

    def wait(self, timeout: float | None = None) -> bool:
        world = current_world()
        world.call("wait")
        if not self._is_set:
            self._waiting.append(world.thread)
            if not world.block(timeout) and world.thread in self._waiting:
                self._waiting.remove(world.thread)
        return self._is_set


class Lock:
    """`threading.Lock`."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: list[Thread] = []

    def __enter__(self) -> None:
        world = current_world()
        world.call("lock")
        while self._is_held:
            self._waiting.append(world.thread)
            world.block(None)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        for thread in self._waiting[:1]:
            current_world().wake(thread)
        del self._waiting[:1]


class Condition(Lock):
    """`threading.Condition`."""

    def __init__(self) -> None:
        super().__init__()
        self._asleep: list[Thread] = []

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._asleep.append(current_world().thread)
            self.__exit__()
            current_world().block(None)
            self.__enter__()

    def notify_all(self) -> None:
        for thread in self._asleep:
            current_world().wake(thread)
        self._asleep = []


class Clock:
    """The module `time`."""

    @staticmethod
    def monotonic() -> float:
        return current_world().now

    thread_time = monotonic

    @staticmethod
    def time() -> float:
        world = current_world()
        return world.wall(world.process.machine)

    @staticmethod
    def sleep(seconds: float) -> None:
        world = current_world()
        world.call("sleep")
        world.block(seconds)

    @staticmethod
    def strftime(_: str) -> str:
        return "2026-01-01 00:00:00"


class Threading:
    """The module `threading`."""

    Thread, Event, Lock, Condition = Thread, Event, Lock, Condition
