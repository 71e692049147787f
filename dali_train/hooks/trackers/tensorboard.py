"""TensorBoard: ``tensorboard --logdir RUN``."""

import copy
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from dali_train.config import HooksConfig
from dali_train.hooks.base import EvaluationRecord, RunEnd, RunStart
from dali_train.hooks.predictions import ClassTables
from dali_train.hooks.trackers.base import Tracker


class TensorBoard(Tracker):
    """Event files in ``tensorboard/``. A resumed run adds a file that supersedes what went beyond its first step."""

    off = "hooks.tensorboard false"

    @classmethod
    def wanted(cls, hooks: HooksConfig) -> bool:
        return hooks.tensorboard

    def start(self, record: RunStart) -> None:
        super().start(record)
        purge = record.start_step + 1 if record.start_step else None
        package = self.load("torch.utils.tensorboard", "tensorboard")
        self._writer = package.SummaryWriter(str(record.directory / "tensorboard"), purge_step=purge)
        self._writer.add_text("config", "```\n" + record.config.to_json() + "```", record.start_step)
        if record.config.hooks.model_graph:
            # A copy: tracing runs the model once, which must leave no mark on this one.
            model = copy.deepcopy(record.model).cpu().float().eval()
            size = record.config.data.train_size
            self._writer.add_graph(model, torch.zeros(1, 3, size, size))
        self._writer.flush()

    def evaluation(self, record: EvaluationRecord) -> None:
        super().evaluation(record)
        if record.details is not None:
            accuracies = ClassTables.of(record.details, self.run.num_classes).accuracies()
            self._writer.add_histogram("eval/class_accuracy", accuracies[np.isfinite(accuracies)], record.step)
        self._writer.flush()

    def end(self, record: RunEnd) -> None:
        self._writer.close()

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def log_image(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def log_histograms(self, step: int, values: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in values.items():
            self._writer.add_histogram(name, tensor.cpu(), step)
