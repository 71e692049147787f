"""Who is missing: every rank reports where it is, and when something hangs or dies the log says which rank, where, in
which phase.

A thread on each rank sends one heartbeat per second to the store through which the ranks met, which rank 0's process
holds. Rank 0 compares all beats and names those that others wait for; the others notice when rank 0 no longer answers.
A rank that does not move for long writes phase, step and Python stacks to ``hang/rank{r}.txt`` in the run directory.
Beats, not
collectives: what hangs are collectives.
"""

import faulthandler
import json
import os
import platform
import re
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol, Self

import torch.distributed as dist

from dali_train.errors import RunError
from dali_train.runtime.launch import Launch

LATE_S = 30.0  # without progress: rank 0 says whom it waits for
BEAT_S = 1.0
SILENT_S = 4.0  # without a beat: dead, stopped or unreachable
_ASK_RANK_0_BEATS = 3  # the others ask it for an answer only so often: it has many to answer
# Ranks take their time in these phases, so that alone is no fault, and what is too long the process group's timeout
# decides.
_LONG_PHASES = {"start", "evaluation", "checkpoint"}
_PROGRESS = {"start": 0, "data": 1}  # within a step; ranks wait for one another in all phases after these
_MISSING = "Missing or late: "
_LOST_PEER = re.compile(r"gloo|nccl|connection|timed? ?out|socket|store", re.IGNORECASE)


class Position(Protocol):
    """Where the training loop is; the trainer's PhaseClock is one."""

    step: int
    phase: str
    phase_start: float  # of ``time.monotonic``


@dataclass
class Startup:
    """The position before the training loop has a clock of its own."""

    step: int = 0
    phase: str = "start"
    phase_start: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Where a rank is. `age_s`: since it entered the phase."""

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
    """Watches this rank from the moment the ranks have met until closed.

    Args:
        timeout_s: without progress for this long a rank of several writes its report and ends its process; a single
            process only reports.
    """

    def __init__(self, launch: Launch, directory: Path, timeout_s: float) -> None:
        self._launch, self._directory, self._timeout_s = launch, directory, timeout_s
        self._clock: Position = Startup()
        self._data_source = ""
        self._late_s = min(LATE_S, timeout_s / 2)
        self._store = _connect(launch) if launch.world_size > 1 else None
        self._keys = [f"rank{rank}" for rank in range(launch.world_size)]
        self._count = 0
        self._beats: dict[int, tuple[Beat, float]] = {}  # rank -> (its last beat, when that was new here)
        self._answered = time.monotonic()  # when the store last answered
        self._named: set[int] = set()  # ranks whose loss was reported
        self._closing = threading.Event()
        if self._store is not None:
            self._meet()
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if self._store is not None:
            self._threads.append(threading.Thread(target=self._talk, name="watchdog's beat", daemon=True))
        for thread in self._threads:
            thread.start()

    def watch(self, clock: Position, data_source: str) -> None:
        """From here on the training loop's `clock` says where this rank is. `data_source` is named when images do not
        come."""
        self._data_source = data_source
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None) -> None:
        """The run is over. After an error rank 0 stays a moment to find out who else ended, and says so."""
        if self._closing.is_set():
            return
        self._closing.set()
        for thread in self._threads:
            thread.join(2 * BEAT_S)  # the beat's may wait for a store that does not answer
        if error is None or self._store is None:
            return
        lost_peer = (
            isinstance(error, RuntimeError)
            and not isinstance(error, RunError)
            and _LOST_PEER.search(str(error)) is not None
        )
        first_line = next(iter(str(error).splitlines()), "")
        if not self._send_last(f"{type(error).__name__}: {first_line}", lost_peer=lost_peer):
            self._say(
                f"the store of rank 0 on {self._launch.host}:{self._launch.port} does not answer: rank 0 ended first"
            )
        if not lost_peer:
            return
        self._write_report(f"lost touch with the other ranks: {first_line}")
        if self._launch.rank == 0:
            self._ask()
            time.sleep(SILENT_S + BEAT_S)  # silence shows by waiting
            self._ask()
            self._say(f"lost touch with other ranks. {name_missing(self._silences(), self._launch.world_size)}")

    def _meet(self) -> None:
        """Everyone's first beat, so that a rank lost right afterwards is known by host and pid."""
        assert self._store is not None
        self._send()
        try:
            self._store.wait(self._keys if self._launch.rank == 0 else self._keys[:1])
        except RuntimeError:  # one of them is lost already
            if self._launch.rank != 0:
                return
            for key in self._keys:  # asking for a key that is not there would wait for it
                self._store.compare_set(key, "", "")
        self._ask()

    def _talk(self) -> None:
        """Report and ask. A thread of its own: when the store's process is frozen it waits here, for ever perhaps."""
        beats = 0
        while True:
            sent = self._send()
            asking = (
                self._is_late(BEAT_S) if self._launch.rank == 0 else not self._beats or beats % _ASK_RANK_0_BEATS == 0
            )
            if sent and (not asking or self._ask()) and (asking or self._launch.rank == 0):
                self._answered = time.monotonic()
            beats += 1
            if self._closing.wait(BEAT_S if sent else 5 * BEAT_S):
                return

    def _watch(self) -> None:
        next_warning, reported = self._late_s, False
        while not self._closing.wait(BEAT_S):
            age = time.monotonic() - self._clock.phase_start
            if self._launch.rank != 0:
                self._watch_rank_0()
            if age < self._late_s:
                next_warning, reported = self._late_s, False
                self._named &= {0} if self._launch.rank != 0 else set()
                continue
            lost = self._lost()
            if age >= next_warning or lost - self._named:
                next_warning = max(next_warning, 2 * age)
                self._warn(age)
                self._named |= lost
            if age >= self._timeout_s and not reported:
                reported = True
                self._write_report(f"no progress for {age:.0f} s (parallel.timeout_s is {self._timeout_s:g})")
                if self._launch.world_size > 1 and self._clock.phase not in _LONG_PHASES:
                    self._end(age)

    def _watch_rank_0(self) -> None:
        """It cannot report its own silence, so the others do: one on each host, and rank 1 where rank 0's host has
        more."""
        silent_s = time.monotonic() - self._answered
        if silent_s < self._late_s:
            self._named.discard(0)
        elif 0 not in self._named and (self._launch.local_rank == 0 or self._launch.rank == 1):
            self._named.add(0)
            known = self._beats.get(0)
            described = known[0].describe(silent_s) if known is not None else f"rank 0: silent for {silent_s:.0f} s"
            self._say(f"no answer from the store of rank 0. Missing or late: {described}")

    def _is_late(self, seconds: float) -> bool:
        return time.monotonic() - self._clock.phase_start >= seconds

    def _lost(self) -> set[int]:
        """On rank 0: the ranks that have ended or been silent for long, also those that never sent a beat."""
        if self._launch.rank != 0 or self._store is None:
            return set()
        here = {beat.rank for beat, silent_s in self._silences() if not beat.ended and silent_s < self._late_s / 2}
        return set(range(self._launch.world_size)) - here

    def _warn(self, age: float) -> None:
        if self._clock.phase == "data":
            self._say(
                f"data stall: waiting for images of step {self._clock.step} from {self._data_source} for {age:.0f} s"
            )
        if self._launch.rank == 0 and self._store is not None:
            missing = name_missing(self._silences(), self._launch.world_size)
            if self._clock.phase not in _LONG_PHASES or missing.startswith(_MISSING):
                self._say(
                    f"no progress for {age:.0f} s in phase {self._clock.phase} of step {self._clock.step}. {missing}"
                )

    def _end(self, age: float) -> None:
        """End the process: its main thread may never come back."""
        if self._launch.rank == 0:
            self._warn(age)
        self._say(f"ends after {age:.0f} s without progress; stacks are in {self._directory / 'hang'}")
        self._send_last(f"no progress for {age:.0f} s", lost_peer=self._clock.phase != "data")
        if self._launch.rank == 0:
            time.sleep(3 * BEAT_S)  # it holds the store that the others still report to
        os._exit(1)

    def _send(self, ended: str = "", lost_peer: bool = False) -> bool:
        """Report to the store where this rank is; False if that fails."""
        assert self._store is not None
        self._count += 1
        clock = self._clock
        beat = Beat(
            rank=self._launch.rank,
            host=platform.node(),
            pid=os.getpid(),
            step=clock.step,
            phase=clock.phase,
            age_s=time.monotonic() - clock.phase_start,
            count=self._count,
            ended=ended,
            lost_peer=lost_peer,
        )
        try:
            self._store.set(self._keys[self._launch.rank], json.dumps(asdict(beat)))
        except RuntimeError:
            return False
        return True

    def _send_last(self, ended: str, *, lost_peer: bool) -> bool:
        """The same before the process ends, which a store that does not answer must not prevent."""
        sent: list[bool] = []
        thread = threading.Thread(target=lambda: sent.append(self._send(ended, lost_peer)), daemon=True)
        thread.start()
        thread.join(2 * BEAT_S)
        return sent == [True]

    def _ask(self) -> bool:
        """Get the beats: all of them on rank 0, rank 0's on the others. False if the store does not answer."""
        assert self._store is not None
        try:
            answers = self._store.multi_get(self._keys if self._launch.rank == 0 else self._keys[:1])
        except RuntimeError:
            return False
        now = time.monotonic()
        for answer in filter(None, answers):
            beat = Beat(**json.loads(answer))
            known = self._beats.get(beat.rank)
            if known is None or known[0].count != beat.count:
                self._beats[beat.rank] = beat, now
        return True

    def _silences(self) -> list[tuple[Beat, float]]:
        """The last beat of every rank that sent one, and for how many seconds it has been silent since."""
        now = time.monotonic()
        return [
            (beat, now - seen) for beat, seen in sorted(self._beats.copy().values(), key=lambda entry: entry[0].rank)
        ]

    def _write_report(self, reason: str) -> None:
        path = self._directory / "hang" / f"rank{self._launch.rank}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            print(
                f"rank {self._launch.rank} of {self._launch.world_size} on {platform.node()}, pid {os.getpid()}",
                file=file,
            )
            print(f"phase {self._clock.phase}, step {self._clock.step}", file=file)
            print(reason, file=file)
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}, Python stacks of all threads:", file=file, flush=True)
            faulthandler.dump_traceback(file)

    def _say(self, text: str) -> None:
        print(f"rank {self._launch.rank}: {text}", file=sys.stderr, flush=True)


def name_missing(beats: list[tuple[Beat, float]], world_size: int) -> str:
    """Which ranks the others wait for, from all ranks' beats and the seconds of silence since."""
    ranks = {beat.rank for beat, _ in beats}
    never = [f"rank {rank}: not heard of since the ranks met" for rank in range(world_size) if rank not in ranks]
    gone = [beat.describe(silent_s) for beat, silent_s in beats if beat.ended and not beat.lost_peer]
    silent = [beat.describe(silent_s) for beat, silent_s in beats if not beat.ended and silent_s >= SILENT_S]
    alive = [(beat, silent_s) for beat, silent_s in beats if beat.lost_peer or (not beat.ended and silent_s < SILENT_S)]
    furthest = max((_progress(beat) for beat, _ in beats), default=(0, 0))
    late = [beat.describe(silent_s) for beat, silent_s in alive if _progress(beat) < furthest]
    named = [*gone, *silent, *never, *late]
    if named:
        return _MISSING + "; ".join(named)
    if alive and furthest[1] == _PROGRESS["data"]:
        return "All ranks wait for images, a data stall: " + "; ".join(
            beat.describe(silent_s) for beat, silent_s in alive
        )
    return "All ranks have come equally far: " + "; ".join(beat.describe(silent_s) for beat, silent_s in alive)


def _progress(beat: Beat) -> tuple[int, int]:
    return beat.step, _PROGRESS.get(beat.phase, 2)


def _connect(launch: Launch) -> dist.Store:
    """A connection of our own: the process group's is busy while the main thread waits in it."""
    store = dist.TCPStore(
        launch.host, launch.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    return dist.PrefixStore("dali_train/beat", store)
