"""Weights & Biases, with its own settings: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY; the key comes from WANDB_API_KEY
or `wandb login`."""

import json
import logging
import os
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dali_train.hooks.predictions import prediction_table, thumbnail_path
from dali_train.hooks.records import EvaluationRecord, RunEnd, RunStart
from dali_train.hooks.trackers.tracker import DEFAULT_PROJECT, Tracker, load_id, load_package, save_id
from dali_train.training.metrics import ClassTables

logger = logging.getLogger("dali_train")

REACH_TIMEOUT_S = 30
"""A server that does not answer within this time is unreachable."""
FINISH_TIMEOUT_S = 300
"""Longest wait for uploads when the run is over; `wandb sync` completes what is missing."""


class WandB(Tracker):
    """A run in ``wandb/``, online or offline. A resumed run keeps its id; where no server answers, it goes offline."""

    def start(self, record: RunStart) -> None:
        super().start(record)
        self._wandb = load_package("wandb", "wandb")
        self._run = self._begin(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        super().evaluation(record)
        details = record.details
        if details is None:
            return
        names = self.class_names
        columns, rows = prediction_table(details, names)
        table = self._wandb.Table(columns=["id", "image", "prediction", "truth", *columns[3:]])
        for number, truth, predicted, *scores in rows:
            path = thumbnail_path(self.run.directory, number)
            image = self._wandb.Image(str(path)) if path.is_file() else None  # none if the disk was full, for example
            table.add_data(number, image, predicted, truth, *scores)
        pairs = self._wandb.Table(columns=["truth", "prediction", "images"])
        for truth, predicted, images in ClassTables(details.labels, details.predictions, len(names)).most_confused():
            pairs.add_data(names[truth], names[predicted], images)
        self._run.log({"predictions": table, "confused_pairs": pairs}, step=record.step)

    def end(self, record: RunEnd) -> None:
        self._run.finish(exit_code=0 if record.error is None else 1)

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def log_image(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        self._run.log({name: self._wandb.Image(pixels)}, step=step)

    def _begin(self, record: RunStart) -> Any:
        wandb = self._wandb
        # The same in every process of the run: made when it first starts.
        path = record.directory / "wandb-id.json"
        known = load_id(path, "id")
        run_id = known["id"] if known is not None else uuid.uuid4().hex[:12]
        if known is None:
            save_id(path, id=run_id)

        def begin(mode: str) -> Any:
            return wandb.init(
                mode=mode,
                project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
                dir=str(record.directory),
                id=run_id,
                resume="allow",
                name=record.directory.name,
                config=json.loads(record.config.to_json()),
                # The terminal is the trainer's; a server that dies while the run ends must not hold the GPUs.
                settings=wandb.Settings(
                    init_timeout=REACH_TIMEOUT_S,
                    finish_timeout=FINISH_TIMEOUT_S,
                    finish_timeout_raises=False,
                    silent=True,
                    console="off",
                ),
            )

        mode = os.environ.get("WANDB_MODE", "online")
        if mode != "online":
            return begin(mode)
        try:
            # Without a key wandb would ask for one on the terminal, and training would wait for the answer.
            if not wandb.login(prompt=False, timeout=REACH_TIMEOUT_S):
                raise wandb.errors.AuthenticationError("no API key: set WANDB_API_KEY, or run `wandb login` once")
            return begin("online")
        except wandb.errors.Error as error:
            logger.warning(
                "hooks.trackers wandb: %s. Training continues and records offline; "
                "`wandb sync %s/wandb/offline-run-*` uploads it later",
                " ".join(str(error).split()),
                record.directory,
            )
            return begin("offline")
