"""The parts and the state of a training run, and when to evaluate and save."""

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from dali_train.checkpoint.model import MODEL_FILE, write_model
from dali_train.checkpoint.save import CheckpointWriter
from dali_train.data.loading.loader import Loader
from dali_train.files import write_atomically
from dali_train.hooks.hook_list import HookList
from dali_train.hooks.records import RunPlan
from dali_train.report import write_report
from dali_train.runtime.status import RunStatus, newest_step
from dali_train.runtime.stop import StopReason
from dali_train.training.build import Setup
from dali_train.training.evaluation import Evaluator
from dali_train.training.flops import ModelFlops
from dali_train.training.metrics import NonFiniteError
from dali_train.training.trainer import Trainer

logger = logging.getLogger("dali_train")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a call of `run` ended; the same on all ranks."""

    run_dir: Path
    step: int  # optimizer steps done
    total_steps: int
    stopped: StopReason  # why the run stopped before its end; NONE: it is finished
    best_top1: float | None  # a fraction; None: never evaluated
    epoch_accuracies: list[float]  # top-1 of each evaluation as a fraction, in order, those before a resume included
    model_file: Path | None  # the final weights, see `write_model`; None: the run is not finished


@dataclass(kw_only=True)
class Run:
    """Everything that the training loop uses. Only the accuracies and the last five fields change."""

    plan: RunPlan
    setup: Setup
    group: dist.ProcessGroup | None  # of all ranks, in host memory
    recipe: dict[str, Any]
    trainer: Trainer
    loader: Loader
    evaluator: Evaluator | None
    saver: CheckpointWriter
    hooks: HookList
    flops: ModelFlops | None  # None: no figure for this device, such as a CPU
    lock_holder: str
    accuracies: list[float]  # top-1 of the evaluations as fractions, in order, those before a resume included
    evaluation_is_pending: bool  # the checkpoint that the run resumes from was not evaluated
    step: int  # optimizer steps done
    best_top1: float | None = None  # of the evaluations and of all kept checkpoints
    stopping: StopReason = StopReason.NONE
    saved_at: float = field(default_factory=time.monotonic)  # the last checkpoint, or the start
    save_is_asked: bool = False  # by any rank, for this step

    @property
    def epoch(self) -> float:
        """Completed passes over the training split."""
        return self.step * self.plan.config.batch.global_batch / self.plan.num_images

    @property
    def is_last_step(self) -> bool:
        return self.step == self.plan.total_steps

    @property
    def has_stalled(self) -> bool:
        """Whether top-1 has not improved for hooks.stop_early epochs."""
        config, history = self.plan.config, self.accuracies
        if config.hooks.stop_early is None or config.run.eval_every_epochs is None or not history:
            return False
        since_best = len(history) - 1 - history.index(max(history))
        return since_best * config.run.eval_every_epochs >= config.hooks.stop_early

    @property
    def is_finished(self) -> bool:
        return self.is_last_step or self.has_stalled

    def has_passed(self, every_epochs: float) -> bool:
        """Return whether this step is the first at or after a multiple of `every_epochs`."""
        multiple = int(self.epoch / every_epochs + 1e-9) * every_epochs
        return self.plan.config.steps(multiple, self.plan.num_images) == self.step

    def evaluation_is_due(self) -> bool:
        every = self.plan.config.run.eval_every_epochs
        return self.evaluator is not None and (self.is_last_step or (every is not None and self.has_passed(every)))

    def checkpoint_is_due(self) -> bool:
        every = self.plan.config.run.checkpoint_every_steps
        due = self.step % every == 0 if every is not None else self.has_passed(1.0)
        return due or self.save_is_asked or self.is_last_step or bool(self.stopping) or self.evaluation_is_due()

    def checkpoint_is_old(self) -> bool:
        limit = self.plan.config.run.checkpoint_every_seconds
        return limit is not None and time.monotonic() - self.saved_at >= limit

    def write_accuracies(self) -> None:
        if self.plan.launch.rank == 0:
            content = json.dumps(self.accuracies) + "\n"
            write_atomically(self.plan.directory / "epoch_accuracies.json", content.encode())

    def write_status(self, state: Literal["running", "stopped", "finished", "failed"], reason: str = "") -> None:
        if self.plan.launch.rank == 0:
            RunStatus(
                state=state,
                step=self.step,
                reason=reason,
                total_steps=self.plan.total_steps,
                best_top1=self.best_top1,
                ema=self.plan.config.ema.decay is not None,
                lock_holder=self.lock_holder,
            ).write(self.plan.directory)

    def write_model(self) -> None:
        """Write the final weights for other programs, once the run is finished and saved."""
        if self.is_finished and self.plan.launch.rank == 0:
            write_model(self.plan.directory, self.step)

    def write_report(self) -> None:
        """Write the run's report; a failure is only logged."""
        if self.plan.launch.rank == 0:
            try:
                write_report([self.plan.directory])
            except Exception as fault:
                logger.warning("the report was not written: %s", fault)

    def unsaved_error(self) -> NonFiniteError:
        """Return the error for a run that ends unsaved, because weights or loss are not finite."""
        newest = newest_step(self.plan.directory)
        saved = f"the newest checkpoint, of step {newest}, is good" if newest is not None else "there is no checkpoint"
        when = "ended" if self.is_last_step else f"stopped on request ({self.stopping.describe()})"
        return NonFiniteError(
            f"the run {when} at step {self.step} of {self.plan.total_steps}, but was not saved: weights or the last "
            f"loss are not finite, and {saved}. Resume with a lower optimizer.lr, a longer schedule.warmup_epochs, or "
            "precision.dtype bf16"
        )

    def result(self) -> RunResult:
        return RunResult(
            run_dir=self.plan.directory,
            step=self.step,
            total_steps=self.plan.total_steps,
            stopped=StopReason.NONE if self.is_finished else self.stopping,
            best_top1=self.best_top1,
            epoch_accuracies=self.accuracies,
            model_file=self.plan.directory / MODEL_FILE if self.is_finished else None,
        )
