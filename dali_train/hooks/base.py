"""The five moments of a run and what a hook is told at each."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from dali_train.config import Config
from dali_train.data.loader import Batch
from dali_train.data.micro_batch import MicroBatchDraws
from dali_train.evaluate import EvaluationDetails, EvaluationResult
from dali_train.launch import Launch
from dali_train.timing import PhaseClock


@dataclass(frozen=True, kw_only=True)
class RunStart:
    config: Config
    directory: Path
    launch: Launch
    device: str
    num_images: int
    num_classes: int
    class_names: tuple[str, ...]
    num_parameters: int
    accumulation: int  # micro-batches of one rank in a step
    start_step: int  # optimizer steps done before
    total_steps: int  # at which the run ends
    startup_s: float  # building everything, compiling included
    # To look at, never to change; torch's own observers (Optimizer.register_step_pre_hook, ...) can be put on them.
    model: nn.Module  # not wrapped for parallelism
    optimizer: Optimizer
    clock: PhaseClock


@dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """Since the last logging step. Times of a step are means, in seconds of wall clock on this rank."""

    loss: float
    top1: float
    lr: float
    grad_norm: float
    loss_scale: float
    skipped_steps: int
    images_per_second: float  # over all ranks, without evaluation and checkpoints
    step_s: float  # these six sum to step_s
    data_wait_s: float
    forward_s: float
    backward_s: float
    exchange_s: float  # what backward did not hide
    optimizer_s: float
    logging_s: float  # reading the metrics, and the hooks
    evaluation_s: float  # these two in all, outside the steps
    checkpoint_s: float
    first_step_s: float | None  # the first step of the process, which is left out of the means above
    measured: Mapping[str, float] = field(default_factory=dict)  # what hooks measured

    def scalars(self) -> dict[str, float]:
        """Everything by name, as it goes into files and trackers."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "measured"}
        return {name: value for name, value in {**own, **self.measured}.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    step: int  # optimizer steps done, this one included
    epoch: float  # passes over the data done
    # This rank's; their `step` is this step's number from 0, so `step` - 1. Each a MicroBatch unless data.reader is stream.
    micro_batches: tuple[MicroBatchDraws, ...]
    batch: Batch  # the last of them with its pixels, on the device; its memory is used again, so copy what you keep
    train: TrainRecord | None  # on logging steps


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    step: int
    epoch: float
    result: EvaluationResult
    details: EvaluationDetails | None  # with hooks.predictions

    def scalars(self) -> dict[str, float]:
        return vars(self.result)


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    step: int
    epoch: float
    seconds: dict[str, float]  # wall clock of this rank by phase
    error: BaseException | None


class Hook:
    """Override what you need: a moment that is not overridden costs nothing. Every rank calls its own hooks; records
    hold what that rank knows. In a config file::

        class ModelNorm(Hook):
            def start(self, record):
                self.model = record.model

            def measure(self):
                return {"model_norm": sum(p.norm() ** 2 for p in self.model.parameters()).sqrt().item()}

        config = Config(..., hooks=HooksConfig(user=(ModelNorm,)))

    A hook that raises is reported and does not end the run, unless it is `required`.
    """

    required: ClassVar[bool] = False

    def start(self, record: RunStart) -> None:
        """Before the first step. A hook that fails here is not called again."""

    def measure(self) -> Mapping[str, float]:
        """On logging steps, when the device has finished: numbers for files, trackers and the report."""
        return {}

    def step(self, record: StepRecord) -> None:
        """After every step."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """After every evaluation, behind `step` of the same step."""

    def end(self, record: RunEnd) -> None:
        """After the last step, or the error that ended the run."""
