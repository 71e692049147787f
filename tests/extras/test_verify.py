"""Every kind of damage to a dataset is found, named, and gives a status other than 0."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dali_train import cli
from dali_train.data.dataset import write_index
from dali_train.data.dataset.index import INDEX_DTYPE, Split
from dali_train.data.dataset.tfrecord import Feature, RecordSpan, parse_example
from dali_train.data.dataset.verify import Findings, find_duplicates
from dali_train.extras.indexing.foreign_shards import build_index
from tests.convert.files import convert, small_photograph, tool, write_folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify")
    folder = write_folder(root / "images", {"ant": 12, "bee": 12, "cat": 12})
    options = ("--validation-fraction", 0.25, "--train-shards", 3)
    assert convert("folder", "--train", folder, "--out", root / "out", *options) == 0
    return root / "out"


@pytest.fixture
def dataset(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "dataset")  # with the times of the files


@pytest.fixture
def check(dataset: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*options: str) -> tuple[int, str]:
        capsys.readouterr()
        status = tool("verify_dataset").main([str(dataset), *options])
        return status, capsys.readouterr().out

    return run


def shard(dataset: Path, number: int = 1) -> Path:
    return dataset / "train" / f"train-{number:05d}-of-00003"


def damage(path: Path, offset: int) -> None:
    """Flip a bit, and keep the time: as a disk does it."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def change_index(dataset: Path, column: str, row: int, value: int) -> None:
    path = dataset / "index" / "train.npy"
    rows = np.load(path)
    rows[column][row] = value
    np.save(path, rows)


def test_a_sound_dataset(check: Callable[..., tuple[int, str]]) -> None:
    status, printed = check()
    assert status == 0
    assert printed == ("train: 27 images in 3 classes, 9 per class\nvalidation: 9 images in 3 classes, 3 per class\n")
    assert check("--sample", "5")[0] == 0


def test_a_shard_that_cannot_be_opened_hides_no_other_fault(
    dataset: Path, check: Callable[..., tuple[int, str]]
) -> None:
    damage(shard(dataset, 2), 30)
    shard(dataset).unlink()
    shard(dataset).symlink_to(shard(dataset).name)  # to itself: root is refused nothing by permissions
    for options in ((), ("--sample", "1000"), ("--no-decode",)):
        status, printed = check(*options)
        assert status == 1
        assert f"fault: {shard(dataset)}: cannot be read (Too many levels of symbolic links)" in printed
        assert f"fault: {shard(dataset, 2)}: " in printed


def test_a_flipped_bit_anywhere_in_a_shard(dataset: Path, check: Callable[..., tuple[int, str]]) -> None:
    size = shard(dataset).stat().st_size
    for offset in (0, 9, 30, size // 2, size - 2):
        damage(shard(dataset), offset)
        for options in ((), ("--sample", "1000")):
            status, printed = check(*options)
            assert status == 1
            assert f"fault: {shard(dataset)}: at byte" in printed and "CRC mismatch" in printed
        damage(shard(dataset), offset)
    assert check()[0] == 0


def test_a_shard_that_is_not_the_manifests(dataset: Path, check: Callable[..., tuple[int, str]]) -> None:
    manifest = json.loads((dataset / "dataset.json").read_text())
    manifest["splits"]["train"]["shards"][1]["crc32c"] = "0" * 8
    (dataset / "dataset.json").write_text(json.dumps(manifest))
    status, printed = check()
    assert status == 1 and re.search(r"train-00001-of-00003: has CRC32C \w+, dataset.json says 00000000", printed)


@pytest.mark.parametrize("column", ["offset", "size", "label", "height", "width"])
def test_a_wrong_number_in_the_index(dataset: Path, check: Callable[..., tuple[int, str]], column: str) -> None:
    rows = np.load(dataset / "index" / "train.npy")
    right = int(rows[column][12])
    wrong = (right + 1) % 3 if column == "label" else right + 1
    change_index(dataset, column, 12, wrong)
    status, printed = check()
    assert status == 1
    assert f"fault: {shard(dataset)}: record 3 has {column} {right}, the index says {wrong}" in printed
    assert f"has {column} {right}, the index says {wrong}" in check("--sample", "27")[1]


def test_another_reader_is_asked(
    dataset: Path, check: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of our own parser, which index and check have in common."""

    def faulty(buffer: memoryview, record: RecordSpan, path: Path) -> dict[str, Feature]:
        features = parse_example(buffer, record, path)
        (label,) = features["image/class/label"].integers
        return features | {"image/class/label": Feature("int64", integers=(label % 3 + 1,))}

    monkeypatch.setattr(write_index, "parse_example", faulty)
    build_index(dataset)
    for options in ((), ("--sample", "5")):
        status, printed = check(*options)
        assert status == 1 and set(re.findall("fault: (.*): record", printed)) >= {
            str(shard(dataset, n)) for n in (0, 2)
        }
        assert "record 0 has another image or label as the package tfrecord reads it" in printed


def test_labels_out_of_range(dataset: Path, check: Callable[..., tuple[int, str]]) -> None:
    change_index(dataset, "label", 0, 77)
    assert "train: the index has labels 0 to 77, but dataset.json has 3 labels, counted from 0" in check()[1]


def test_missing_truncated_and_strange_files(dataset: Path, check: Callable[..., tuple[int, str]]) -> None:
    shard(dataset, 0).unlink()
    os.truncate(shard(dataset, 1), 1000)
    damage(shard(dataset, 2), 200)
    status, printed = check()
    assert status == 1
    assert f"{shard(dataset, 0)} is missing" in printed
    assert f"{shard(dataset, 1)} has 1000 bytes, the index was made for" in printed
    assert f"{shard(dataset, 2)}: at byte 0: CRC mismatch" in printed


def test_strangers_and_text_indexes(dataset: Path, check: Callable[..., tuple[int, str]]) -> None:
    (dataset / "train" / "train-00003-of-00004").write_bytes(b"")
    text_index = dataset / "idx_files" / "train" / "train-00000-of-00003.idx"
    text_index.write_text(text_index.read_text().replace("0 ", "1 ", 1))
    (dataset / "idx_files" / "train" / "train-00001-of-00003.idx").unlink()
    status, printed = check()
    assert status == 1
    assert "1 files that dataset.json does not name: train-00003-of-00004" in printed
    assert printed.count(".idx: is missing or does not fit its shard") == 2
    sampled = check("--sample", "27")[1]
    assert "train-00001-of-00003.idx is missing or cannot be read" in sampled and "at byte 1" in sampled


def test_an_index_of_other_rows(dataset: Path, check: Callable[..., tuple[int, str]]) -> None:
    np.save(dataset / "index" / "train.npy", np.zeros(5, INDEX_DTYPE))
    assert "has 5 rows, dataset.json says 27" in check()[1]
    (dataset / "index" / "train.npy").unlink()
    assert "cannot be read" in check()[1]


def test_duplicates_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By all that write or check a dataset, with the names of files."""
    root, out, index = (tmp_path / name for name in ("images", "out", "index"))
    train = write_folder(root / "train", {"ant": 5, "bee": 5, "unused": 1})
    (train / "ant" / "twin.jpg").write_bytes(small_photograph(0))
    (train / "bee" / "wrong.jpg").write_bytes(small_photograph(1))
    validation = write_folder(root / "val", {"ant": 1, "bee": 2}, first_seed=50)
    (validation / "ant" / "leak.jpg").write_bytes(small_photograph(2))
    assert convert("folder", "--train", train, "--validation", validation, "--out", out) == 0
    converted = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert converted[:2] == [
        "note: validation: 1 classes without images: unused",
        "note: 3 images have the same bytes as another one",
    ]
    assert [re.sub(r" image \d+,", "", line) for line in converted[2:]] == [
        "note: 1 duplicates under two labels: train ant/001.jpg (ant) = train bee/wrong.jpg (bee)",
        "note: 1 duplicates in two splits: train ant/002.jpg (ant) = validation ant/leak.jpg (ant)",
    ]

    def notes(*words: str | Path) -> list[str]:
        assert cli.main(["data", *map(str, words)]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]

    indexed = notes("index", root, "--out", index)
    assert indexed == notes("index", root, "--out", index), "as often as it is made"
    assert indexed == notes("verify", index)
    assert indexed[:2] == converted[:2]
    names = f"train {train}/ant/001.jpg (ant) = train {train}/bee/wrong.jpg (bee)"
    assert indexed[2] == f"note: 1 duplicates under two labels: {names}"
    names = f"train {train}/ant/002.jpg (ant) = validation {validation}/ant/leak.jpg (ant)"
    assert indexed[3] == f"note: 1 duplicates in two splits: {names}"
    assert notes("verify", out) == converted
    assert notes("index", out) == converted[1:], "of TFRecords it says otherwise which classes are unused"


def test_equal_checksums_are_not_equal_bytes(dataset: Path) -> None:
    """The bytes of pairs are compared; of very many, the first of each kind."""
    split, findings = Split(dataset, "train"), Findings(images_per_class={"train": np.zeros(3, np.int64)})
    split.rows = np.array(split.rows)
    split.rows["size"] = split.rows["size"].min()
    find_duplicates({"train": split}, {"train": np.ones(len(split), np.uint32)}, findings)
    assert findings.duplicates == []


def test_a_folder_with_all_classes_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write_folder(tmp_path / "train", {"ant": 70, "bee": 70})
    shutil.copytree(train, train / "train")
    for words in (["--out", tmp_path / "one"], ["--out", tmp_path / "several", "--several-labels"]):
        assert cli.main(["data", "index", str(train), *map(str, words)]) == 0
    one, several = capsys.readouterr().out.split(f"{tmp_path / 'one'} indexes")
    assert "note: 140 images have the same bytes as another one" in one
    assert "note: 140 duplicates under two labels: " in one and one.count(" = ") == 3
    assert "two labels" not in several
