"""A torch profiler trace of chosen steps, with the trainer's and the data path's phases named."""

import logging

import torch
from torch.profiler import ProfilerActivity

from dali_train.hooks.base import Hook
from dali_train.hooks.records import RunEnd, RunStart, StepRecord

logger = logging.getLogger("dali_train")


class Profile(Hook):
    """Traces the steps `first` to `last` (counted from 1, as on the console) of this rank.

    ``profile/steps-A-B.rank0.json.gz`` opens in https://ui.perfetto.dev; ``profile/steps-A-B.txt`` lists the most
    expensive operators. The same phases are NVTX ranges for Nsight Systems.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._profiler: torch.profiler.profile | None = None

    def start(self, record: RunStart) -> None:
        self._start = record
        asked = f"hooks.profile is {self._first} {self._last}, but"
        if self._first > record.total_steps:
            logger.warning(
                f"{asked} the run ends after step {record.total_steps}: no trace is written; choose earlier steps"
            )
        elif self._first <= record.start_step:
            logger.warning(f"{asked} step {record.start_step} is done already: no trace is written; choose later steps")
        elif self._last > record.total_steps:
            logger.warning(f"{asked} the run ends after step {record.total_steps}: the trace ends there too")
        if record.start_step + 1 == self._first:
            self._begin()

    def step(self, record: StepRecord) -> None:
        if record.step + 1 == self._first:
            self._begin()
        elif record.step == self._last:
            self._finish()

    def end(self, record: RunEnd) -> None:
        self._finish()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # acc_events: torch 2.15 warns that events of earlier cycles are dropped otherwise; there is only one cycle.
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._start.clock.annotate(True)

    def _finish(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        self._start.clock.annotate(False)
        profiler.stop()
        directory = self._start.directory / "profile"
        directory.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self._first}-{self._last}"
        trace = directory / f"{name}.rank{self._start.launch.rank}.json.gz"
        profiler.export_chrome_trace(str(trace))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        (directory / f"{name}.txt").write_text(profiler.key_averages().table(sort_by=by, row_limit=40))
        logger.info(f"profile of steps {self._first} to {self._last}: {trace} (opens in https://ui.perfetto.dev)")
