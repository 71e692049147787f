"""The records that hooks receive."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from dali_train.data.loading.pipelines import Batch
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.training.build import RunPlan
from dali_train.training.metrics import EvaluationDetails, EvaluationResult, TrainingSums
from dali_train.training.timing import PhaseClock, StepTimes
from dali_train.training.trainer import Observer


@dataclass(frozen=True, kw_only=True)
class RunStart(RunPlan):
    num_parameters: int
    start_step: int  # optimizer steps done before
    startup_s: float  # building everything, compiling included
    command: str  # that started this process, as in a shell and without secrets
    fingerprint: str  # of the steps done before, see checkpoint/fingerprint.py; empty: none is kept
    machine: str  # what decides the last bits of a step
    # Read only; callbacks can be registered on them (Module.register_forward_hook, ...), see Hook.
    model: nn.Module  # not wrapped for parallelism; in a pipeline this rank's stages, where names are still timm's
    optimizer: Optimizer
    clock: PhaseClock
    observers: list[Observer]  # append a function that gets each micro-batch of this rank with its logits


@dataclass(frozen=True, kw_only=True)
class TrainRecord(TrainingSums, StepTimes):
    """Means since the last logging step; times in seconds of wall clock on this rank."""

    lr: float
    images_per_second: float  # over all ranks, without evaluation and checkpoints
    mfu: float | None = None  # model FLOP utilisation, a fraction of the dense peak; None where the peak is not known
    noise_scale: float | None = None  # gradient noise scale in images, see `NoiseScale`; None where it is not known
    measured: Mapping[str, float] = field(default_factory=dict)  # what hooks measured
    fingerprint: str = ""  # of all steps done, see checkpoint/fingerprint.py; empty: none is kept

    def scalars(self) -> dict[str, float]:
        """Return all numbers by name, as they go into files and trackers."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("measured", "fingerprint")}
        return {name: value for name, value in {**own, **self.measured}.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    step: int  # optimizer steps done, this one included
    epoch: float  # passes over the data done
    # This rank's; MicroBatch.step counts the steps done before it, so it is one less than `step`.
    micro_batches: tuple[MicroBatch, ...]
    # The last of them with its pixels, on the device; its memory is reused, so copy what you keep. Without pixels on
    # later stages of a pipeline.
    batch: Batch
    train: TrainRecord | None  # on logging steps


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    step: int
    epoch: float
    result: EvaluationResult
    details: EvaluationDetails | None  # with hooks.predictions; of the average if there is one
    ema: EvaluationResult | None = None  # of the moving average of the weights, with ema.decay
    class_scores: NDArray[np.float64] | None = None  # see `Evaluator.class_scores`; of the average if there is one
    sets: dict[str, EvaluationResult] = field(default_factory=dict)  # of data.eval_sets; of the average if there is one

    def scalars(self) -> dict[str, float]:
        """Return everything by name, as it goes into files and trackers; the moving average's begin with ema_,
        those of another set with its name."""
        average = {f"ema_{name}": getattr(self.ema, name) for name in self.ema.MEASURES} if self.ema is not None else {}
        sets = {
            f"{name}_{metric}": getattr(result, metric)
            for name, result in self.sets.items()
            for metric in ("loss", "top1", "top5", "num_images")
        }
        return {**vars(self.result), **average, **sets}


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    step: int
    epoch: float
    seconds: dict[str, float]  # wall clock of this rank by phase
    finished: bool  # False: stopped on request, to be started again, or failed
    error: BaseException | None
