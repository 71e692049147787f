"""What the hook posts to a server that speaks TLS and checks the token, as Kubeflow Trainer's; and the TrainJob."""

import json
import logging
import ssl
import subprocess
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

import dali_train
from dali_train.cli import main
from dali_train.hooks import RunEnd, RunStart

kubeflow = pytest.importorskip("kubeflow_trainer_api.models")  # requirements.txt
FOLDER = Path(__file__).parent


class Server(HTTPServer):
    """Answers a request for /status as `answer` does; remembers the requests that came."""

    def __init__(self, folder: Path) -> None:
        self.posted: list[tuple[str, str | None, Any]] = []  # (path, Authorization, body)
        self.answer: Callable[[BaseHTTPRequestHandler], None] = lambda handler: reply(handler, 200)
        super().__init__(("localhost", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key")
        self.socket = context.wrap_socket(self.socket, server_side=True)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posted.append((self.path, self.headers["Authorization"], body))
        self.server.answer(self)

    def do_GET(self) -> None:  # what urllib makes of a redirected POST
        assert isinstance(self.server, Server)
        self.server.posted.append((self.path, self.headers["Authorization"], None))
        reply(self, 200)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def reply(handler: BaseHTTPRequestHandler, status: int, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server, and the variables that the controller gives a pod."""
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", tmp_path / "key", "-out", tmp_path / "ca.crt"]
    subprocess.run(["openssl", "req", *kind.split(), *files], check=True, capture_output=True)
    (tmp_path / "token").write_text("secret\n")
    with Server(tmp_path) as server:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://localhost:{server.server_port}/status")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "ca.crt"))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_progress_is_posted(server: Server, tmp_path: Path) -> None:
    assert main(["data", "convert", "digits", "--out", str(tmp_path / "digits")]) == 0
    config = dali_train.load_config(FOLDER / "vit-b16.py")
    assert config.model.name == "vit_base_patch16_224"
    small = {"data.root": str(tmp_path / "digits"), "run.dir": str(tmp_path / "run"), "run.max_steps": 1}
    digits = dali_train.load_config(FOLDER.parent.parent / "configs" / "digits.py")
    result = dali_train.run(digits.replace({**small, "hooks.user": config.hooks.user}))
    path, token, body = server.posted[-1]
    assert (path, token, list(body)) == ("/status", "Bearer secret", ["trainerStatus"])
    assert kubeflow.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body) is not None
    status = body["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)
    metrics = {metric["name"]: float(metric["value"]) for metric in status["metrics"]}
    assert metrics.keys() == {"loss", "top1"} and metrics["top1"] == pytest.approx(result.best_top1, abs=1e-4)


def garbage(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"\x00 no HTTP \xff\r\n" * 3)


def endless_header(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (garbage, "BadStatusLine"),
        (endless_header, "LineTooLong"),
        (lambda handler: reply(handler, 503), "503"),
        (lambda handler: reply(handler, 302, Location="/elsewhere"), "302"),
        (None, "Connection refused"),
    ],
)
def test_what_is_wrong_with_the_server_costs_one_warning(
    server: Server, answer: Callable[[BaseHTTPRequestHandler], None] | None, reason: str, caplog: Any
) -> None:
    """No traceback of a thread, which pytest reports; and the token goes nowhere else."""
    if answer is None:
        server.shutdown()
        server.server_close()
    else:
        server.answer = answer
    (make_hook,) = dali_train.load_config(FOLDER / "vit-b16.py").hooks.user
    hook = make_hook()
    launch = SimpleNamespace(rank=0)
    with caplog.at_level(logging.WARNING, "dali_train"):
        hook.start(cast(RunStart, SimpleNamespace(launch=launch, total_steps=2, start_step=0)))
        hook.post()
        hook.end(cast(RunEnd, None))
    assert len(caplog.records) == 1 and reason in caplog.text
    assert {path for path, _, _ in server.posted} <= {"/status"}


def test_the_trainjob_is_what_kubeflow_expects() -> None:
    for document in yaml.safe_load_all((FOLDER / "trainjob.yaml").read_text()):
        read = getattr(kubeflow, f"TrainerV1alpha1{document['kind']}").from_dict(document)
        assert read is not None and read.to_dict() == document, "a field is unknown"
