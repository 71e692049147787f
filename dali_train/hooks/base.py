"""The moments of a run. Config files import this for hooks of their own, and are read before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from dali_train.hooks.records import EvaluationRecord, RunEnd, RunPlan, RunStart, StepRecord


class Hook:
    """Override what you need: a moment that is not overridden costs nothing. Every rank calls its own hooks; records
    hold what that rank knows. In a config file::

        class ModelNorm(Hook):
            def start(self, record):
                self.model = record.model

            def measure(self):
                return {"model_norm": sum(p.norm() ** 2 for p in self.model.parameters()).sqrt().item()}

        config = Config(..., hooks=HooksConfig(user=(ModelNorm,)))

    A hook that raises, or calls `sys.exit`, is reported and does not end the run, unless it is `required`. Callbacks
    that a hook registers with torch (`Module.register_forward_hook`, ...) are called by torch: what they raise ends the
    run.
    """

    required: ClassVar[bool] = False

    def announce(self, record: RunPlan) -> None:
        """Before the model is built and compiled, which can take minutes."""

    def start(self, record: RunStart) -> None:
        """Before the first step. A hook that fails here is not called again."""

    def measure(self) -> Mapping[str, float]:
        """On logging steps, when the device has finished: return numbers, by name, for files, trackers and the report.
        A tensor or an array of one number counts as one. What rank 0 returns is recorded."""
        return {}

    def step(self, record: StepRecord) -> None:
        """After every step."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """After every evaluation; `step` of the same step comes before."""

    def end(self, record: RunEnd) -> None:
        """After the last step, or the error that ended the run."""
