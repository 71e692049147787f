"""Downloads from a real server on this machine: complete, broken off, and wrong."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dali_train.data.convert.datasets import DATASETS, Download
from dali_train.errors import RunError
from dali_train.extras.formats.download import download
from tests.convert.files import convert, write_mnist
from tests.object_server import ObjectServer

CONTENT = bytes(range(256)) * 2000


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with ObjectServer(tmp_path_factory.mktemp("served")) as server:
        (server.directory / "a.bin").write_bytes(CONTENT)
        yield server


def files(server: ObjectServer, content: bytes = CONTENT) -> Download:
    return Download(address=server.url, sha256={"a.bin": hashlib.sha256(content).hexdigest()})


def break_off(handler: Any, path: str, content: bytes) -> bool:
    handler.close_connection = True
    handler.reply(200, content[:100_000], size=len(content))
    return True


def test_fetches_once(server: ObjectServer, tmp_path: Path) -> None:
    download(files(server), tmp_path / "new")
    download(files(server), tmp_path / "new")
    assert (tmp_path / "new" / "a.bin").read_bytes() == CONTENT
    assert server.num_requests == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.bin"]


def test_a_download_that_breaks_off_leaves_nothing(server: ObjectServer, tmp_path: Path) -> None:
    server.fault = break_off
    (tmp_path / "a.bin.1234.partial").write_bytes(b"what a killed download left")
    (tmp_path / "thesis.pdf.partial").write_bytes(b"what a browser has fetched so far")
    with pytest.raises(RunError, match=r"broke off, or is not the official file .*: start the same command again"):
        download(files(server), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.pdf.partial"]
    server.fault = None
    download(files(server), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_wrong_content_is_deleted_and_named(server: ObjectServer, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"broke off, or is not the official file \(invalid hash value"):
        download(files(server, b"other"), tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.bin").write_bytes(b"mine")
    with pytest.raises(RunError, match="as of the official file: delete it, then it is fetched again"):
        download(files(server), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"mine"


def test_servers_that_refuse_or_are_not_there(server: ObjectServer, tmp_path: Path) -> None:
    (server.directory / "a.bin").unlink()
    with pytest.raises(
        RunError, match="the server answers 404 Not Found: start the same command again, try another --mirror"
    ):
        download(files(server), tmp_path)
    with pytest.raises(
        RunError, match=r"cannot be fetched \(.*Connection refused.*fetch the file elsewhere and name .* with --source"
    ):
        download(files(server), tmp_path, mirror="http://localhost:1/")
    with pytest.raises(RunError, match="--mirror file:///etc: use an address that begins with http:// or https://"):
        download(files(server), tmp_path, mirror="file:///etc")


@pytest.mark.parametrize("dataset", ["cifar10", "mnist", "fashion-mnist"])
def test_the_command_insists_on_the_official_files(
    server: ObjectServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], dataset: str
) -> None:
    official = DATASETS[dataset].download
    assert official is not None
    for name in official.sha256:
        (server.directory / name).write_bytes(CONTENT)
    assert convert(dataset, "--download", "--mirror", server.url, "--out", tmp_path / "out") == 1
    assert "broke off, or is not the official file" in capsys.readouterr().err


def test_the_command_fetches_and_converts(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checksums of a small stand-in in place of the official ones."""
    server.directory = tmp_path / "source"
    write_mnist(server.directory, packed=True)
    sha256 = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in server.directory.iterdir()}
    monkeypatch.setitem(
        DATASETS, "mnist", replace(DATASETS["mnist"], download=Download(address=server.url, sha256=sha256))
    )
    for _ in range(2):
        assert convert("mnist", "--download", "--out", tmp_path / "out") == 0
        assert (tmp_path / "out" / "downloads" / "t10k-labels-idx1-ubyte.gz").exists()
