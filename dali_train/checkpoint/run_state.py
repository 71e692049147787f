"""The state of a run in a checkpoint, and starting a run from it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dali_train.checkpoint.directory import saved_top1
from dali_train.checkpoint.load import Checkpoint, find_checkpoint
from dali_train.checkpoint.model import first_weights
from dali_train.checkpoint.recipe import check_recipe, recipe, saved_recipe
from dali_train.checkpoint.state import capture, restore
from dali_train.checkpoint.storage import Tensors
from dali_train.config import Config
from dali_train.data.dataset.index import Split
from dali_train.training.trainer import Trainer, TrainState


@dataclass(kw_only=True)
class Start:
    """The start of a run: at step 0, or after the steps of a checkpoint."""

    recipe: dict[str, Any]
    checkpoint: Checkpoint | None  # with a copy of the weights in host memory; see `release`
    warnings: list[str]
    weights: Tensors | None = None  # at step 0, of the run or checkpoint that model.weights names
    step: int = 0  # optimizer steps done
    history: list[float] = field(default_factory=list)  # top-1 of this run's evaluations up to the checkpoint
    evaluated: bool = True  # False: the checkpoint has no accuracy yet, and may be due for evaluation

    @property
    def seeding(self) -> str | None:
        """The dropout seeding of the checkpoint's run; None without a checkpoint."""
        return self.checkpoint.value("dropout") if self.checkpoint is not None else None

    def restore(self, state: TrainState) -> None:
        """Restore weights, optimizer state and loss scale.

        Raises:
            ConfigError: the weights do not fit the model.
        """
        if self.checkpoint is not None:
            self.warnings += restore(self.checkpoint, state.model, state.optimizer, state.precision, state.parallel)

    def restore_average(self, trainer: Trainer) -> None:
        """Restore the moving average of the weights, if the checkpoint has one."""
        if trainer.ema is not None and self.checkpoint is not None and "ema" in self.checkpoint.state:
            trainer.ema.load(self.checkpoint.state["ema"])

    def release(self) -> None:
        """Free the memory of the checkpoint, once everything in it has been restored."""
        self.checkpoint = self.weights = None


def find_start(config: Config, split: Split, group: dist.ProcessGroup | None) -> Start:
    """Read the checkpoint that `config` resumes from, if any. All ranks of `group` call this together.

    Raises:
        ConfigError: its recipe differs and run.accept_changed_recipe is false, or run.resume or model.weights is not a
            checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    directory = Path(config.run.dir) / "checkpoints"
    current = recipe(config, split.manifest)
    checkpoint, warnings = find_checkpoint(config.run.resume, directory, group)
    if checkpoint is None:
        return Start(recipe=current, checkpoint=None, warnings=warnings, weights=first_weights(config))
    warnings += check_recipe(
        saved_recipe(checkpoint.values, checkpoint.path),
        current,
        source=str(checkpoint.path),
        remedy="choose another run.dir",
        accept=config.run.accept_changed_recipe,
    )
    start = Start(recipe=current, checkpoint=checkpoint, warnings=warnings, step=checkpoint.step)
    if checkpoint.path.parent == directory:
        top1 = saved_top1(checkpoint.path)
        start.history = [*checkpoint.value("epoch_accuracies"), *([top1] if top1 is not None else [])]
        start.evaluated = top1 is not None
    return start


def capture_run(trainer: Trainer, group: dist.ProcessGroup | None) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Return (tensors by section and name, plain values), for a checkpoint. All ranks of `group` call this together."""
    state, values = capture(trainer.model, trainer.optimizer, trainer.precision, trainer.parallel, group)
    if trainer.ema is not None:
        state["ema"] = trainer.ema.state()
    return state, values | {"dropout": trainer.dropout}
