"""Requests to stop: signals, run.max_seconds and the end of the job. A rank only records its own reason; in each step
all ranks agree whether to stop or save after it, since a rank that continued alone would hang in a collective.

Importing this does not import torch, so that the handlers are installed before that import, which takes seconds in
which a signal would kill the process.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING

from dali_train.errors import write_now
from dali_train.runtime.status import STOPPED_BY_TERM

if TYPE_CHECKING:
    import torch.distributed as dist


class StopReason(IntEnum):
    """Why a run stops. If ranks have different reasons, the largest number wins."""

    NONE = 0
    USR1 = 1
    TERM = 2
    MAX_SECONDS = 3
    JOB_END = 4
    INTERRUPT = 5

    def describe(self) -> str:
        words = (
            "",
            "signal USR1",
            STOPPED_BY_TERM,
            "run.max_seconds is over",
            "the job's time limit is near",
            "Ctrl-C",
        )
        return words[self]

    @property
    def grace_s(self) -> float | None:
        """Seconds available after the run is saved, since launchers kill 30 s after SIGTERM. None: no limit."""
        if self == StopReason.NONE:
            return None
        return _AFTER_TERM_S if self == StopReason.TERM else _LARGEST_MARGIN_S / 2


# Time in which a job must save and end: a tenth of its limit, at most this.
_LARGEST_MARGIN_S = 120.0
_AFTER_TERM_S = 15.0
_LAST_WORDS_S = 5.0


class StopRequests:
    """This rank's reasons to stop. Create it in the main thread; SIGUSR1 and SIGTERM then no longer end the process."""

    def __init__(self, max_seconds: float | None, environ: Mapping[str, str] = os.environ) -> None:
        self._signal = StopReason.NONE
        self._is_saved = False
        self._end = time.monotonic() + max_seconds if max_seconds is not None else None
        self._job_end = job_end(environ)
        # Idempotent, in any order, as often as they come: Slurm sends TERM twice before a time limit's KILL.
        self._before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
        signal.signal(signal.SIGUSR1, self._note)
        signal.signal(signal.SIGTERM, self._note)
        self._received = self._handled = 0  # number of Ctrl-C received, and handled by the main thread
        signal.signal(signal.SIGINT, self._interrupt)
        self._pipe_end: int | None = None
        self._listen()

    def close(self) -> None:
        """Restore the former signal handlers, for a caller that continues with something else."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pipe_end is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe_end)  # which ends the listening thread

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = max(self._signal, StopReason.USR1 if number == signal.SIGUSR1 else StopReason.TERM)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C in the main thread, between two of Python's instructions: long after `_receive_always` has seen
        it, if the main thread computes outside Python."""
        self._handled += 1
        if self._handled > 1 or self._received > 1:
            raise KeyboardInterrupt
        self._stop_after_step()

    def saved(self) -> None:
        """Forget earlier signals, once the run is saved: from here on they only end its last upload."""
        self._is_saved = True
        self._signal = StopReason.NONE
        self._received = self._handled = 0

    def _stop_after_step(self) -> None:
        if self._signal != StopReason.INTERRUPT:
            self._signal = StopReason.INTERRUPT
            now = "the run is saved, ending its upload" if self._is_saved else "stopping after this step"
            # print may be in use right now.
            write_now(f"\n{now}; Ctrl-C again ends at once{'' if self._is_saved else ', without saving'}\n")

    @property
    def last_words(self) -> str:
        """What to say if a second Ctrl-C ends the process."""
        return (
            "ended; the run is saved, its last upload may be incomplete" if self._is_saved else "ended without saving"
        )

    def _listen(self) -> None:
        """Receive signals while the main thread is outside Python too: the C handler writes them into a pipe."""
        reading_end, writing_end = os.pipe()
        os.set_blocking(writing_end, False)
        before = signal.set_wakeup_fd(writing_end, warn_on_full_buffer=False)
        if before != -1:  # an event loop's, as in a notebook: it stays, and Ctrl-C waits for the main thread
            signal.set_wakeup_fd(before)
            os.close(reading_end)
            os.close(writing_end)
            return
        self._pipe_end = writing_end
        threading.Thread(target=self._receive_always, args=(reading_end,), name="signals", daemon=True).start()

    def _receive_always(self, pipe: int) -> None:
        """Handle each signal that the C handler writes into `pipe`, until its other end is closed.

        The first Ctrl-C asks for a stop. At the second the main thread raises KeyboardInterrupt, as soon as it runs
        Python again, and has `_LAST_WORDS_S` to end; then, or at a third, this thread ends the process.
        """
        while True:
            is_ending = self._received > 1
            has_signal, _, _ = select.select([pipe], [], [], _LAST_WORDS_S if is_ending else None)
            byte = os.read(pipe, 1) if has_signal else bytes([signal.SIGINT])  # the time is over: as a third Ctrl-C
            if not byte:
                os.close(pipe)
                return
            if byte[0] in (signal.SIGUSR1, signal.SIGTERM):
                self._note(byte[0], None)
            elif byte[0] == signal.SIGINT:
                self._received += 1
                if self._received == 1:
                    self._stop_after_step()
                elif self._received > 2:
                    write_now(f"{self.last_words}\n")
                    os._exit(128 + signal.SIGINT)

    def ignore_further(self) -> None:
        """Ignore signals once the run is saved, because Python removes its handlers before the process ends."""
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


class StepAgreement:
    """An all-reduce per step, overlapped with it, of whether any rank wants to save or has a reason to stop.

    Args:
        group: all ranks, for host memory; None for a single process.
    """

    def __init__(self, requests: StopRequests, group: "dist.ProcessGroup | None") -> None:
        import torch

        self._requests = requests
        self._group = group
        self._largest = torch.zeros((), dtype=torch.int64)
        self._pending: dist.Work | None = None

    def ask(self, *, save: bool) -> None:
        """Start the all-reduce at the start of a step; `save`: this rank wants a checkpoint after it."""
        self._largest.fill_(2 * int(self._requests.reason()) + save)
        if self._group is not None:
            import torch.distributed as dist

            self._pending = dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def agreed(self) -> tuple[StopReason, bool]:
        """Return, at the end of the step, why all ranks stop now, or NONE, and whether to save without stopping."""
        if self._pending is not None:
            self._pending.wait()
        reason, save = divmod(int(self._largest), 2)  # a stop outranks a save, since stopping saves too
        return StopReason(reason), bool(save)


def job_end(environ: Mapping[str, str]) -> float | None:
    """Return the Unix time at which to stop so that a Slurm job ends in time; None if Slurm does not tell."""
    try:
        start, end = float(environ["SLURM_JOB_START_TIME"]), float(environ["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return None
    return end - min(_LARGEST_MARGIN_S, (end - start) / 10)
