"""Heartbeats between ranks: the log says which rank hangs, lags or has died, on which host and in which phase.

Each rank sends a heartbeat per second to the rendezvous store, which rank 0's process hosts. Rank 0 compares all
heartbeats and names the ranks that the others wait for; the others notice when rank 0 no longer answers. A rank without
progress writes phase, step and Python stacks to ``hang/rank{r}.txt`` in the run directory. Heartbeats do not use
collectives, because collectives are what hangs.
"""

import faulthandler
import hashlib
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, Self, TypeVar

import torch.distributed as dist

from dali_train.errors import RunError, UserError
from dali_train.runtime.launch import Launch

Answer = TypeVar("Answer")

LATE_S = 30.0  # without progress: rank 0 logs which ranks it waits for
BEAT_S = 1.0
SILENT_S = 4.0  # without a beat: dead, stopped or unreachable
# These phases may take long: only the process group's timeout ends them.
_LONG_PHASES = {"start", "evaluation", "checkpoint"}
_PROGRESS = {"start": 0, "data": 1}  # within a step; ranks wait for one another in all phases after these
_MISSING = "Missing or late: "
_LOST_PEER = re.compile(r"gloo|nccl|connection|timed? ?out|socket|TCPStore", re.IGNORECASE)


class Position(Protocol):
    """The position of the training loop, such as the trainer's PhaseClock."""

    step: int
    phase: str
    phase_start: float  # of ``time.monotonic``


@dataclass
class Startup:
    """The position before the training loop has its own clock."""

    phase_start: float
    step: int = 0
    phase: str = "start"


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The state of a rank. `age_s`: seconds since it entered the phase."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    age_s: float
    count: int
    ended: str = ""  # what it ended with
    lost_peer: bool = False  # it ended because another rank did

    def describe(self, silent_s: float) -> str:
        who = f"rank {self.rank} on {self.host} (pid {self.pid})"
        where = f"in phase {self.phase} of step {self.step}"
        if self.ended:
            return f"{who}: ended {where} with {self.ended}"
        if silent_s >= SILENT_S:
            return f"{who}: silent for {silent_s:.0f} s, so it is dead, frozen or cut off; last seen {where}"
        stall = ", a data stall: it waits for images" if self.phase == "data" else ""
        return f"{who}: {where} for {self.age_s:.0f} s{stall}"


class Watchdog:
    """Watches this rank after the rendezvous; inside ``with`` by its own threads.

    After `Launch.timeout_s` without progress, a rank writes its report and ends its process; a single process only
    reports.

    Args:
        monotonic: the clock, in seconds, of `Position.phase_start`.
    """

    def __init__(self, launch: Launch, directory: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._launch = launch
        self._directory = directory
        self._now = monotonic
        self._position: Position = Startup(monotonic())
        self._data_source = ""
        self._late_s = self._next_warning = min(LATE_S, launch.timeout_s / 2)
        self._reported = False
        # For the last beat.
        self._ended = ""
        self._lost_peer = False
        # See `close`.
        self._cause = ""
        self._cause_reported_elsewhere = False
        self._count = 0
        self._beats: dict[int, tuple[Beat, float]] = {}  # rank -> (its last beat, when that was new here)
        self._answered = monotonic()  # when the store last answered
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._keys = [f"rank{rank}" for rank in range(launch.world_size)]
        self._store = _connect(launch) if launch.world_size > 1 else None
        if self._store is not None:
            if launch.rank == 0:
                for key in self._keys:  # asking for a key that is not there would wait for it
                    self._store.compare_set(key, "", "")
            self.beat()  # a rank that is lost right afterwards is known by host and pid

    def watch(self, position: Position, data_source: str) -> None:
        """Use `position` as this rank's position from now on; `data_source` is named if images do not arrive."""
        self._data_source = data_source
        self._position = position

    def __enter__(self) -> Self:
        # Two threads, since a heartbeat blocks while the store's process is frozen, perhaps forever.
        loops = (self._check_always, self._beat_always) if self._store is not None else (self._check_always,)
        self._threads = [threading.Thread(target=loop, name="watchdog", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if cause := self.close(error):
            lost = RunError(cause)
            lost.reported_elsewhere = self._cause_reported_elsewhere
            raise lost from error

    def close(self, error: BaseException | None) -> str:
        """Stop watching. If several ranks end with the same `error`, only one prints it. After an error rank 0 stays a
        moment, to find out which other ranks ended and to let them learn that it has.

        Returns:
            The cause, as far as it is known here, if `error` means that another rank was lost, or if another rank
            prints the same traceback; otherwise empty.
        """
        if self._closing.is_set():
            return self._cause
        self._closing.set()
        for thread in self._threads:
            thread.join(2 * BEAT_S)
        if error is None or self._store is None:
            return ""
        lost_peer = _is_lost_peer(error)
        first_line = next(iter(str(error).splitlines()), "")
        ended = f"{type(error).__name__}: {first_line}"
        store_answers = self._send_last(ended, lost_peer=lost_peer)
        if lost_peer:  # a consequence: name the rank that others wait for
            self._write_report(f"lost touch with the other ranks: {first_line}")
            self._cause, self._cause_reported_elsewhere = self._find_cause(store_answers)
        elif isinstance(error, UserError):  # one line, which the first of the ranks prints
            error.reported_elsewhere = self._is_reported_elsewhere(str(error))
        # A traceback, which the first of the ranks prints; digits are ranks and devices.
        elif isinstance(error, Exception) and self._is_reported_elsewhere(re.sub(r"\d+", "#", ended)):
            self._cause = ended
            self._cause_reported_elsewhere = True
        if self._launch.rank == 0 and not lost_peer:
            self._wait(2 * BEAT_S, lambda: all(beat.ended for beat, _ in self._beats.values()))
        return self._cause

    def _find_cause(self, store_answers: bool) -> tuple[str, bool]:
        """Return why this rank has lost touch with others, and whether another rank reports it.

        Rank 0 sees all heartbeats and names who is missing. If its store does not answer, rank 0 itself is the cause:
        then one rank of each host reports that, unless rank 0 had said goodbye, having reported its own error.
        """
        launch = self._launch
        if launch.rank == 0:
            self._wait(SILENT_S + BEAT_S)  # a rank is silent only after some seconds
            self.beat()
            return f"lost touch with other ranks. {name_missing(self._silences(), launch.world_size)}", False
        if store_answers:
            return "lost touch with other ranks: rank 0 says which", True
        rank_0_reported = any(beat.rank == 0 and beat.ended for beat, _ in self._beats.values())
        cause = f"the store of rank 0 on {launch.host}:{launch.port} does not answer: rank 0 ended first"
        return f"lost touch with other ranks: {cause}", rank_0_reported or not self._speaks_for_host

    def _is_reported_elsewhere(self, message: str) -> bool:
        """Return whether another rank has ended with the same message before this one."""
        key = f"reported {hashlib.sha256(message.encode()).hexdigest()}"
        rank = str(self._launch.rank)

        def ask() -> str:
            assert self._store is not None
            return str(self._store.compare_set(key, "", rank).decode())

        return self._answer(ask) not in (rank, None)

    def _wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Wait while checking the others' heartbeats, for at most `seconds`, or until a condition holds."""
        end = self._now() + seconds
        while self._now() < end and not until():
            time.sleep(BEAT_S / 10)
            self.beat()

    def beat(self) -> bool:
        """Send this rank's heartbeat and read rank 0's, or on rank 0 all ranks'. Return False if the store failed."""
        assert self._store is not None
        self._count += 1
        position = self._position
        rank = self._launch.rank
        beat = Beat(
            rank=rank,
            host=platform.node(),
            pid=os.getpid(),
            step=position.step,
            phase=position.phase,
            age_s=self._age(),
            count=self._count,
            ended=self._ended,
            lost_peer=self._lost_peer,
        )
        is_asking = rank == 0 and (self._age() >= BEAT_S or self._ended != "")  # if all is well, not for every rank
        try:
            self._store.set(self._keys[rank], json.dumps(asdict(beat)))
            answers = self._store.multi_get(self._keys if is_asking else self._keys[:1])
        except RuntimeError:
            return False
        now = self._answered = self._now()
        for answer in filter(None, answers):
            beat = Beat(**json.loads(answer))
            known = self._beats.get(beat.rank)
            if known is None or known[0].count != beat.count:
                self._beats[beat.rank] = beat, now
        return True

    def check(self) -> bool:
        """Warn about late ranks and report a timeout; return whether this rank must end."""
        age = self._age()
        if age < self._late_s:
            self._next_warning = self._late_s
            self._reported = False
            return False
        if age >= self._next_warning:
            self._next_warning = age + self._late_s
            self._warn(age)
        if age < self._launch.timeout_s:
            return False
        if not self._reported:
            self._reported = True
            self._write_report(f"no progress for {age:.0f} s (parallel.timeout_s is {self._launch.timeout_s:g})")
        return self._launch.world_size > 1 and self._position.phase not in _LONG_PHASES

    @property
    def _speaks_for_host(self) -> bool:
        """Whether this rank reports that rank 0 is gone: one rank of each host, on rank 0's own host rank 1."""
        return self._launch.local_rank == 0 or self._launch.rank == 1

    def _age(self) -> float:
        """Return the seconds since this rank entered its phase."""
        return self._now() - self._position.phase_start

    def _beat_always(self) -> None:
        while not self._closing.wait(BEAT_S if self.beat() else 5 * BEAT_S):
            pass

    def _check_always(self) -> None:
        while not self._closing.wait(BEAT_S):
            if self.check():
                self._end()

    def _warn(self, age: float) -> None:
        phase, step = self._position.phase, self._position.step
        if phase == "data":
            self._say(f"data stall: waiting for images of step {step} from {self._data_source} for {age:.0f} s")
        if self._launch.rank == 0 and self._store is not None:
            missing = name_missing(self._silences(), self._launch.world_size)
            if phase not in _LONG_PHASES or missing.startswith(_MISSING):
                self._say(f"no progress for {age:.0f} s in phase {phase} of step {step}. {missing}")
        elif self._speaks_for_host:
            silent_s = self._now() - self._answered
            if self._store is not None and silent_s >= self._late_s / 2:
                known = [beat.describe(silent_s) for beat, _ in self._beats.values()]
                self._say(f"no answer from the store of rank 0. {_MISSING}{known[0] if known else 'rank 0'}")

    def _end(self) -> None:
        """End the process, whose main thread may be blocked forever."""
        age = self._age()
        if self._launch.rank == 0:
            self._warn(age)
        self._say(f"ends after {age:.0f} s without progress; stacks are in {self._directory / 'hang'}")
        self._send_last(f"no progress for {age:.0f} s", lost_peer=self._position.phase != "data")
        if self._launch.rank == 0:
            time.sleep(3 * BEAT_S)  # it holds the store that the others still report to
        os._exit(1)

    def _send_last(self, ended: str, *, lost_peer: bool) -> bool:
        """Send the last heartbeat; return False if the store does not answer, which must not delay the end."""
        self._ended, self._lost_peer = ended, lost_peer
        return self._answer(self.beat) is True

    def _answer(self, ask: Callable[[], Answer]) -> Answer | None:
        """Return the store's answer, or None if it does not answer."""
        answers: list[Answer] = []

        def work() -> None:
            with suppress(RuntimeError):
                answers.append(ask())

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(2 * BEAT_S)
        return answers[0] if answers else None

    def _silences(self) -> list[tuple[Beat, float]]:
        """Return the last beat of every rank that sent one, and the seconds since then, by rank."""
        now = self._now()
        return [(beat, now - seen) for _, (beat, seen) in sorted(self._beats.copy().items())]

    def _write_report(self, reason: str) -> None:
        launch = self._launch
        path = self._directory / "hang" / f"rank{self._launch.rank}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                file.write(f"rank {launch.rank} of {launch.world_size} on {platform.node()}, pid {os.getpid()}\n")
                file.write(f"phase {self._position.phase}, step {self._position.step}\n{reason}\n")
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}, Python stacks of all threads:\n")
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError as error:  # it must not hide what is reported
            self._say(f"{reason}; {path} could not be written ({error})")

    def _say(self, text: str) -> None:
        print(f"rank {self._launch.rank}: {text}", file=sys.stderr, flush=True)


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether torch's communication failed, directly or as the cause of another error."""
    first = error.__cause__ if isinstance(error, RunError) else error
    is_torchs = first is not None and not isinstance(first, UserError | OSError | ValueError | SystemExit)
    return isinstance(error, RuntimeError) and is_torchs and _LOST_PEER.search(str(error)) is not None


def name_missing(beats: list[tuple[Beat, float]], world_size: int) -> str:
    """Name the ranks that the others wait for, from each rank's last heartbeat and the seconds of silence since."""
    ranks = {beat.rank for beat, _ in beats}
    never = [f"rank {rank}: silent since the rendezvous" for rank in range(world_size) if rank not in ranks]
    furthest = max((_progress(beat) for beat, _ in beats), default=(0, 0))
    ended, silent, late, level = list[str](), list[str](), list[str](), list[str]()
    for beat, silent_s in beats:
        if beat.ended and not beat.lost_peer:
            group = ended
        elif silent_s >= SILENT_S and not beat.ended:
            group = silent
        else:
            group = late if _progress(beat) < furthest else level
        group.append(beat.describe(silent_s))
    if named := [*ended, *silent, *never, *late]:
        return _MISSING + "; ".join(named)
    stalled = furthest[1] == _PROGRESS["data"]
    return ("All ranks wait for images, a data stall: " if stalled else "All ranks are equally far: ") + "; ".join(
        level
    )


def _progress(beat: Beat) -> tuple[int, int]:
    return beat.step, _PROGRESS.get(beat.phase, 2)


def _connect(launch: Launch) -> dist.Store:
    """Open a second connection: the process group's is busy while the main thread waits in it."""
    store = dist.TCPStore(
        launch.host, launch.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    return dist.PrefixStore("dali_train/beat", store)
