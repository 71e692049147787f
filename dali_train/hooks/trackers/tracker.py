"""The base class of trackers, which get the scalars of metrics.jsonl and the first step's images."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dali_train.files import ForeignFileError, json_field, read_json, write_atomically
from dali_train.hooks import Hook, HookUnavailableError
from dali_train.hooks.predictions import NUM_SAMPLES, class_names, sample_images, sheet
from dali_train.hooks.records import EvaluationRecord, RunStart, StepRecord

_LARGEST_ID = 10_000  # bytes
DEFAULT_PROJECT = "dali-train"
"""The default project or experiment of a run, if the tracker's environment variable is not set."""


class Tracker(Hook):
    """A tracker decides how to log; this class decides what and when.

    Scalars are ``train/NAME`` and ``eval/NAME`` with the names of metrics.jsonl. A new tracker is a subclass, which
    implements `log_scalars` and `log_image`, and a row in TRACKERS. Its settings are its own environment variables.
    """

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record `scalars` at `step`, the number of optimizer steps done."""
        raise NotImplementedError

    def log_image(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """Record an RGB image, `pixels` (height, width, 3)."""
        raise NotImplementedError

    def start(self, record: RunStart) -> None:
        self.run = record
        self.class_names = class_names(record)

    def step(self, record: StepRecord) -> None:
        if record.step == self.run.start_step + 1:
            images = sample_images(record.batch, self.run.config.data, self.class_names, NUM_SAMPLES)
            self.log_image(record.step, "samples", np.asarray(sheet(images)))
        if record.train is not None:
            scalars = {"epoch": record.epoch, **record.train.scalars()}
            self.log_scalars(record.step, {f"train/{name}": value for name, value in scalars.items()})

    def evaluation(self, record: EvaluationRecord) -> None:
        scalars = {"epoch": record.epoch, **record.scalars()}
        self.log_scalars(record.step, {f"eval/{name}": value for name, value in scalars.items()})


def load_package(module: str, extra: str) -> Any:
    """Import a package that only one tracker needs, from the extra of the same name.

    Raises:
        HookUnavailableError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise HookUnavailableError(
            f"hooks.trackers {extra} needs a package that is not installed: pip install 'dali-train[{extra}]', or "
            f"leave {extra} out"
        ) from error


def load_id(path: Path, *names: str) -> dict[str, str] | None:
    """Return what `save_id` saved under `names`; None if there is no file.

    Raises:
        HookUnavailableError: the file holds something else.
    """
    try:
        values = read_json(path, _LARGEST_ID)
        return {name: json_field(values, name, str) for name in names}
    except FileNotFoundError:
        return None
    except ForeignFileError as error:
        raise HookUnavailableError(f"{path} is not a tracker's id ({error}): move it away for a new id") from None


def save_id(path: Path, **facts: str) -> None:
    """Save the run's id, so that a resumed run continues under the same one."""
    write_atomically(path, (json.dumps(facts) + "\n").encode())
