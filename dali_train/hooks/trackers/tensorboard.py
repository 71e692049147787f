"""TensorBoard: ``tensorboard --logdir RUN``."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dali_train.hooks.records import EvaluationRecord, RunEnd, RunStart
from dali_train.hooks.trackers.tracker import Tracker, load_package
from dali_train.training.metrics import ClassTables


class TensorBoard(Tracker):
    """Event files in ``tensorboard/``. A resumed run adds a file that supersedes what went beyond its first step."""

    def start(self, record: RunStart) -> None:
        super().start(record)
        purge = record.start_step + 1 if record.start_step else None
        package = load_package("torch.utils.tensorboard", "tensorboard")
        self._writer = package.SummaryWriter(str(record.directory / "tensorboard"), purge_step=purge)
        self._writer.add_text("config", "```\n" + record.config.to_json() + "```", record.start_step)
        self._writer.flush()

    def evaluation(self, record: EvaluationRecord) -> None:
        super().evaluation(record)
        details = record.details
        if details is not None:
            accuracies = ClassTables(details.labels, details.predictions, self.run.num_classes).accuracies()
            self._writer.add_histogram("eval/class_accuracy", accuracies[np.isfinite(accuracies)], record.step)
        self._writer.flush()

    def end(self, record: RunEnd) -> None:
        self._writer.close()

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def log_image(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")
