"""The four moments of a run and what a hook is told at each."""

from dataclasses import dataclass
from pathlib import Path

from dali_train.config import Config
from dali_train.data.micro_batch import MicroBatch
from dali_train.evaluate import EvaluationResult
from dali_train.launch import Launch


@dataclass(frozen=True, kw_only=True)
class RunStart:
    config: Config
    directory: Path
    launch: Launch
    device: str
    num_images: int
    num_classes: int
    num_parameters: int
    accumulation: int  # micro-batches of one rank in a step
    start_step: int  # optimizer steps done before
    total_steps: int  # at which the run ends


@dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """Since the last logging step. Times are means a step, in seconds of wall clock on this rank."""

    loss: float
    top1: float
    lr: float
    grad_norm: float
    loss_scale: float
    skipped_steps: int
    images_per_second: float  # over all ranks, without evaluation and checkpoints
    data_wait_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    step: int  # optimizer steps done, this one included
    epoch: float  # passes over the data done
    micro_batches: tuple[MicroBatch, ...]  # this rank's; their `step` is this step's number from 0, so `step` - 1
    train: TrainRecord | None  # on logging steps


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    step: int
    epoch: float
    seconds: dict[str, float]  # wall clock of this rank by phase; "train" is the rest
    error: BaseException | None


class Hook:
    """Override what you need. Every rank calls its own hooks; records hold what that rank knows."""

    def start(self, record: RunStart) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, step: int, epoch: float, result: EvaluationResult) -> None: ...

    def end(self, record: RunEnd) -> None: ...
