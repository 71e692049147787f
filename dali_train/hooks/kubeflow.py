"""Progress, remaining time, loss and top-1 in the status of a TrainJob, if Kubeflow Trainer requests them.

Its feature gate TrainJobStatus gives each pod the three variables that are read here; the body of a request is that of
Trainer 2.3.
"""

import json
import logging
import os
import ssl
import threading
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dali_train.hooks.base import Hook
from dali_train.hooks.records import EvaluationRecord, RunEnd, RunStart, StepRecord

logger = logging.getLogger("dali_train")

SERVER, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_INTERVAL_S, _TIMEOUT_S = 5.0, 5.0  # Kubeflow allows one request per five seconds


class KubeflowProgress(Hook):
    """Posts from a thread, so that training never waits for the server. Only the first failure is a warning."""

    def start(self, record: RunStart) -> None:
        self._total, self._done, self._step_s = record.total_steps, record.start_step, 0.0
        self._metrics: dict[str, float] = {}
        self._ended, self._warned = threading.Event(), False
        self._thread = threading.Thread(target=self._post_always, name="kubeflow", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        self._done = record.step
        if record.train is not None:
            self._step_s = record.train.step_s
            self._metrics = {**self._metrics, "loss": record.train.loss}

    def evaluation(self, record: EvaluationRecord) -> None:
        self._metrics = {**self._metrics, "top1": (record.ema or record.result).top1}

    def end(self, record: RunEnd) -> None:
        self._ended.set()
        self._thread.join(2 * _TIMEOUT_S)

    def _post_always(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._post()
        self._post()

    def _post(self) -> None:
        try:
            request = urllib.request.Request(
                os.environ[SERVER],
                data=json.dumps({"trainerStatus": self._status()}).encode(),
                headers={
                    "Authorization": f"Bearer {Path(os.environ[TOKEN]).read_text().strip()}",  # it is renewed at times
                    "Content-Type": "application/json",
                },
            )
            context = ssl.create_default_context(cafile=os.environ[CERTIFICATE])
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context):
                pass
        except (OSError, ValueError, KeyError) as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "the status of the TrainJob could not be posted to %s (%s): training continues without it",
                    *(os.environ[SERVER], error),
                )

    def _status(self) -> dict[str, Any]:
        return {
            "progressPercentage": 100 * self._done // self._total,
            "estimatedRemainingSeconds": round((self._total - self._done) * self._step_s),
            "metrics": [{"name": name, "value": f"{value:.4f}"} for name, value in self._metrics.items()],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }
