"""Time by phase. Exactly one phase is open at any moment, so the phases sum to the wall clock.

On a GPU the host only queues work and runs ahead, so its clock cannot time a phase. There phases are separated by CUDA
events in the compute stream: they cost about a microsecond and are read when the host has waited for the device anyway.
"data" is then the time in which the GPU was idle because the next images were not ready, whatever the host did. Without
a GPU phases are timed by the host's clock.
"""

import time
from dataclasses import dataclass

import torch
from torch import nn

from dali_train.runtime.status import OUTSIDE_PHASES, STEP_PHASES


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of wall clock on this rank since the last reading, without the first step of the process."""

    step_s: float  # mean of a step, without evaluation and checkpoints
    # These six, the means of STEP_PHASES, sum to step_s: exactly on a CPU, within microseconds on a GPU.
    data_wait_s: float
    forward_s: float
    backward_s: float
    exchange_s: float  # communication that did not overlap with the backward pass
    optimizer_s: float
    logging_s: float  # reading the metrics, and the hooks
    evaluation_s: float  # these two in all, outside the steps
    checkpoint_s: float
    first_step_s: float | None  # the first step of the process, left out of the means: caches fill, kernels are chosen


class PhaseClock:
    """``enter(phase)`` closes the open phase and opens another.

    The watchdog's thread reads `step`, `phase` and `phase_start` (of ``time.monotonic``), the state of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._phases: list[str] = []
        self._borders: list[float | torch.cuda.Event] = []  # where each of `_phases` begins
        self._pool: list[torch.cuda.Event] = []
        self._all_reduce_follows = False
        self._annotating = False
        self._range: torch.autograd.profiler.record_function | None = None
        self._num_steps = 0
        self._is_first = True
        self._first: tuple[float, dict[str, float]] | None = None  # seconds and phases of the first step, until read
        self.totals: dict[str, float] = {}  # seconds of the complete run by phase, up to the last reading
        self.step = 0
        self.phase_start = time.monotonic()  # first: the watchdog reads both
        self.phase = "start"
        self._add_border("logging")
        first = self._borders[0]
        self._lap_start = first if isinstance(first, float) else time.perf_counter()

    def enter(self, phase: str, *, all_reduce_follows: bool = False) -> None:
        """Count time as `phase`; with `all_reduce_follows`, as "all-reduce" once all gradients are computed."""
        self._all_reduce_follows = all_reduce_follows
        self.phase_start = time.monotonic()  # first: the watchdog reads both
        self.phase = phase
        if self._annotating:
            self._annotate(phase)
        self._add_border(phase)

    def watch_all_reduce(self, parameter: nn.Parameter | None) -> None:
        """Count the rest of a backward pass as communication once the gradient of `parameter`, the last one, is
        computed: what remains is the part of the all-reduce that did not overlap with computation."""

        def all_gradients_are_there(_: torch.Tensor) -> None:
            if self._all_reduce_follows:
                self._all_reduce_follows = False
                self.phase_start = time.monotonic()  # first: the watchdog reads both
                self.phase = "all-reduce"
                self._add_border("all-reduce")

        if parameter is not None:
            parameter.register_post_accumulate_grad_hook(all_gradients_are_there)

    def finish_step(self) -> None:
        """End a step. After the first step of the process the host waits for the device, to time it separately."""
        if self._is_first:
            self._is_first = False
            self._first = self._lap()
        else:
            self._num_steps += 1

    def read(self) -> StepTimes:
        """Wait for the device, return the times since the last reading, and start again from zero."""
        elapsed, phases = self._lap()
        outside = {field: phases.get(phase, 0.0) for phase, field in OUTSIDE_PHASES.items()}
        elapsed -= sum(outside.values())
        first, num_steps = self._first, self._num_steps
        self._first = None
        self._num_steps = 0
        if num_steps == 0 and first is not None:  # only the first step has been timed
            elapsed, phases = first
            num_steps = 1
        return StepTimes(
            step_s=elapsed / num_steps,
            first_step_s=first[0] if first is not None else None,
            **{field: phases.get(phase, 0.0) / num_steps for phase, field in STEP_PHASES.items()},
            **outside,
        )

    def finish(self) -> None:
        """End the run: wait for the device and complete `totals`."""
        self._lap()

    def annotate(self, on: bool) -> None:
        """Name the phases in torch's profiler and, on a GPU, as NVTX ranges."""
        self._annotating = on
        if on:
            self._annotate(self._phases[-1])
        else:
            self._end_annotation()

    def _add_border(self, phase: str) -> None:
        self._phases.append(phase)
        if self._on_gpu:
            event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
            event.record()
            self._borders.append(event)
        else:
            self._borders.append(time.perf_counter())

    def _lap(self) -> tuple[float, dict[str, float]]:
        """Return (all seconds by the host's clock, seconds by phase) since the last lap; the open phase stays open."""
        self._add_border(self._phases[-1])
        last = self._borders[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
            now = time.perf_counter()
        else:  # another reading of the clock would not sum up: the process may have been off the core in between
            now = last
        phases: dict[str, float] = {}
        for phase, begin, end in zip(self._phases, self._borders, self._borders[1:], strict=False):
            phases[phase] = phases.get(phase, 0.0) + _seconds_between(begin, end)
        self._pool += [border for border in self._borders[:-1] if isinstance(border, torch.cuda.Event)]
        self._phases, self._borders = self._phases[-1:], self._borders[-1:]
        for phase, seconds in phases.items():
            self.totals[phase] = self.totals.get(phase, 0.0) + seconds
        elapsed = now - self._lap_start
        self._lap_start = now
        return elapsed, phases

    def _annotate(self, phase: str) -> None:
        self._end_annotation()
        self._range = torch.autograd.profiler.record_function(f"phase: {phase}")
        self._range.__enter__()
        if self._on_gpu:
            torch.cuda.nvtx.range_push(f"phase: {phase}")

    def _end_annotation(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
            if self._on_gpu:
                torch.cuda.nvtx.range_pop()


def _seconds_between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) / 1000
    assert isinstance(end, float)
    return end - begin
