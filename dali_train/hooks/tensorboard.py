"""TensorBoard: ``tensorboard --logdir RUN``."""

import copy
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from dali_train.hooks.base import EvaluationRecord, RunEnd, RunStart, StepRecord
from dali_train.hooks.observers import HookUnavailableError
from dali_train.hooks.predictions import ClassTables
from dali_train.hooks.tracker import GradientCopies, Tracker


class TensorBoard(Tracker):
    """Event files in ``tensorboard/``. A resumed run adds a file that supersedes what went beyond its first step."""

    def start(self, record: RunStart) -> None:
        super().start(record)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise HookUnavailableError(
                "hooks.tensorboard needs a package that is not there: pip install 'dali-train[tensorboard]', "
                "or set hooks.tensorboard false"
            ) from error
        hooks = record.config.hooks
        purge = record.start_step + 1 if record.start_step else None
        self._writer = SummaryWriter(str(record.directory / "tensorboard"), purge_step=purge)
        self._writer.add_text("config", "```\n" + record.config.to_json() + "```", record.start_step)
        every = hooks.detail_every_steps
        self._gradients = GradientCopies(record, every) if hooks.gradient_histograms and every is not None else None
        if hooks.model_graph:
            # A copy: tracing runs the model once, which must leave no mark on this one.
            model = copy.deepcopy(record.model).cpu().float().eval()
            size = record.config.data.train_size
            self._writer.add_graph(model, torch.zeros(1, 3, size, size))
        self._writer.flush()

    def step(self, record: StepRecord) -> None:
        super().step(record)
        if self._gradients is not None and record.train is not None:
            for name, gradient in self._gradients.take().items():
                self._writer.add_histogram(f"gradients/{name}", gradient.cpu(), record.step)

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
