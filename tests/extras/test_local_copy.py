"""The copy of a dataset on a host's own disk: made once, completely, by one process, and again when the source has
changed."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles, stored_image
from dali_train.errors import ConfigError, DatasetError
from dali_train.extras.indexing.foreign_shards import build_index
from dali_train.extras.local_copy import make_copy
from tests.conftest import Train
from tests.ranks import FORK


@pytest.fixture
def source(dataset: Path, tmp_path: Path) -> Path:
    """A dataset that a test may change."""
    return shutil.copytree(dataset, tmp_path / "source [1]")  # with its times


def same_images(a: Path, b: Path) -> bool:
    one, other = Split(a, "train"), Split(b, "train")
    ours, theirs = MappedFiles(one), MappedFiles(other)
    return len(one) == len(other) and all(
        np.array_equal(stored_image(ours, i), stored_image(theirs, i)) for i in range(len(one))
    )


def files(root: Path) -> dict[Path, int]:
    """Every file's inode: another one if it was written again."""
    return {path.relative_to(root): path.stat().st_ino for path in root.rglob("*") if path.is_file()}


def test_copy_is_the_dataset_and_made_once(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = make_copy(source, tmp_path / "disk", verbose=True).path
    assert same_images(source, copy)
    assert files(copy).keys() == files(source).keys()
    assert "copying" in capsys.readouterr().err
    before = files(copy)
    assert make_copy(source, tmp_path / "disk", verbose=True).path == copy
    assert files(copy) == before
    assert capsys.readouterr().err == ""


def test_interrupted_copy_goes_on(source: Path, tmp_path: Path) -> None:
    copy = make_copy(source, tmp_path / "disk", verbose=True).path
    before = files(copy)
    # What a kill leaves: finished shards, one half written, no dataset.json.
    shard = Path("train") / "train-00001-of-00003"
    (copy / "dataset.json").unlink()
    (copy / shard).rename(copy / "train" / f".{shard.name}.partial")
    os.truncate(copy / "train" / f".{shard.name}.partial", 100)
    assert make_copy(source, tmp_path / "disk", verbose=True).path == copy
    assert same_images(source, copy)
    after = files(copy)
    assert after.keys() == before.keys()
    assert {path for path in after if after[path] != before[path]} <= {shard, Path("dataset.json")}


@pytest.mark.parametrize("name", ["train/train-00001-of-00003", "index/train.npy", "dataset.json"])
def test_copy_that_was_changed_is_not_believed(source: Path, tmp_path: Path, name: str) -> None:
    """The same size, other content."""
    copy = make_copy(source, tmp_path / "disk", verbose=True).path
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    assert make_copy(source, tmp_path / "disk", verbose=True).path == copy
    assert (copy / name).read_bytes() == (source / name).read_bytes()
    assert same_images(source, copy)


def test_copies_belong_to_one_user(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = make_copy(source, tmp_path / "disk", verbose=True).path
    assert copy.parent.stat().st_mode & 0o777 == 0o700
    foreign = tmp_path / "disk" / "user-12345"
    foreign.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # whose directory somebody else has made
    with pytest.raises(ConfigError, match=r"user-12345 is a link or belongs to another user, .*: set data.local_copy"):
        make_copy(source, tmp_path / "disk", verbose=True)


def test_directory_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"data.local_copy .*file/disk is not writable .*\(Not a dir.*: use a directory"
    ):
        make_copy(source, tmp_path / "file" / "disk", verbose=True)


def test_changed_source_is_copied_again_and_a_version_in_use_stays(source: Path, tmp_path: Path) -> None:
    first = make_copy(source, tmp_path / "disk", verbose=True)
    shutil.copy(source / "train" / "train-00000-of-00003", source / "train" / "train-00001-of-00003")
    build_index(source)
    second = make_copy(source, tmp_path / "disk", verbose=True)
    assert second.path != first.path
    assert same_images(source, second.path)
    assert stored_image(MappedFiles(Split(first.path, "train")), 0).size, "still whole: somebody reads it"
    assert first.in_use is not None
    first.in_use.close()
    build_index(source)
    # Files that are not the copy's, and folders that are not copies but are named like some.
    (first.path / "train" / "sub").mkdir()
    for path in (
        first.path / "notes",
        first.path / "train" / "sub" / "x",
        first.path.with_name(f"{first.path.name}-old") / "x",
    ):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    named = shutil.copytree(second.path, first.path.with_name(first.path.name[:-12] + "0" * 12))
    third = make_copy(source, tmp_path / "disk", verbose=True)
    assert {str(path) for path in files(first.path)} == {"notes", "train/sub/x"} and same_images(named, second.path)
    assert (first.path.with_name(f"{first.path.name}-old") / "x").exists()
    assert second.path.exists() and third.path.exists()


def make_copy_and_say(source: Path, directory: Path, log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
        copy = make_copy(source, directory, verbose=False)
        assert same_images(source, copy.path)


def test_one_of_many_processes_copies(source: Path, tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(6)]
    processes = [FORK.Process(target=make_copy_and_say, args=(source, tmp_path / "disk", log)) for log in logs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 6, [log.read_text() for log in logs]
    assert sum("copying" in log.read_text() for log in logs) == 1


def test_shard_that_is_not_what_was_indexed(source: Path, tmp_path: Path) -> None:
    shard = source / "train" / "train-00002-of-00003"
    times = shard.stat()
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(
        DatasetError, match=r"train-00002-of-00003 has checksum \w+, dataset.json says \w+: run `dali-train data verify"
    ):
        make_copy(source, tmp_path / "disk", verbose=True)
    with pytest.raises(DatasetError, match="this directory does not exist"):
        make_copy(tmp_path / "nothing", tmp_path / "disk", verbose=True)


def test_small_disk_is_noticed_before_copying_by_all_ranks(source: Path, tmp_path: Path, train: Train) -> None:
    # A file without content may be larger than the disk it lies on.
    size = shutil.disk_usage(tmp_path).free + 10_000_000_000
    os.truncate(source / "train" / "train-00000-of-00003", size)
    manifest = json.loads((source / "dataset.json").read_text())
    manifest["splits"]["train"]["shards"][0] |= {"num_bytes": size, "crc32c": None}
    (source / "dataset.json").write_text(json.dumps(manifest))
    (source / "index" / "train.npy").touch()
    disk = tmp_path / "disk"
    output = train("run", "--data.root", str(source), "--data.local_copy", str(disk), ranks=2, status=2)
    assert output.count(f"data.local_copy {disk} has ") == 1, output  # what all ranks find, one says
    assert "bytes, use a larger disk, or leave data.local_copy out" in output
    assert not list(disk.rglob("train-*"))
