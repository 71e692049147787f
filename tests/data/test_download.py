"""Downloads from a real server on this machine: complete, broken off, and wrong."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dali_train.data.convert.datasets import DATASETS
from dali_train.data.convert.download import Download, download
from dali_train.errors import RunError
from tests.data.files import convert, write_mnist

CONTENT = bytes(range(256)) * 2000


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT under any name, and can be made to misbehave."""

    def __init__(self) -> None:
        super().__init__(("localhost", 0), Handler)
        self.num_requests = 0
        self.break_off_after: int | None = None
        self.status = 200

    @property
    def address(self) -> str:
        return f"http://localhost:{self.server_address[1]}/files/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.num_requests += 1
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: self.server.break_off_after])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def files(server: Server, content: bytes = CONTENT) -> Download:
    return Download(address=server.address, sha256={"a.bin": hashlib.sha256(content).hexdigest()})


def test_fetches_once(server: Server, tmp_path: Path) -> None:
    download(files(server), tmp_path / "new")
    download(files(server), tmp_path / "new")
    assert (tmp_path / "new" / "a.bin").read_bytes() == CONTENT
    assert server.num_requests == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.bin"]


def test_a_download_that_breaks_off_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.break_off_after = 100_000
    (tmp_path / "a.bin.1234.partial").write_bytes(b"what a killed download left")
    with pytest.raises(RunError, match=r"broke off, or is not the official file .*: start the same command again"):
        download(files(server), tmp_path)
    assert list(tmp_path.iterdir()) == []
    server.break_off_after = None
    download(files(server), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_wrong_content_is_deleted_and_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"broke off, or is not the official file \(invalid hash value"):
        download(files(server, b"other"), tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.bin").write_bytes(b"mine")
    with pytest.raises(RunError, match="as of the official file: delete it, then it is fetched again"):
        download(files(server), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"mine"


def test_servers_that_refuse_or_are_not_there(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(
        RunError, match="the server answers 404 Not Found: start the same command again, try another --mirror"
    ):
        download(files(server), tmp_path)
    with pytest.raises(
        RunError,
        match=r"cannot be fetched \(.*Connection refused.*fetch the file elsewhere and name .* with --source",
    ):
        download(files(server), tmp_path, mirror="http://localhost:1/")
    with pytest.raises(RunError, match="--mirror file:///etc: use an address that begins with http:// or https://"):
        download(files(server), tmp_path, mirror="file:///etc")


@pytest.mark.parametrize("dataset", ["cifar10", "mnist", "fashion-mnist"])
def test_the_command_insists_on_the_official_files(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], dataset: str
) -> None:
    assert convert(dataset, "--download", "--mirror", server.address, "--out", tmp_path / "out") == 1
    assert "broke off, or is not the official file" in capsys.readouterr().err


def test_the_command_fetches_and_converts(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With checksums of a small stand-in in place of the official ones."""
    source = tmp_path / "source"
    write_mnist(source, packed=True)
    monkeypatch.setattr(Handler, "do_GET", lambda self: _serve(self, source))
    sha256 = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in source.iterdir()}
    official = Download(address=server.address, sha256=sha256)
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], download=official))
    for _ in range(2):
        assert convert("mnist", "--download", "--out", tmp_path / "out") == 0
        assert (tmp_path / "out" / "downloads" / "t10k-labels-idx1-ubyte.gz").exists()


def _serve(handler: Handler, directory: Path) -> None:
    content = (directory / handler.path.rpartition("/")[2]).read_bytes()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)
