"""What all trackers have in common: the same scalars as metrics.jsonl, the first step's images, gradient histograms."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from dali_train.config import HooksConfig
from dali_train.files import write_atomically
from dali_train.hooks.base import EvaluationRecord, Hook, RunStart, StepRecord
from dali_train.hooks.names import class_names
from dali_train.hooks.observers import HookUnavailableError
from dali_train.hooks.samples import sample_images, sheet


class Tracker(Hook):
    """A tracker decides how it logs; this class decides what and when.

    Training scalars are ``train/NAME`` and ``eval/NAME`` with the names of metrics.jsonl. A new tracker is a file with
    a subclass, which implements `wanted`, `log_scalars` and `log_image`, and a row in TRACKERS.
    """

    off: ClassVar[str]
    """The setting that turns the tracker off, as it is typed: ``hooks.wandb disabled``."""

    @classmethod
    def wanted(cls, hooks: HooksConfig) -> bool:
        """Whether the config asks for this tracker."""
        raise NotImplementedError

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        raise NotImplementedError

    def log_image(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """`pixels`: (height, width, 3)."""
        raise NotImplementedError

    def log_histograms(self, step: int, values: Mapping[str, torch.Tensor]) -> None:
        """Tensors of any shape by name, finite, on the device. A tracker without histograms leaves this out."""

    def start(self, record: RunStart) -> None:
        self.run = record
        self.class_names = class_names(record)
        every = record.config.hooks.detail_every_steps
        wanted = record.config.hooks.gradient_histograms and type(self).log_histograms is not Tracker.log_histograms
        self._gradients = GradientCopies(record, every) if wanted and every is not None else None

    def step(self, record: StepRecord) -> None:
        count = self.run.config.hooks.sample_images
        if count and record.step == self.run.start_step + 1:
            images = sample_images(record.batch, self.run.config.data, self.class_names, count)
            self.log_image(record.step, "samples", np.asarray(sheet(images)))
        if record.train is None:
            return
        scalars = {"epoch": record.epoch, **record.train.scalars()}
        self.log_scalars(record.step, {f"train/{name}": value for name, value in scalars.items()})
        if self._gradients is not None and (gradients := self._gradients.take()):
            self.log_histograms(record.step, {f"gradients/{name}": gradient for name, gradient in gradients.items()})

    def evaluation(self, record: EvaluationRecord) -> None:
        scalars = {"epoch": record.epoch, **record.scalars()}
        self.log_scalars(record.step, {f"eval/{name}": value for name, value in scalars.items()})

    def load(self, module: str, extra: str) -> Any:
        """A package that only this tracker needs. Raises HookUnavailableError: it is not installed."""
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise HookUnavailableError(
                f"{self.off.split()[0]} needs a package that is not there: pip install 'dali-train[{extra}]', or set "
                f"{self.off}"
            ) from error


class GradientCopies:
    """Copies of the gradients as the optimizer gets them, every `every_steps` steps: histograms need the host, and the
    step must not wait for it. Costs the memory of one more gradient while they are kept."""

    def __init__(self, record: RunStart, every_steps: int) -> None:
        self._names = {parameter: name for name, parameter in record.model.named_parameters()}
        self._every_steps, self._step = every_steps, record.start_step
        self._copies: dict[str, torch.Tensor] = {}
        record.optimizer.register_step_pre_hook(self._before_step)

    def take(self) -> dict[str, torch.Tensor]:
        """Those that are waiting, by parameter; without values that are not finite, which have no place in a
        histogram."""
        copies, self._copies = self._copies, {}
        return {name: kept for name, copy in copies.items() if len(kept := copy[copy.isfinite()])}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._step += 1
        if self._step % self._every_steps == 0:
            self._copies = {n: p.grad.detach().clone() for p, n in self._names.items() if p.grad is not None}


def load_id(path: Path) -> dict[str, str] | None:
    """The id under which a tracker knows the run, if it does."""
    return dict(json.loads(path.read_text())) if path.exists() else None


def save_id(path: Path, **facts: str) -> None:
    """So that a resumed run continues under the same id."""
    write_atomically(path, (json.dumps(facts) + "\n").encode())
