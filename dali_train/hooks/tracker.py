"""What all trackers have in common: the same scalars as metrics.jsonl, and the first step's images."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from dali_train.data.manifest import write_atomically
from dali_train.hooks.base import EvaluationRecord, Hook, RunStart, StepRecord
from dali_train.hooks.samples import sample_images, sheet


class Tracker(Hook):
    """A tracker says how it logs; this class says when and what.

    Training scalars are ``train/NAME`` and ``eval/NAME`` with the names of metrics.jsonl.
    """

    def start(self, record: RunStart) -> None:
        self.run = record

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        raise NotImplementedError

    def log_image(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """`pixels`: (height, width, 3)."""
        raise NotImplementedError

    def step(self, record: StepRecord) -> None:
        count = self.run.config.hooks.sample_images
        if count and record.step == self.run.start_step + 1:
            images = sample_images(record.batch, self.run.config.data, self.run.class_names, count)
            self.log_image(record.step, "samples", np.asarray(sheet(images)))
        if record.train is not None:
            scalars = {"epoch": record.epoch, **record.train.scalars()}
            self.log_scalars(record.step, {f"train/{name}": value for name, value in scalars.items()})

    def evaluation(self, record: EvaluationRecord) -> None:
        scalars = {"epoch": record.epoch, **record.scalars()}
        self.log_scalars(record.step, {f"eval/{name}": value for name, value in scalars.items()})


class GradientCopies:
    """Copies of the gradients as LAMB gets them, every so many steps: histograms need the host, and the step must not
    wait for it. Costs the memory of one gradient more while they are kept."""

    def __init__(self, record: RunStart, every_steps: int) -> None:
        self._names = {parameter: name for name, parameter in record.model.named_parameters()}
        self._every_steps, self._step = every_steps, record.start_step
        self._copies: dict[str, torch.Tensor] = {}
        record.optimizer.register_step_pre_hook(self._before_step)

    def take(self) -> dict[str, torch.Tensor]:
        """Those that are waiting, by parameter; without values that are not finite, which have no place in a histogram."""
        copies, self._copies = self._copies, {}
        return {name: kept for name, copy in copies.items() if len(kept := copy[copy.isfinite()])}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._step += 1
        if self._step % self._every_steps == 0:
            self._copies = {n: p.grad.detach().clone() for p, n in self._names.items() if p.grad is not None}


def load_id(path: Path) -> dict[str, str] | None:
    """Under which id a tracker knows the run, if it does."""
    return dict(json.loads(path.read_text())) if path.exists() else None


def save_id(path: Path, **facts: str) -> None:
    """So that a resumed run goes on under the same id."""
    write_atomically(path, (json.dumps(facts) + "\n").encode())
