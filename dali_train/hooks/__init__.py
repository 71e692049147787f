"""Hooks observe a run; the loop acts. A hook gets frozen records and may only measure, log or trace.

Config files import `Hook` from here, and are executed before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from dali_train.hooks.records import EvaluationRecord, RunEnd, RunPlan, RunStart, StepRecord, TrainRecord

__all__ = ["EvaluationRecord", "Hook", "RunEnd", "RunPlan", "RunStart", "StepRecord", "TrainRecord"]


def __getattr__(name: str) -> Any:
    """Import the records on first use, since they import torch and DALI."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dali_train.hooks import records

    return getattr(records, name)


class Hook:
    """The base class of hooks. Override the methods that you need; others cost nothing. Every rank calls its own hooks,
    with records of what it knows. In a config file::

        class ModelNorm(Hook):
            def start(self, record):
                self.model = record.model

            def measure(self):
                return {"model_norm": sum(p.norm() ** 2 for p in self.model.parameters()).sqrt().item()}

        config = Config(..., hooks=HooksConfig(user=(ModelNorm,)))

    What a hook gets is for reading: a change of weights or of the optimizer is in no recipe, so `prove`, a resume and
    another number of ranks would not repeat it. If weights change while hooks are called, a warning says so; changes
    through `parameter.data`, in callbacks of torch, and of buffers, averages and gradients are not noticed.

    If a hook raises, or calls `sys.exit`, the error is logged and the run continues, unless the hook is `required`.
    Callbacks that a hook registers with torch (`Module.register_forward_hook`, ...) are called by torch: an exception
    in one ends the run.
    """

    required: ClassVar[bool] = False

    def announce(self, record: RunPlan) -> None:
        """Called before the model is built and compiled, which can take minutes."""

    def start(self, record: RunStart) -> None:
        """Called before the first step. A hook that fails here is not called again."""

    def measure(self) -> Mapping[str, float]:
        """Called on logging steps, when the device has finished: return numbers by name, for files, trackers and the
        report. Tensors and arrays with one element count as numbers. Rank 0's return value is recorded."""
        return {}

    def step(self, record: StepRecord) -> None:
        """Called after every step."""

    def saving(self, step: int) -> None:
        """Called before the checkpoint of `step` is written, when the device has finished: on all ranks together, so
        that they may communicate. What is written here is there when a run resumes from this checkpoint."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Called after every evaluation, and after `step` of the same step."""

    def end(self, record: RunEnd) -> None:
        """Called after the last step, or after the error that ended the run."""

    def closed(self, directory: Path) -> None:
        """Called last on rank 0, when everything else in the run's `directory` is written."""


class HookUnavailableError(RuntimeError):
    """A hook cannot work here, for a reason that the user can fix; the message says how."""
