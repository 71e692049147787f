"""Trackers, which send a run's scalars to a service: one class for each, and one row in TRACKERS
(hooks/hook_list.py)."""

import importlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dali_train.data.dataset.index import open_split
from dali_train.extras.image_names import file_names
from dali_train.extras.pictures.predictions import (
    NUM_SAMPLES,
    class_names,
    label_names,
    prediction_table,
    sample_images,
    sheet,
    thumbnail_path,
)
from dali_train.files import ForeignFileError, json_field, read_json, write_atomically
from dali_train.hooks import Hook, HookUnavailableError
from dali_train.hooks.records import EvaluationRecord, RunEnd, RunStart, StepRecord
from dali_train.text import redacted
from dali_train.training.metrics import ClassTables

logger = logging.getLogger("dali_train")

_LARGEST_ID = 10_000  # bytes
DEFAULT_PROJECT = "dali-train"
"""The default project or experiment of a run, if the tracker's environment variable is not set."""
REACH_TIMEOUT_S = 30
"""A W&B server that does not answer within this time is unreachable."""
FINISH_TIMEOUT_S = 300
"""Longest wait for uploads to W&B when the run is over; `wandb sync` completes what is missing."""


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
        self.label_names = label_names(record)

    def step(self, record: StepRecord) -> None:
        if record.step == self.run.start_step + 1:
            images = sample_images(record.batch, self.run.config.data, self.label_names, NUM_SAMPLES)
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


class MLflow(Tracker):
    """One MLflow run; a resumed run continues it and logs no step twice. Training never waits for the server.

    Its own settings are MLFLOW_TRACKING_URI (a server, a database or a directory) and MLFLOW_EXPERIMENT_NAME.
    """

    def start(self, record: RunStart) -> None:
        super().start(record)
        # MLflow itself waits minutes per call for a silent server. Both are read at each request.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        mlflow = self._mlflow = load_package("mlflow", "mlflow")
        uri = mlflow.get_tracking_uri()
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses a directory otherwise
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        try:
            self._begin(record, uri)
        except mlflow.exceptions.MlflowException as error:
            raise HookUnavailableError(
                f"hooks.trackers mlflow: {uri} cannot be used ({' '.join(str(error).split())[:300]}): start the "
                "server, or let MLFLOW_TRACKING_URI name another, a database or a directory"
            ) from error
        self._worker = ThreadPoolExecutor(1, "mlflow")
        self._pending: list[Future[Any]] = []

    def evaluation(self, record: EvaluationRecord) -> None:
        super().evaluation(record)
        directory = self.run.directory / "predictions" / f"step-{record.step:08d}"
        if directory.exists():
            self._later(self._client.log_artifacts, self._run_id, str(directory), f"predictions/step-{record.step:08d}")

    def end(self, record: RunEnd) -> None:
        status = "FINISHED" if record.error is None else "FAILED"
        try:
            self._later(self._client.set_terminated, self._run_id, status)
        finally:
            # After a failure the rest would only fail again, each after its own timeout.
            failed = any(future.done() and future.exception() is not None for future in self._pending)
            self._worker.shutdown(wait=True, cancel_futures=failed)
        for future in self._pending:
            if not future.cancelled():
                future.result()

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        Metric = self._mlflow.entities.Metric  # noqa: N806 (a class)
        now = self._mlflow.utils.time.get_current_time_millis()
        fresh = {name: value for name, value in scalars.items() if step > self._logged[name.partition("/")[0]]}
        metrics = [Metric(name, float(value), now, step) for name, value in fresh.items()]
        self._later(self._client.log_batch, self._run_id, metrics=metrics)

    def log_image(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        self._later(self._client.log_image, self._run_id, pixels, f"{name}-step-{step:08d}.png")

    def _later(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """In the worker thread, in order; an error comes up at the next call."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        self._pending.append(self._worker.submit(call, *arguments, **named))
        for future in done:
            future.result()

    def _begin(self, record: RunStart, uri: str) -> None:
        path, client = record.directory / "mlflow-id.json", self._client
        self._logged = {"train": -1, "eval": -1}  # the last step of each
        known = load_id(path, "id", "uri")
        if known is not None and known["uri"] == redacted(uri):
            self._run_id = known["id"]
            client.update_run(self._run_id, "RUNNING")
            for kind in self._logged:
                history = client.get_metric_history(self._run_id, f"{kind}/loss")
                self._logged[kind] = max((metric.step for metric in history), default=-1)
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_PROJECT)
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment is not None else client.create_experiment(name)
        self._run_id = client.create_run(experiment_id, run_name=record.directory.name).info.run_id
        settings = record.config.flat()
        parameters = [self._mlflow.entities.Param(name, str(value)[:500]) for name, value in settings.items()]
        client.log_batch(self._run_id, params=parameters)
        client.log_dict(self._run_id, json.loads(record.config.to_json()), "config.json")
        save_id(path, id=self._run_id, uri=redacted(uri))


class TensorBoard(Tracker):
    """Event files for ``tensorboard --logdir RUN``. A resumed run adds a file, which supersedes what went beyond its
    first step."""

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


class WandB(Tracker):
    """A run in ``wandb/``, online or offline. A resumed run keeps its id; where no server answers, it goes offline.

    Its own settings are WANDB_MODE, WANDB_PROJECT and WANDB_ENTITY; the key comes from WANDB_API_KEY or `wandb login`.
    """

    def start(self, record: RunStart) -> None:
        super().start(record)
        self._wandb = load_package("wandb", "wandb")
        self._run = self._begin(record)
        self._files: list[str] | None = None  # of the shown images

    def evaluation(self, record: EvaluationRecord) -> None:
        super().evaluation(record)
        details = record.details
        if details is None:
            return
        names = self.class_names
        if self._files is None:
            self._files = file_names(open_split(self.run.config.data, "validation"), details.shown)
        columns, rows = prediction_table(details, names, self._files)
        table = self._wandb.Table(columns=["id", "file", "image", "prediction", "truth", *columns[4:]])
        for number, file, truth, predicted, *scores in rows:
            path = thumbnail_path(self.run.directory, number)
            image = self._wandb.Image(str(path)) if path.is_file() else None  # none if the disk was full, for example
            table.add_data(number, file, image, predicted, truth, *scores)
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
