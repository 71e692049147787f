"""Who is missing: every rank tells where it is, and when something hangs or dies the log says which rank, where, in which phase.

A thread on each rank sends a beat a second to the store through which the ranks met. When its own rank does not move
for long, it writes phase, step and Python stacks to ``hang/rank{r}.txt`` in the run directory; rank 0's thread compares
all beats and names those that others wait for. Beats, not collectives: what hangs are collectives.
"""

import faulthandler
import json
import os
import platform
import re
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from dali_train.launch import Launch
from dali_train.status import RunError
from dali_train.timing import PhaseClock

LATE_S = 30.0  # without progress: rank 0 says whom it waits for
BEAT_S = 1.0
SILENT_S = 4.0  # without a beat: dead, stopped or unreachable
# Ranks meet in these phases, or take their time in them: too long is for the process group's timeout to tell.
_LONG_PHASES = {"start", "evaluation", "checkpoint"}
_LOST_PEER = re.compile(r"gloo|nccl|connection|timed? ?out|socket|store", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Where a rank is. `age_s`: since it entered the phase; `silent_s`: since it told so."""

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
    """Watches this rank through its `clock` until closed.

    Args:
        timeout_s: without progress for so long a rank of several writes its report and ends its process; a single
            process only reports.
    """

    def __init__(self, launch: Launch, clock: PhaseClock, directory: Path, data_root: str, timeout_s: float) -> None:
        self._launch, self._clock, self._directory, self._data_root = launch, clock, directory, data_root
        self._timeout_s = timeout_s
        self._late_s = min(LATE_S, timeout_s / 2)
        self._store = _connect(launch) if launch.world_size > 1 else None
        self._count = 0
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> (count of its last beat, when that was new here)
        self._closing = threading.Event()
        self._send()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self, error: BaseException | None) -> None:
        """The run is over. After an error rank 0 stays a moment to find out who else ended, and says so."""
        self._closing.set()
        self._thread.join()
        if error is None or self._store is None:
            return
        lost_peer = (
            isinstance(error, RuntimeError) and not isinstance(error, RunError) and _LOST_PEER.search(str(error)) is not None
        )
        first_line = next(iter(str(error).splitlines()), "")
        if not self._send(ended=f"{type(error).__name__}: {first_line}", lost_peer=lost_peer):
            self._say(f"the store of rank 0 on {self._launch.host}:{self._launch.port} does not answer: rank 0 ended first")
        if not lost_peer:
            return
        self._write_report(f"lost touch with the other ranks: {first_line}")
        if self._launch.rank == 0:
            self._try_to_collect()
            time.sleep(SILENT_S + BEAT_S)  # silence shows by waiting
            self._say(f"lost touch with other ranks. {self._missing()}")

    def _watch(self) -> None:
        next_warning, reported = self._late_s, False
        while not self._closing.wait(BEAT_S):
            self._send()
            age = time.monotonic() - self._clock.phase_start
            if self._launch.rank == 0 and age >= 2 * BEAT_S:
                self._try_to_collect()  # early enough to know who is silent when it matters
            if age < self._late_s:
                next_warning, reported = self._late_s, False
                continue
            if age >= next_warning:
                next_warning = 2 * age
                self._warn(age)
            if age >= self._timeout_s and not reported:
                reported = True
                self._write_report(f"no progress for {age:.0f} s (parallel.timeout_s is {self._timeout_s:g})")
                if self._launch.world_size > 1 and self._clock.phase not in _LONG_PHASES:
                    self._end(age)

    def _warn(self, age: float) -> None:
        if self._clock.phase == "data":
            self._say(f"data stall: waiting for images of step {self._clock.step} from {self._data_root} for {age:.0f} s")
        if self._launch.rank == 0 and self._store is not None:
            self._say(f"no progress for {age:.0f} s in phase {self._clock.phase} of step {self._clock.step}. {self._missing()}")

    def _end(self, age: float) -> None:
        """End the process: its main thread may never come back."""
        if self._launch.rank == 0:
            self._warn(age)
        self._say(f"ends after {age:.0f} s without progress; stacks are in {self._directory / 'hang'}")
        self._send(ended=f"no progress for {age:.0f} s", lost_peer=self._clock.phase != "data")
        if self._launch.rank == 0:
            time.sleep(3 * BEAT_S)  # it may hold the store that the others still have to tell
        os._exit(1)

    def _send(self, ended: str = "", lost_peer: bool = False) -> bool:
        """Tell the store where this rank is; False if it does not answer."""
        if self._store is None:
            return True
        self._count += 1
        beat = Beat(
            rank=self._launch.rank, host=platform.node(), pid=os.getpid(), step=self._clock.step, phase=self._clock.phase,
            age_s=time.monotonic() - self._clock.phase_start, count=self._count, ended=ended, lost_peer=lost_peer,
        )  # fmt: skip
        try:
            self._store.set(f"rank{self._launch.rank}", json.dumps(asdict(beat)))
        except RuntimeError:
            return False
        return True

    def _collect(self) -> list[tuple[Beat, float]]:
        """The last beat of every rank that sent one, and for how many seconds it has been silent since."""
        assert self._store is not None
        beats = []
        now = time.monotonic()
        for rank in range(self._launch.world_size):
            key = f"rank{rank}"
            if not self._store.check([key]):
                continue
            beat = Beat(**json.loads(self._store.get(key)))
            if beat.count != self._seen.get(rank, (0, 0.0))[0]:
                self._seen[rank] = beat.count, now
            beats.append((beat, now - self._seen[rank][1]))
        return beats

    def _try_to_collect(self) -> list[tuple[Beat, float]] | None:
        """None if there is no store, or it does not answer."""
        try:
            return self._collect() if self._store is not None else None
        except RuntimeError:
            return None

    def _missing(self) -> str:
        beats = self._try_to_collect()
        if beats is None:
            return f"Nor does the store on {self._launch.host}:{self._launch.port} answer."
        return name_missing(beats, self._launch.world_size)

    def _write_report(self, reason: str) -> None:
        path = self._directory / "hang" / f"rank{self._launch.rank}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            print(f"rank {self._launch.rank} of {self._launch.world_size} on {platform.node()}, pid {os.getpid()}", file=file)
            print(f"phase {self._clock.phase}, step {self._clock.step}", file=file)
            print(reason, file=file)
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}, Python stacks of all threads:", file=file, flush=True)
            faulthandler.dump_traceback(file)

    def _say(self, text: str) -> None:
        print(f"rank {self._launch.rank}: {text}", file=sys.stderr, flush=True)


def name_missing(beats: list[tuple[Beat, float]], world_size: int) -> str:
    """Which ranks the others wait for, from all ranks' beats and the seconds of silence since."""
    ranks = {beat.rank for beat, _ in beats}
    never = [f"rank {rank}: never came as far as the first step" for rank in range(world_size) if rank not in ranks]
    gone = [beat.describe(silent_s) for beat, silent_s in beats if beat.ended and not beat.lost_peer]
    silent = [beat.describe(silent_s) for beat, silent_s in beats if not beat.ended and silent_s >= SILENT_S]
    alive = [(beat, silent_s) for beat, silent_s in beats if beat.lost_peer or (not beat.ended and silent_s < SILENT_S)]
    furthest = max(((beat.step, beat.phase != "data") for beat, _ in beats), default=(0, False))
    late = [beat.describe(silent_s) for beat, silent_s in alive if (beat.step, beat.phase != "data") < furthest]
    named = [*gone, *silent, *never, *late]
    if named:
        return "Missing or late: " + "; ".join(named)
    if alive and not furthest[1]:
        return "All ranks wait for images, a data stall: " + "; ".join(beat.describe(silent_s) for beat, silent_s in alive)
    return "All ranks have come equally far: " + "; ".join(beat.describe(silent_s) for beat, silent_s in alive)


def _connect(launch: Launch) -> dist.Store:
    """A connection of our own: the process group's is busy while the main thread waits in it."""
    store = dist.TCPStore(launch.host, launch.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    return dist.PrefixStore("dali_train/beat", store)
