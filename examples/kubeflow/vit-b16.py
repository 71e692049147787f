"""configs/vit-b16.py, with progress, remaining time, loss and top-1 in the status of a Kubeflow TrainJob.

    python -m dali_train train --config examples/kubeflow/vit-b16.py --data.root DATASET

Kubeflow Trainer's feature gate TrainJobStatus gives each pod the three variables that are read here; the body of a
request is that of Trainer 2.3. Without the variables nothing is posted.
"""

import json
import logging
import os
import ssl
import threading
import urllib.request
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any

from dali_train import Hook
from dali_train.config import load_config
from dali_train.hooks import EvaluationRecord, RunEnd, RunStart, StepRecord

logger = logging.getLogger("dali_train")

SERVER, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
INTERVAL_S, TIMEOUT_S = 5.0, 5.0  # Kubeflow allows one request per five seconds


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error: following it would send the token to wherever it points."""

    def redirect_request(self, *_: Any) -> None:
        return None


class KubeflowProgress(Hook):
    """Posts from a thread of rank 0, so that training never waits for the server. Only the first failure is logged."""

    thread: threading.Thread | None = None

    def start(self, record: RunStart) -> None:
        if record.launch.rank != 0 or SERVER not in os.environ:
            return
        self.total_steps, self.step_done, self.step_s = record.total_steps, record.start_step, 0.0
        self.metrics: dict[str, float] = {}
        self.ended, self.has_warned = threading.Event(), False
        self.thread = threading.Thread(target=self.keep_posting, name="kubeflow", daemon=True)
        self.thread.start()

    def step(self, record: StepRecord) -> None:
        if self.thread is None:
            return
        self.step_done = record.step
        if record.train is not None:
            self.step_s = record.train.step_s
            self.metrics = {**self.metrics, "loss": record.train.loss}

    def evaluation(self, record: EvaluationRecord) -> None:
        if self.thread is not None:
            self.metrics = {**self.metrics, "top1": (record.ema or record.result).top1}

    def end(self, record: RunEnd) -> None:
        if self.thread is not None:
            self.ended.set()
            self.thread.join(2 * TIMEOUT_S)

    def keep_posting(self) -> None:
        while not self.ended.wait(INTERVAL_S):
            self.post()
        self.post()

    def post(self) -> None:
        try:
            request = urllib.request.Request(
                os.environ[SERVER],
                data=json.dumps({"trainerStatus": self.status()}).encode(),
                headers={
                    # read each time, since Kubernetes renews it
                    "Authorization": f"Bearer {Path(os.environ[TOKEN]).read_text().strip()}",
                    "Content-Type": "application/json",
                },
            )
            context = ssl.create_default_context(cafile=os.environ[CERTIFICATE])
            opener = urllib.request.build_opener(NoRedirects, urllib.request.HTTPSHandler(context=context))
            with opener.open(request, timeout=TIMEOUT_S):
                pass
        except (OSError, ValueError, KeyError, HTTPException) as error:
            if not self.has_warned:
                self.has_warned = True
                reason = f"{type(error).__name__}: {error}"
                logger.warning(f"the status of the TrainJob was not posted ({reason}): training continues without it")

    def status(self) -> dict[str, Any]:
        return {
            "progressPercentage": 100 * self.step_done // self.total_steps,
            "estimatedRemainingSeconds": round((self.total_steps - self.step_done) * self.step_s),
            "metrics": [{"name": name, "value": f"{value:.4f}"} for name, value in self.metrics.items()],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }


config = load_config("../../configs/vit-b16.py").replace(hooks=dict(user=(KubeflowProgress,)))
