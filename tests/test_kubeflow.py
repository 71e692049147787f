"""What a TrainJob's status is told, by a server that speaks TLS and asks for a token as Kubeflow Trainer's does."""

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from .conftest import StartTraining
from .helpers import events
from .ranks import free_port

SHORT = ("--run.max_steps", "2", "--run.epochs", "400")


@pytest.fixture
def bodies(tmp_path: Path, environment: dict[str, str]) -> Iterator[list[Any]]:
    """What has been posted with the right token."""
    posted: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = self.headers["Authorization"] == "Bearer secret" and self.path == "/status"
            if known:
                posted.append(json.loads(body))
            self.send_response(200 if known else 401)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    port = urlsplit(environment["KUBEFLOW_TRAINER_SERVER_URL"]).port
    server = HTTPServer(("localhost", port or 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield posted
    server.shutdown()
    server.server_close()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables that the controller gives a pod."""
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", tmp_path / "key", "-out", tmp_path / "ca.crt"]
    subprocess.run(["openssl", "req", *kind.split(), *files], check=True, capture_output=True)
    (tmp_path / "token").write_text("secret\n")
    return {
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{free_port()}/status",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(tmp_path / "ca.crt"),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }


def test_progress_is_posted(
    bodies: list[Any], environment: dict[str, str], start_training: StartTraining, tmp_path: Path
) -> None:
    from kubeflow_trainer_api.models.trainer_v1alpha1_update_train_job_status_request import (
        TrainerV1alpha1UpdateTrainJobStatusRequest,
    )

    ranks = start_training("run", *SHORT, environment=environment)
    assert ranks.wait() == [0] and "TrainJob" not in ranks.log.read_text()
    last = bodies[-1]
    read = TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(last)
    assert read is not None and list(last) == ["trainerStatus"]
    status = last["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)
    metrics = {metric["name"]: float(metric["value"]) for metric in status["metrics"]}
    loss, top1 = events(tmp_path / "run", "train")[-1]["loss"], events(tmp_path / "run", "eval")[-1]["top1"]
    assert metrics == pytest.approx({"loss": loss, "top1": top1}, abs=1e-4)


def test_a_server_that_is_away_costs_a_warning(environment: dict[str, str], start_training: StartTraining) -> None:
    ranks = start_training("run", *SHORT, environment=environment)
    assert ranks.wait() == [0]
    assert ranks.log.read_text().count("the status of the TrainJob could not be posted to https://localhost:") == 1
