"""Sources of many files with labels that are numbers, as other loaders' users have them: WebDataset."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dali_train.data.convert.webdataset import webdataset
from dali_train.data.dataset.manifest import Manifest
from dali_train.errors import DatasetError
from tests.data.files import files_of, records, small_photograph, tool, write_tar

NAMES = ["ant", "bee", "cat"]
TRAIN, VALIDATION = 10, 3  # images, of which number n is small_photograph(n) and has the label n % 3


def write_webdataset(root: Path) -> dict[str, object]:
    """Two tars for training, one with the labels in JSON beside those in .cls, and one for validation."""
    for split, count in (("train", TRAIN), ("val", VALIDATION)):
        samples = [
            (f"./{split}/{n:03d}.{ending}", content)
            for n in range(count)
            for ending, content in (
                ("cls", f"{n % 3}\n".encode()),
                ("JPG" if n % 2 else "jpg", small_photograph(n)),
                ("json", json.dumps({"caption": "an animal", "class": n % 3}).encode()),
            )
        ]
        half = len(samples) // 6 * 3
        write_tar(root / f"{split}-000.tar", samples[:half])
        write_tar(root / f"{split}-001.tar", samples[half:])
    (root / "names.txt").write_text("".join(f"{name}\n" for name in NAMES))
    return {"--class-names": root / "names.txt"}


WRITE: dict[str, Callable[[Path], dict[str, object]]] = {"webdataset": write_webdataset}


@pytest.mark.parametrize("kind", WRITE)
def test_images_labels_and_names(kind: str, tmp_path: Path) -> None:
    """One process, or two parts in the wrong order with other numbers of workers: each image as it was, every byte."""
    options = WRITE[kind](tmp_path / "source")
    command = [kind, "--source", tmp_path / "source", *(part for option in options.items() for part in option)]

    def convert(out: Path, *more: object) -> int:
        return tool("make_tfrecords").main([str(word) for word in (*command, "--out", out, *more)])

    out = tmp_path / "out"
    assert convert(out, "--workers", 1, "--train-shards", 3) == 0
    assert Manifest.read(out).class_names == tuple(NAMES)
    for split, count in (("train", TRAIN), ("validation", VALIDATION)):
        stored = sorted(records(out, split).values(), key=str)
        assert stored == sorted([(1 + n % 3, NAMES[n % 3], small_photograph(n)) for n in range(count)], key=str)
    for phase in (["--plan"], ["--part", "2/2"], ["--part", "1/2"], ["--finish"]):
        assert convert(tmp_path / "parts", *phase, "--workers", 3, "--train-shards", 3) == 0
    assert files_of(tmp_path / "parts") == files_of(out)


SAMPLE = [("a/1.jpg", small_photograph(0)), ("a/1.cls", b"2")]


def test_labels_in_json_a_single_tar_and_numbers_as_names(tmp_path: Path) -> None:
    write_webdataset(tmp_path)
    splits, names = webdataset(
        tmp_path / "train-000.tar", label_key="class", class_names=None, validation_fraction=0.4, seed=0
    )
    assert names == ["0", "1", "2"] and sorted(splits) == ["train", "validation"]
    assert np.bincount(splits["train"].labels).tolist() == [1, 1, 1]
    assert splits["validation"].locate(0)[0].startswith(f"{tmp_path}/train-000.tar:train/00")


def test_splits_by_the_names_of_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def splits() -> dict[str, int]:
        found, _ = webdataset(tmp_path, label_key=None, class_names=None, validation_fraction=None, seed=0)
        return {split: len(source.labels) for split, source in found.items()}

    write_tar(tmp_path / "shard.tar", SAMPLE)
    assert splits() == {"train": 1}
    (tmp_path / "shard.tar").rename(tmp_path / "latest-contrasts-0.tar")  # neither "test" nor "train" is a word of it
    assert splits() == {"train": 1}
    (tmp_path / "latest-contrasts-0.tar").rename(tmp_path / "train_0.tar")
    write_tar(tmp_path / "Testing" / "0.tar", [*SAMPLE, ("2.cls", b"0"), ("2.jpg", b"")])
    assert splits() == {"train": 1, "validation": 2}
    write_tar(tmp_path / "test-archives" / "validation" / "0.tar", SAMPLE)
    assert splits() == {"train": 1, "validation": 1}
    assert "1 files of the test split are left out" in caplog.text


@pytest.mark.parametrize(
    ("members", "label_key", "place", "message"),
    [
        (SAMPLE[:1], None, "0.tar:a/1", "has 1 image and 0 .cls files: one of each must stand side by side"),
        (SAMPLE[1:], None, "0.tar:a/1", "has 0 images and 1 .cls file"),
        ([*SAMPLE, ("a/1.png", b"")], None, "0.tar:a/1", "has 2 images and 1 .cls file"),
        ([SAMPLE[0], ("b/2.jpg", b""), SAMPLE[1]], None, "0.tar:a/1", "has 1 image and 0 .cls files"),
        ([SAMPLE[0], ("a/1.json", b"{}")], None, "0.tar:a/1", "name the field of a KEY.json with --label-key"),
        ([SAMPLE[0], ("a/1.cls", b"cat")], None, "0.tar:a/1.cls", "its label is 'cat': labels are whole numbers from"),
        ([SAMPLE[0], ("a/1.cls", b"-1")], None, "0.tar:a/1.cls", "its label is -1: labels are whole numbers from 0"),
        ([SAMPLE[0], ("a/1.cls", b"9" * 5000)], None, "0.tar:a/1.cls", "9...: labels are"),
        ([SAMPLE[0], ("a/1.cls", b"\xff\0")], None, "0.tar:a/1.cls", "labels are whole numbers from 0 to 999,999"),
        ([SAMPLE[0], ("a/1.cls", b"3")], None, "0.tar:a/1.jpg", "its label is 3, and there are 3 class names"),
        ([SAMPLE[0], ("a/1.json", b'{"y": 1}')], "label", "0.tar:a/1.json", "has no field label: name another with"),
        ([SAMPLE[0], ("a/1.json", b"[" * 99_999)], "label", "0.tar:a/1.json", "has no field label"),
        ([SAMPLE[0], ("a/1.json", b'{"y": true}')], "y", "0.tar:a/1.json", "its label is True: labels are"),
        ([("readme.txt", b"")], None, "0.tar", "has no images: fetch it"),
    ],
)
def test_broken_samples(
    tmp_path: Path, members: list[tuple[str, bytes]], label_key: str | None, place: str, message: str
) -> None:
    write_tar(tmp_path / "0.tar", members)
    names = tmp_path / "names.txt"
    names.write_text("ant\nbee\ncat\n")
    with pytest.raises(DatasetError) as error:
        webdataset(tmp_path, label_key=label_key, class_names=names, validation_fraction=None, seed=0)
    assert f"{tmp_path / place}: " in str(error.value) and message in str(error.value)


def test_broken_files(tmp_path: Path) -> None:
    def message(source: Path = tmp_path, class_names: Path | None = None, fraction: float | None = None) -> str:
        with pytest.raises(DatasetError) as error:
            webdataset(source, label_key=None, class_names=class_names, validation_fraction=fraction, seed=0)
        return str(error.value)

    assert f"--source {tmp_path}/none: does not exist: name a directory of *.tar" in message(tmp_path / "none")
    assert f"--source {tmp_path}: has no *.tar: name the directory that holds them" in message()
    tar = write_tar(tmp_path / "train-0.tar", SAMPLE)
    assert f"--class-names {tmp_path}/a: cannot be read" in message(class_names=tmp_path / "a")
    assert f"--class-names {tar}: cannot be read" in message(class_names=tar)
    (tmp_path / "names").write_text("ant\nant\n")
    assert "use one name per line, each class another" in message(class_names=tmp_path / "names")
    other = write_tar(tmp_path / "val-0.tar", SAMPLE)
    assert "--validation-fraction is 0.5 where there is a validation split" in message(fraction=0.5)
    other = other.rename(tmp_path / "other.tar")
    assert f"{other}: train, val or test stands in the names of other files, not in this one: rename" in message()
    other.unlink()
    tar.write_bytes(tar.read_bytes()[:1500])
    assert f"{tar}: at byte 0: member 'a/1.jpg' has" in message() and "cut off" in message()
    write_tar(tar, SAMPLE, mode="w:gz")
    assert f"{tar}: is gzipped, and images are read in place: gunzip it first" in message()
