"""Datasets in a bucket: made there, shown, checked and cut down, with the bytes that they have on a disk."""

import json
import shutil
from pathlib import Path

import pytest

from dali_train.cli import main
from dali_train.data.dataset.manifest import fetched_metadata
from dali_train.runtime import object_store
from dali_train.runtime.object_store import Bucket
from tests.convert.files import files_of, write_folder
from tests.s3_server import S3Server

URL = "s3://bucket/out"
OPTIONS = ("--validation-fraction", 0.3, "--train-shards", 3)


@pytest.fixture(autouse=True)
def no_metadata(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetched_metadata.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("bucket") / "images", {"ant": 6, "bee": 7, "cat": 8})


def data(*words: object, status: int = 0) -> None:
    assert main(["data", *map(str, words)]) == status


def objects(url: str) -> dict[str, bytes]:
    return {name: Bucket(url).read_all(name) for name in Bucket(url).sizes("")}


def test_a_dataset_is_made_in_a_bucket(
    folder: Path,
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second start uploads what the first one could not; others do not mix with it."""
    words = ("convert", "folder", "--train", folder, *OPTIONS, "--workers", 1)
    data(*words, "--out", tmp_path / "out")
    monkeypatch.setattr(object_store, "RETRY_S", 0.5)
    s3_server.fault = lambda method, path: "403 Forbidden" if method == "PUT" and "train-00002" in path else None
    Bucket(URL).write("stranger", b"")
    data(*words, "--out", URL, status=2)
    assert f"{URL} holds stranger but no conversion to resume: use an empty prefix" in capsys.readouterr().err
    Bucket(URL).delete("stranger")
    data(*words, "--out", URL, status=1)
    assert f"{URL}/train/train-00002-of-00003 is refused" in capsys.readouterr().err
    assert "dataset.json" not in Bucket(URL).sizes("")
    data(*words, "--seed", 5, "--out", URL, status=2)
    assert "holds a conversion with other options" in capsys.readouterr().err
    uploaded = set(Bucket(URL).sizes("train/"))
    again: list[str] = []
    s3_server.fault = lambda method, path: again.append(path) if method == "PUT" else None
    data(*words, "--out", URL)
    assert uploaded and not any(path.endswith(name) for name in uploaded for path in again)
    assert f"{URL} is ready" in capsys.readouterr().out
    assert objects(URL) == files_of(tmp_path / "out")
    assert not list((tmp_path / "cache").rglob("train-*"))
    data(*words, "--out", URL)
    assert f"{URL} is complete already" in capsys.readouterr().out

    last = f"{URL}-killed"
    s3_server.fault = lambda method, path: "403 Forbidden" if method in ("POST", "DELETE") else None  # the last request
    data(*words, "--out", last, status=1)
    assert "dataset.json" in Bucket(last).sizes("") and [*(tmp_path / "cache").rglob("dataset.json")]
    s3_server.fault = None
    data(*words, "--out", last)
    assert objects(last) == files_of(tmp_path / "out")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    data(*words, "--seed", 5, "--out", URL, status=2)
    data(*words, "--out", "https://host/out", status=2)
    assert "--out https://host/out: a server of this kind is only read" in capsys.readouterr().err
    data(*words, "--part", "1/2", "--out", URL, status=2)
    assert "--plan, --part and --finish need a directory that all machines share" in capsys.readouterr().err


def test_a_dataset_in_a_bucket_is_read(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{URL}-read/whole"
    local = tmp_path / "whole"
    data("convert", "folder", "--train", folder, *OPTIONS, "--out", local)
    for name, content in files_of(local).items():
        Bucket(url).write(name, content)
    for source, name in ((local, "a"), (url, "b")):
        data("subset", source, "--classes", 2, "--images-per-class", 3, "--out", tmp_path / name)
        data("show", source, "--out", tmp_path / f"{name}-sheets")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert files_of(tmp_path / "a-sheets") == files_of(tmp_path / "b-sheets")
    data("subset", url, "--classes", 2, "--images-per-class", 3, "--out", f"{URL}-read/subset")
    assert objects(f"{URL}-read/subset") == files_of(tmp_path / "a")
    capsys.readouterr()
    data("verify", url, "--sample", 3)
    assert capsys.readouterr().out.startswith("train: ")

    name = "train/train-00001-of-00003"
    content = bytearray(Bucket(url).read_all(name))
    content[len(content) // 2] ^= 4
    Bucket(url).write(name, bytes(content))
    Bucket(url).write("train/stranger", b"")
    for words in (("--no-decode",), ("--no-decode", "--sample", 1000)):
        data("verify", url, *words, status=1)
        printed = capsys.readouterr().out
        assert f"fault: {url}/{name}: at byte" in printed and "CRC mismatch" in printed
        assert f"fault: {url}/train: 1 files that dataset.json does not name: stranger" in printed


def test_records_in_a_bucket_are_indexed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, local = "s3://bucket/foreign", tmp_path / "foreign"
    data("convert", "folder", "--train", folder, *OPTIONS, "--out", tmp_path / "out")
    for split in ("train", "validation"):
        shutil.copytree(tmp_path / "out" / split, local / split)
    data("index", url, status=2)
    assert f"{url} has no objects in train/ or validation/" in capsys.readouterr().err
    for name, content in files_of(local).items():
        Bucket(url).write(name, content)
    names = tmp_path / "names"
    names.write_text("ant\nbee\ncat\n")
    data("index", local, "--class-names", names)
    data("index", url, "--class-names", names)
    assert objects(url) == files_of(local)
    made = (tmp_path / "out" / "dataset.json").read_bytes()
    Bucket(url).write("dataset.json", made)
    data("index", url)
    assert json.loads(Bucket(url).read_all("dataset.json"))["conversion"] == json.loads(made)["conversion"]
    for root in (local, url):
        if root == url:
            Bucket(url).delete([name for name in objects(url) if name.startswith("validation/")])
        else:
            shutil.rmtree(local / "validation")
        data("index", root, "--class-names", names)
    assert objects(url) == files_of(local)
    assert not [name for name in objects(url) if "validation" in name]
    Bucket(url).write("train/train-00001-of-00003", b"no record at all")
    data("index", url, status=1)
    assert f"{url}/train/train-00001-of-00003: at byte 0" in capsys.readouterr().err
    data("index", "https://host/foreign", status=2)
    data("index", url, "--out", tmp_path, status=2)
    assert f"--out {tmp_path} with {url}: the index of a bucket is written to" in capsys.readouterr().err
