"""MLflow, with its own settings: MLFLOW_TRACKING_URI (a server, a database or a directory), MLFLOW_EXPERIMENT_NAME."""

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dali_train.hooks import HookUnavailableError
from dali_train.hooks.records import EvaluationRecord, RunEnd, RunStart
from dali_train.hooks.trackers.tracker import DEFAULT_PROJECT, Tracker, load_id, load_package, save_id
from dali_train.text import redacted


class MLflow(Tracker):
    """One MLflow run; a resumed run continues it and logs no step twice. Training never waits for the server."""

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
        settings = json.loads(record.config.to_json())
        parameters = [
            self._mlflow.entities.Param(f"{section}.{field}", str(value)[:500])
            for section, fields in settings.items()
            for field, value in fields.items()
        ]
        client.log_batch(self._run_id, params=parameters)
        client.log_dict(self._run_id, settings, "config.json")
        save_id(path, id=self._run_id, uri=redacted(uri))
