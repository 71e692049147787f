"""Requests to stop: signals, run.max_seconds and the end of the job. Here a rank only notes its wish.

Without torch, so that the handlers are there before its import: that takes seconds, and a signal meanwhile would kill.
"""

import os
import signal
import time
from collections.abc import Mapping
from enum import IntEnum
from types import FrameType

from dali_train.status import STOPPED_BY_TERM


class StopReason(IntEnum):
    """The larger number wins where ranks have different reasons."""

    NONE = 0
    USR1 = 1
    TERM = 2
    MAX_SECONDS = 3
    JOB_END = 4
    INTERRUPT = 5

    def describe(self) -> str:
        return {
            StopReason.USR1: "signal USR1",
            StopReason.TERM: STOPPED_BY_TERM,
            StopReason.MAX_SECONDS: "run.max_seconds is over",
            StopReason.JOB_END: "the job's time limit is near",
            StopReason.INTERRUPT: "Ctrl-C",
        }[self]


# Time in which a job must save and end: a tenth of its limit, at most this.
_LARGEST_MARGIN_S = 120.0


class StopRequests:
    """This rank's wish to stop. Make it in the main thread; from then on USR1 and TERM no longer end the process."""

    def __init__(self, max_seconds: float | None, environ: Mapping[str, str] = os.environ) -> None:
        self._signal = StopReason.NONE
        self._end = time.monotonic() + max_seconds if max_seconds is not None else None
        self._job_end = job_end(environ)
        # Idempotent, in any order, as often as they come: Slurm sends TERM twice before a time limit's KILL.
        signal.signal(signal.SIGUSR1, self._note)
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._interrupt)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = StopReason.USR1 if number == signal.SIGUSR1 else StopReason.TERM

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._signal = StopReason.INTERRUPT
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"\nstopping after this step; Ctrl-C again ends at once, without saving\n")  # print may be in use right now

    def ignore_further(self) -> None:
        """The run is saved. Python takes its handlers down before the process ends, and a late signal would change its status."""
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def reason(self) -> StopReason:
        if self._signal:
            return self._signal
        if self._end is not None and time.monotonic() >= self._end:
            return StopReason.MAX_SECONDS
        if self._job_end is not None and time.time() >= self._job_end:
            return StopReason.JOB_END
        return StopReason.NONE


def job_end(environ: Mapping[str, str]) -> float | None:
    """When to stop so that a Slurm job ends within its time limit, as Unix time; None where Slurm does not tell."""
    try:
        start, end = float(environ["SLURM_JOB_START_TIME"]), float(environ["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return None
    return end - min(_LARGEST_MARGIN_S, (end - start) / 10)
