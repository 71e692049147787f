"""Sources of many files: WebDataset, Parquet as on the Hugging Face hub, MosaicML Streaming's MDS, ImageNet-21k."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from dali_train.data.convert.datasets import DATASETS, advice
from dali_train.data.convert.sources import SourceError, Sources
from dali_train.data.dataset.image_file import BadImageError, image_size
from dali_train.data.dataset.manifest import Manifest
from dali_train.errors import DatasetError, RunError
from tests.convert import files
from tests.convert.files import files_of, records, small_photograph, tar_bytes, tool, write_tar

NAMES = ["n00000001", "n00000002", "n00000003"]
TRAIN, VALIDATION = 10, 3  # images, of which number n is small_photograph(n) and has the label n % 3
Options = dict[str, Any]


def load(kind: str, source: Path, **options: object) -> Sources:
    rest = ("label_key", "image_key", "class_names", "validation_fraction", "group_by")
    given = {**dict.fromkeys(rest), "seed": 0, "source": source, "out": source.parent, **options}
    return DATASETS[kind].load(Namespace(**given))


def error_of(kind: str, source: Path, **options: object) -> str:
    with pytest.raises((DatasetError, RunError)) as error:
        splits, _ = load(kind, source, **options)
        splits["train"].read(0)
    return str(error.value)


def write_names(path: Path) -> Options:
    path.write_text("".join(f"{name}\n" for name in NAMES))
    return {"--class-names": path}


def write_webdataset(root: Path) -> Options:
    """Two tars for each split, with labels both in .cls and in .json."""
    root.mkdir(exist_ok=True)
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
    return write_names(root / "names.txt")


def table(numbers: list[int], names: list[str] | None = NAMES, labels: list[Any] | None = None) -> pyarrow.Table:
    images = [{"bytes": small_photograph(n), "path": f"{n}.jpg"} for n in numbers]
    made = pyarrow.table({"image": images, "label": [n % 3 for n in numbers] if labels is None else labels})
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    return made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def write_parquet(root: Path) -> Options:
    """The hub's names, several row groups, and a test split without labels, which is to be left out."""
    (root / "data").mkdir(parents=True)
    for name, content in (
        ("train-00000-of-00002", table([*range(4)])),
        ("train-00001-of-00002", table([*range(4, TRAIN)])),
        ("validation-00000-of-00001", table([*range(VALIDATION)])),
        ("test-00000-of-00001", table([7], labels=[-1])),
    ):
        parquet.write_table(content, root / "data" / f"{name}.parquet", row_group_size=3)
    return {}


def write_mds(root: Path) -> Options:
    """What Streaming 0.13's MDSWriter has made of the same images, with ``columns={"i": "int", "x": "jpeg", "y": "int",
    "note": "str"}, size_limit=16000``; of the validation split with ``compression="zstd:9"``."""
    shutil.copytree(Path(__file__).parent / "mds", root, dirs_exist_ok=True)
    return write_names(root / "names.txt")


def write_imagenet21k(root: Path) -> Options:
    for split, count in (("train", TRAIN), ("val", VALIDATION)):
        (root / split).mkdir(parents=True)
        for label, synset in enumerate(NAMES):
            members = [(f"{synset}_{n}.JPEG", small_photograph(n)) for n in range(label, count, 3)]
            write_tar(root / split / f"{synset}.tar", members)
    return {}


WRITE: dict[str, Callable[[Path], Options]] = {
    "webdataset": write_webdataset,
    "parquet": write_parquet,
    "mds": write_mds,
    "imagenet21k": write_imagenet21k,
}


@pytest.mark.parametrize("kind", WRITE)
def test_images_labels_and_names(kind: str, tmp_path: Path) -> None:
    """One process, or two parts in the wrong order with other numbers of workers: every image, and the same bytes."""
    options = WRITE[kind](tmp_path / "source")
    command = [kind, "--source", tmp_path / "source", *(part for option in options.items() for part in option)]

    def convert(out: Path, *more: object) -> int:
        return tool("make_tfrecords").main([str(word) for word in (*command, "--out", out, *more)])

    out = tmp_path / "out"
    assert convert(out, "--workers", 1, "--train-shards", 3) == 0
    assert Manifest.read(out).class_names == tuple(NAMES) and not Manifest.read(out).applies_orientation
    number_of = {image_size(small_photograph(n)): n for n in range(TRAIN)}
    # libjpeg's version decides what tests/data/mds has, so those images are compared with what is in its shards.
    shards = b"".join(path.read_bytes() for path in (tmp_path / "source").rglob("*.mds"))
    for split, count in (("train", TRAIN), ("validation", VALIDATION)):
        numbers = []
        for place, (label, name, content) in records(out, split).items():
            assert (tmp_path / "source" / place.partition(":")[0]).is_file()
            numbers.append(n := number_of[image_size(content)])
            assert (label, name) == (1 + n % 3, NAMES[n % 3])
            assert content in shards if kind == "mds" else content == small_photograph(n)
        assert sorted(numbers) == [*range(count)]
    for phase in (["--plan"], ["--part", "2/2"], ["--part", "1/2"], ["--finish"]):
        assert convert(tmp_path / "parts", *phase, "--workers", 3, "--train-shards", 3) == 0
    assert files_of(tmp_path / "parts") == files_of(out)
    # The advice to who takes it for a dataset.
    directory = tmp_path / "source" / {"parquet": "data", "webdataset": ""}.get(kind, "train")
    assert f"`dali-train data convert {kind} --source {directory} --out DATASET`" in advice(directory, DATASETS)


SAMPLE = [("a/1.jpg", small_photograph(0)), ("a/1.cls", b"2")]


def test_labels_in_json_a_single_tar_and_numbers_as_names(tmp_path: Path) -> None:
    write_webdataset(tmp_path)
    splits, names = load("webdataset", tmp_path / "train-000.tar", label_key="class", validation_fraction=0.4)
    assert names == ["0", "1", "2"] and sorted(splits) == ["train", "validation"]
    assert np.bincount(splits["train"].labels).tolist() == [1, 1, 1]
    assert splits["validation"].name(0).startswith("train-000.tar:train/00")


def test_splits_by_the_names_of_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def splits() -> dict[str, int]:
        return {split: len(source.labels) for split, source in load("webdataset", tmp_path)[0].items()}

    write_tar(tmp_path / "shard.TAR", SAMPLE)
    assert splits() == {"train": 1}
    (tmp_path / "shard.TAR").rename(tmp_path / "latest-contrasts-0.tar")  # neither "test" nor "train" is a word of it
    assert splits() == {"train": 1}
    (tmp_path / "latest-contrasts-0.tar").rename(tmp_path / "train_0.tar")
    for name in ("Testing", "test-archives/validation"):
        (tmp_path / name).mkdir(parents=True)
    write_tar(tmp_path / "Testing" / "0.tar", [*SAMPLE, ("2.cls", b"0"), ("2.jpg", b"")])
    assert splits() == {"train": 1, "validation": 2}
    write_tar(tmp_path / "test-archives" / "validation" / "0.tar", SAMPLE)
    assert splits() == {"train": 1, "validation": 1}
    assert "1 of the test split, since there is another" in caplog.text


def test_broken_files(tmp_path: Path) -> None:
    """In what all kinds have in common."""

    def error(source: Path = tmp_path, **options: object) -> str:
        return error_of("webdataset", source, **options)

    assert f"--source {tmp_path}/none: does not exist: name a directory of *.tar" in error(tmp_path / "none")
    assert f"--source {tmp_path}: has no *.tar: name the directory" in error()
    (tmp_path / "0.arrow").touch()
    assert "has no *.tar, but files .arrow: name the directory that holds them, or one such file" in error()
    with pyarrow.ipc.new_file(tmp_path / "0.arrow", table([0]).schema):
        pass
    assert "0.arrow is a table of Arrow (Feather), which is not read: write it as Parquet, or" in error()
    (tmp_path / "0.arrow").unlink()
    tar = write_tar(tmp_path / "train-0.tar", SAMPLE)
    for path in (tmp_path / "a", tar):
        assert f"--class-names {path}: cannot be read" in error(class_names=path)
    for text, reason in (
        ("ant\nant\n", "line 2 is 'ant' again, as line 1"),
        ("ant\n\nbee\n", "line 2 is empty"),
        ("\n\n", "is empty"),
    ):
        (tmp_path / "names").write_text(text)
        assert f"{reason}: use one name per line, each class another" in error(class_names=tmp_path / "names")
    other = write_tar(tmp_path / "val-0.tar", SAMPLE)
    assert "--validation-fraction is 0.5 where there is a validation split" in error(validation_fraction=0.5)
    other = other.rename(tmp_path / "other.tar")
    assert f"{other}: train, val or test is in the names of other files, but not in this one: rename" in error()
    other.unlink()
    tar.write_bytes(tar.read_bytes()[:1500])
    assert f"{tar}: at byte 0: member 'a/1.jpg' has" in error()
    write_tar(tar, SAMPLE, mode="w:gz")
    assert f"{tar}: images are read in place, and it is compressed with gzip: unpack it: `gunzip < {tar} >" in error()
    tar = tar.rename(f"{tar}.gz")
    assert f"has no *.tar, and {tar.name} is compressed with gzip: unpack it: `gunzip {tar}`" in error()


@pytest.mark.parametrize(
    ("members", "label_key", "place", "message"),
    [
        (SAMPLE[:1], None, ":a/1", "has 1 image and 0 .cls files: there must be one of each side by side"),
        (SAMPLE[1:], None, ":a/1", "has 0 images and 1 .cls file"),
        (SAMPLE[:1], None, ":a/1", "with `tar xf` and name their directory; if it is unpacked already, move it away"),
        ([*SAMPLE, ("a/1.png", b"")], None, ":a/1", "has 2 images and 1 .cls file"),
        ([SAMPLE[0], ("b/2.jpg", b""), SAMPLE[1]], None, ":a/1", "has 1 image and 0 .cls files"),
        ([SAMPLE[0], ("a/1.json", b"{}")], None, ":a/1", "name the field of a KEY.json with --label-key"),
        (
            [SAMPLE[0], ("a/1.cls", b"0"), ("a/2.jpg", b""), ("a/2.cls", b"cat")],
            None,
            ":a/2.cls",
            "its label is 'cat', and those before are numbers: write all alike",
        ),
        (
            [SAMPLE[0], ("a/1.txt", b"a cat\non a mat")],
            None,
            ":a/1.txt",
            "labels are whole numbers from 0 to 999,999, or",
        ),
        ([SAMPLE[0], ("a/1.json", b'{"y": ""}')], "y", ":a/1.json", "its label is '': labels are whole numbers from 0"),
        ([SAMPLE[0], ("a/1.json", b'{"y": null}')], "y", ":a/1.json", "its label is None: labels are whole numbers"),
        ([SAMPLE[0], ("a/1.cls", b"-1")], None, ":a/1.cls", "its label is -1: labels are whole numbers from 0"),
        ([SAMPLE[0], ("a/1.cls", b"9" * 5000)], None, ":a/1.cls", "9...: labels are"),
        ([SAMPLE[0], ("a/1.cls", b"\xff\0\n1")], None, ":a/1.cls", "labels are whole numbers from 0 to 999,999"),
        ([SAMPLE[0], ("a/1.cls", b"3")], None, ":a/1.jpg", "its label is 3, and there are 3 class names"),
        ([SAMPLE[0], ("a/1.cls", b"[0, 0, 1]")], None, ":a/1.cls", "a vector with a number for each class, and"),
        ([SAMPLE[0], ("a/1.json", b'{"y": [0, 1, 1]}')], "y", ":a/1.json", "[0, 1, 1], in which class 1 is twice: it"),
        ([SAMPLE[0], ("a/1.cls", b"[2, 5, 2]")], None, ":a/1.cls", "[2, 5, 2], in which class 2 is twice: write each"),
        ([SAMPLE[0], ("a/1.json", b'{"y": 1}')], "label", ":a/1.json", "has no field label: name another with"),
        ([SAMPLE[0], ("a/1.json", b"[" * 99_999)], "label", ":a/1.json", "has no field label"),
        ([SAMPLE[0], ("a/1.json", b'{"y": true}')], "y", ":a/1.json", "its label is True: labels are"),
        ([("readme.txt", b"")], None, "", "has no images: fetch it"),
    ],
)
def test_broken_samples_of_a_webdataset(
    tmp_path: Path, members: list[tuple[str, bytes]], label_key: str | None, place: str, message: str
) -> None:
    tar = write_tar(tmp_path / "0.tar", members)
    names = write_names(tmp_path / "names.txt")["--class-names"]
    error = error_of("webdataset", tmp_path, label_key=label_key, class_names=names)
    assert f"{tar}{place}: " in error and message in error


PICTURE = small_photograph(0)
Members = list[tuple[str, bytes]]


def with_labels(ending: str, *texts: str) -> Members:
    files = [((f"{n}.jpg", PICTURE), (f"{n}.{ending}", text.encode())) for n, text in enumerate(texts)]
    return [file for pair in files for file in pair]


# Members of a tar, --label-key, the lines of --class-names, and the right answer: labels and names, or a message.
NAMED: dict[str, tuple[Members, str | None, list[str] | None, tuple[list[int], list[str]] | str]] = {
    "JSON": (
        with_labels("json", '{"y": "cat"}', '{"y": "ant"}'),
        "y",
        ["cat", "bee", "ant"],
        ([0, 2], ["cat", "bee", "ant"]),
    ),
    "JSON, no list of names": (
        with_labels("json", '{"y": "cat"}', '{"y": "ant"}'),
        "y",
        None,
        ([1, 0], ["ant", "cat"]),
    ),
    "JSON, numbers as text": (with_labels("json", '{"y": "10"}', '{"y": "9"}'), "y", None, ([1, 0], ["9", "10"])),
    "JSON, numbers of names": (
        with_labels("json", '{"y": "0"}', '{"y": "1"}'),
        "y",
        ["cat", "ant"],
        ([0, 1], ["cat", "ant"]),
    ),
    "text": (with_labels("txt", "cat", "ant\n"), None, ["cat", "ant"], ([0, 1], ["cat", "ant"])),
    "text beside numbers": (
        [*with_labels("cls", "1", "0"), ("1.txt", b"a caption")],
        None,
        ["cat", "ant"],
        ([1, 0], ["cat", "ant"]),
    ),
    "cls": (with_labels("cls", "cat", "ant"), None, None, ([1, 0], ["ant", "cat"])),
    "no name of the list": (
        with_labels("txt", "cat", "a cow"),
        None,
        ["cat"],
        "the class 'a cow' is none of its 1 lines",
    ),
    "text that may be a caption": (with_labels("txt", "cat"), None, None, "the names in KEY.txt with --class-names"),
    "captions": (
        with_labels("cls", *(f"photo {n}" for n in range(10))),
        None,
        None,
        "has a label of its own, such as photo 0",
    ),
    "names in two cases": (with_labels("cls", "cat", "cat", "Cat "), None, None, ([1, 1, 0], ["Cat", "cat"])),
}


@pytest.mark.parametrize("case", NAMED)
def test_names_for_labels_in_a_webdataset(case: str, tmp_path: Path) -> None:
    members, label_key, lines, answer = NAMED[case]
    write_tar(tmp_path / "0.tar", members)
    names = tmp_path / "names.txt"
    names.write_text("\n".join(lines or []))
    options: Options = {"label_key": label_key, "class_names": names if lines else None}
    if isinstance(answer, str):
        assert answer in error_of("webdataset", tmp_path / "0.tar", **options)
        return
    splits, found = load("webdataset", tmp_path / "0.tar", **options)
    assert (splits["train"].labels.tolist(), [*found]) == answer and splits["train"].label_kind.is_class


# Files that lie in one directory, and whether they are taken for those of two configurations.
SHARDS = {
    "two configurations": (["small-train-000.tar", "large-train-000.tar", "large-train-001.tar"], True),
    "with totals": (["small-train-0-of-1.tar", "large-train-0-of-2.tar", "large-train-1-of-2.tar"], True),
    "ImageNet's": (["imagenet1k-train-0.tar", "imagenet22k-train-0.tar"], True),
    "without words of splits": (["small-000.tar", "large-000.tar"], True),
    "splits": (["train-000.tar", "val-000.tar"], False),
    "several numbers": (["train-1-000.tar", "train-2-000.tar"], False),
    "parts": (["part1-000.tar", "part2-000.tar"], False),
    "hashes": (["train-0a1b2c3d4e5f60a7.tar", "train-ffee0011aabb44c7.tar"], False),
    "without numbers": (["ants.tar", "bees.tar"], False),
    "directories": (["ants/000.tar", "bees/000.tar"], False),
    "directories of splits": (["train/small/0.tar", "val/small/0.tar"], False),
    "directories with files of a split": (["small/train-0.tar", "large/train-0.tar"], True),
    "Parquet": (["small-train-0.parquet", "large-train-0.parquet"], True),
}


@pytest.mark.parametrize("case", SHARDS)
def test_files_of_two_configurations(case: str, tmp_path: Path) -> None:
    files, is_refused = SHARDS[case]
    kind = "parquet" if case == "Parquet" else "webdataset"
    for file in files:
        if kind == "parquet":
            parquet.write_table(table([0]), tmp_path / file)
        else:
            write_tar(tmp_path / file, SAMPLE)
    if is_refused:
        error = error_of(kind, tmp_path)
        assert re.search("configurations of a repository on the Hub (have them|do), and an image of both", error)
    else:
        assert sum(len(images.labels) for images in load(kind, tmp_path)[0].values()) == len(files)


@pytest.mark.parametrize(
    ("content", "options", "place", "message"),
    [
        pytest.param(
            table([0]).drop(["label"]),
            {},
            "",
            "has no column label, but image (struct<bytes: binary, path: string>)",
            id="no label column",
        ),
        pytest.param(
            table([0]).rename_columns(["img", "label"]), {}, "", "has no column image, but img", id="no image column"
        ),
        pytest.param(
            table([0]),
            {"label_key": "fine"},
            "",
            "has no column fine, but image (struct<bytes: binary, path: string>)",
            id="a label key that is not there",
        ),
        pytest.param(
            table([0]),
            {"image_key": "label"},
            "",
            "column label is int64: name one of image files (binary)",
            id="an image key of numbers",
        ),
        pytest.param(
            table([0], labels=[0.5]),
            {},
            "",
            "column label is double: name one of whole numbers or of names, or of lists of them, with --label-key",
            id="labels as fractions",
        ),
        pytest.param(
            table([0, 1], labels=[0, -1]),
            {},
            ":row 1",
            "its label is -1: labels are whole numbers from 0",
            id="a negative label",
        ),
        pytest.param(
            table([0, 1], labels=[0, None]),
            {},
            ":row 1",
            "its label is None: labels are whole numbers from 0",
            id="no label",
        ),
        pytest.param(
            table([0, 1], labels=[[2], [0, 0, 1]]),
            {},
            ":row 1",
            "its label is [0, 0, 1], in which class 0 is twice: it looks like a vector with a number for each class, "
            "and the numbers of the classes that the image has are wanted: write [2] instead",
            id="a vector with a number for each class",
        ),
        pytest.param(
            table([0, 1]).append_column("Split", [["train", "test"]]),
            {},
            "",
            "column Split ('test', 'train') divides the rows, and a split here is a file: write a file for each, such",
            id="a column of splits",
        ),
        pytest.param(
            table([0, 1]).append_column("is_valid", [[False, True]]),
            {},
            "",
            "column is_valid (False, True) divides the rows",
            id="a column that says what is for validation",
        ),
        pytest.param(
            table([0], labels=[1 << 40]),
            {},
            ":row 0",
            "its label is 1099511627776: labels are whole numbers",
            id="a label beyond 32 bits",
        ),
        pytest.param(
            table([0, 1], labels=[0, 3]),
            {},
            ":row 1",
            "its label is 3, and there are 3 class names",
            id="a label without a name",
        ),
        pytest.param(table([]).cast(table([0]).schema), {}, "", "has no images: fetch it", id="no rows"),
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\n",
            {},
            "",
            "damaged, truncated or not Parquet (Parquet magic",
            id="a pointer of git-lfs",
        ),
        pytest.param(None, {}, "", "damaged, truncated or not Parquet", id="truncated"),
    ],
)
def test_broken_parquet(tmp_path: Path, content: Any, options: Options, place: str, message: str) -> None:
    path = tmp_path / "0.parquet"
    if isinstance(content, pyarrow.Table):
        parquet.write_table(content, path)
    else:
        parquet.write_table(table([0, 1]), path)
        path.write_bytes(path.read_bytes()[:-9] if content is None else content)
    error = error_of("parquet", tmp_path, **options)
    assert f"{path}{place}: " in error and message in error


@pytest.mark.parametrize(
    ("beside", "source", "command"),
    [
        ("dataset_dict.json", "", """.parquet") for name, split in datasets.load_from_disk("{0}").items()]'"""),
        ("train/state.json", "train", """datasets.load_from_disk("{0}/train").to_parquet("train.parquet")'`"""),
        ("0.json", "train/0.arrow", """.Dataset.from_file("{0}/train/0.arrow").to_parquet("0.parquet")'`"""),
    ],
)
def test_tables_of_the_package_datasets(beside: str, source: str, command: str, tmp_path: Path) -> None:
    """These commands were run with version 5.2 of the package, which is none of the tests'."""
    (tmp_path / "train").mkdir()
    (tmp_path / beside).touch()
    content = table([0])
    with pyarrow.ipc.new_stream(tmp_path / "train" / "0.arrow", content.schema) as stream:
        stream.write_table(content)
    said = error_of("parquet", tmp_path / source)
    assert "0.arrow is a table of the package datasets, which is not read" in said and command.format(tmp_path) in said


# Files, and what is said of them below the source; None: they are read.
PLACES: dict[str, tuple[list[str], str | None]] = {
    "the hub's": (["data/train-0-of-2", "data/train-1-of-2", "data/test-0-of-1"], None),
    "a directory each split": (["train/0", "train/1", "test/0"], None),
    "configurations": (
        ["default/train-0", "default/test-0", "small/train-0", "small/test-0"],
        "{0}/default and {0}/small both have files of one split, as configurations of a repository on the Hub do, and "
        "an image of both would count twice: name one (--source {0}/default), or put the files",
    ),
    "configurations of splits": (["default/train/0", "default/test/0", "small/train/0"], "{0}/default and {0}/small b"),
    "without splits": (["data/0", "other/0"], "{0}/data and {0}/other both"),
    "one inside": (["train-0", "small/train-0"], "(--source {0}/small)"),
    "splits as partitions": (["split=train/0", "split=train/1", "split=test/0"], None),
    "partitions of another column": (["train/year=1999/0", "train/year=2000/0", "test/year=1999/0"], None),
    "validation as partitions": (
        ["is_valid=False/0", "is_valid=True/0"],
        "is_valid=True/0.parquet: column is_valid ('False', 'True') divides the rows",
    ),
    "labels of another name": (
        ["a=1/0", "a=2/0"],
        "has no column label, but image (struct<bytes: binary, path: string>), a (in the folder's name): name one with",
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_where_files_of_parquet_lie(case: str, tmp_path: Path) -> None:
    names, message = PLACES[case]
    for number, name in enumerate(names):
        (path := tmp_path / f"{name}.parquet").parent.mkdir(parents=True, exist_ok=True)
        content = table([number])
        parquet.write_table(content.drop(["label"]) if "a=" in name or "label=" in name else content, path)
    if message is None:
        splits, _ = load("parquet", tmp_path)
        assert {split: len(source.labels) for split, source in splits.items()} == {"train": 2, "validation": 1}
    else:
        assert message.format(tmp_path) in error_of("parquet", tmp_path)


@pytest.mark.parametrize(
    ("folders", "classes"),
    [
        (["split=train/label=7", "split=train/label=10", "split=test/label=10"], [["10", "7"], ["10"]]),
        (["label=dog", "label=cat"], [["cat", "dog"]]),
    ],
)
def test_labels_in_the_names_of_folders(folders: list[str], classes: list[list[str]], tmp_path: Path) -> None:
    """The command that is said makes them readable."""
    pytest.importorskip("pandas")
    for number, folder in enumerate(folders):
        (path := tmp_path / "it's" / folder / "part-0.parquet").parent.mkdir(parents=True)
        parquet.write_table(table([number]).drop(["label"]).replace_schema_metadata(), path)
    error = error_of("parquet", tmp_path / "it's")
    assert "part-0.parquet: column label is in the folders' names (Hive's partitions)" in error
    command = error.split("`")[1].replace("python3", sys.executable, 1)
    (new := tmp_path / "new").mkdir()
    subprocess.run(command, shell=True, cwd=new, check=True)
    splits, names = load("parquet", new)
    assert [[names[label] for label in splits[split].labels] for split in splits] == classes


def test_a_table_of_delta_lake_is_refused(tmp_path: Path) -> None:
    """Its directory also holds files with rows that were replaced."""
    (tmp_path / "_delta_log").mkdir()
    parquet.write_table(table([0, 1]), tmp_path / "part-0.parquet")
    assert "is a table of Delta Lake, whose log says which of its files are valid" in error_of("parquet", tmp_path)


def test_columns_of_parquet_that_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are said once; what divides two files of one split is refused, too."""
    for split in ("train", "test"):
        more = {"split": [split] * 2, "set": [{"a": 1}, {"a": 2}], "caption": ["a", "b"]}
        content = table([0, 1])
        for name, values in more.items():
            content = content.append_column(name, [values])
        parquet.write_table(content, tmp_path / f"{split}.parquet", row_group_size=1)
    assert {*load("parquet", tmp_path)[0]} == {"train", "validation"}
    assert [record.getMessage() for record in caplog.records if "labels from" in record.getMessage()] == [
        f"{tmp_path}: images from image, labels from label, not used: split, set, caption"
    ]
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        path.rename(tmp_path / f"{number}.parquet")
    assert "1.parquet: column split ('test', 'train') divides the rows" in error_of("parquet", tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([*NAMES], None),
        (["n00000001", "n00000003", "n00000002"], "has n00000003 for label 1, and the files say n00000002: put its li"),
        (["ant", "bee", "cat"], "has ant for label 0, and the files say n00000001: they are called as in names.txt"),
        ([*NAMES, "owl"], None),
    ],
)
def test_class_names_against_those_in_the_files(
    tmp_path: Path, names: list[str], message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    parquet.write_table(table([0, 1, 2]), tmp_path / "0.parquet")
    (path := tmp_path / "names.txt").write_text("\n".join(names))
    if message is not None and "put its" in message:
        assert message in error_of("parquet", tmp_path / "0.parquet", class_names=path)
        return
    assert load("parquet", tmp_path / "0.parquet", class_names=path)[1] == names
    assert (message or "") in caplog.text and ("the files say" in caplog.text) == (message is not None)


BYTES = [small_photograph(0), small_photograph(1)]
STRUCT = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
VIEWS = pyarrow.struct([("bytes", pyarrow.binary_view()), ("path", pyarrow.string_view())])


@pytest.mark.parametrize(
    "images",
    [
        pyarrow.array(BYTES, pyarrow.large_binary()),
        pyarrow.array(BYTES, pyarrow.binary_view()),
        pyarrow.array(BYTES).dictionary_encode(),
        pyarrow.array([{"bytes": content, "path": "a"} for content in BYTES], VIEWS),
    ],
    ids=lambda images: str(images.type),
)
@pytest.mark.parametrize(
    "labels",
    [
        pyarrow.array([0, 2], pyarrow.int8()),
        pyarrow.array([[0, 1], [2, 1]], pyarrow.list_(pyarrow.int64())),
        pyarrow.array([[0, 1], [2, 1]], pyarrow.list_(pyarrow.int64(), 2)),
        pyarrow.array([[0, 1], [2, 1]], pyarrow.list_view(pyarrow.int32())),
        pyarrow.array([[0, 1], [2, 1]], pyarrow.large_list_view(pyarrow.int64())),
        pyarrow.array(["bee", "ant"]),
        pyarrow.array(["bee", "ant"]).dictionary_encode(),
        pyarrow.array([["bee", "cat"], ["ant", "bee"]]),
    ],
    ids=lambda labels: str(labels.type),
)
def test_kinds_of_columns(tmp_path: Path, images: pyarrow.Array, labels: pyarrow.Array) -> None:
    parquet.write_table(pyarrow.table({"image": images, "label": labels}), tmp_path / "0.parquet")
    splits, names = load("parquet", tmp_path / "0.parquet")
    source = splits["train"]
    assert [source.read(number) for number in range(2)] == BYTES
    found = [[names[one] for one in source.label_kind.classes_of(label)] for label in source.labels.tolist()]
    as_lists = [label if isinstance(label, list) else [label] for label in labels.to_pylist()]
    assert found == [[str(one) for one in sorted(label)] for label in as_lists]
    assert source.label_kind.is_class != isinstance(labels.to_pylist()[0], list)


@pytest.mark.parametrize(
    "images",
    [
        pyarrow.array(["a.jpg", "b.jpg"]),
        pyarrow.array(["a.jpg", "b.jpg"], pyarrow.string_view()),
        pyarrow.array([{"path": "a.jpg"}] * 2),
        pyarrow.array([{"bytes": None, "path": "a.jpg"}] * 2, STRUCT),
        pyarrow.array([{"bytes": b"", "path": "a.jpg"}] * 2, STRUCT),
    ],
)
def test_parquet_of_paths_is_refused_before_anything_is_written(tmp_path: Path, images: pyarrow.Array) -> None:
    parquet.write_table(pyarrow.table({"image": images, "label": [0, 1]}), tmp_path / "0.parquet")
    with pytest.raises(SourceError, match=r"paths of images, which are not in this file: write it again with the im"):
        load("parquet", tmp_path / "0.parquet")


def test_parquet_of_other_datasets_plain_bytes_and_null(tmp_path: Path) -> None:
    parquet.write_table(table([0, 1]), tmp_path / "0.parquet")
    parquet.write_table(table([2], names=["a", "b", "c"]), tmp_path / "1.parquet")
    assert f"{tmp_path}/1.parquet: its class names are not those of the files before it" in error_of(
        "parquet", tmp_path
    )
    plain = pyarrow.table({"jpg": [small_photograph(5), None], "fine": [1, 0]})
    for number, content in enumerate((plain, table([0, 1]).set_column(0, "image", [[{"bytes": b"x"}, None]]))):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(content, path)
        keys = {"image_key": "jpg", "label_key": "fine"} if content is plain else {}
        source = load("parquet", path, **keys)[0]["train"]
        assert source.read(0) == (b"x", small_photograph(5))[content is plain]
        with pytest.raises(BadImageError, match="is null, or has no bytes"):
            source.read(1)
        assert source[1].location == f"{path}:row 1"
    content = bytearray(path.read_bytes())
    content[4:40] = bytes(36)  # where listing does not look
    path.write_bytes(content)
    assert f"{path}: damaged, truncated or not Parquet" in error_of("parquet", path)


Spoil = Callable[[Path], object]  # the directory of the training split
SHARD, INDEX = "shard.00000.mds", "index.json"


def with_shard(**changes: object) -> Spoil:
    """Set fields of the first shard in the index; of "raw_data" only those that are given."""

    def change(root: Path) -> None:
        index = json.loads((root / INDEX).read_text())
        shard = index["shards"][0]
        shard.update({**changes, "raw_data": {**shard["raw_data"], **changes.get("raw_data", {})}})
        (root / INDEX).write_text(json.dumps(index))

    return change


def with_bytes(offset: int, content: bytes) -> Spoil:
    def change(root: Path) -> None:
        shard = bytearray((root / SHARD).read_bytes())
        shard[offset : (offset + len(content)) or None] = content
        (root / SHARD).write_bytes(shard)

    return change


@pytest.mark.parametrize(
    ("spoil", "place", "message"),
    [
        (lambda root: os.truncate(root / SHARD, 9000), SHARD, "has 9,000 bytes, 14,614 by index.json: truncated, or"),
        (with_shard(samples=5), SHARD, "damaged, or not the shard that index.json describes"),
        (with_shard(samples=10**9), SHARD, "damaged, or not the shard"),
        (with_shard(column_sizes=[8, None, None, None]), INDEX, "column y is int of size None: name one"),
        (with_shard(column_sizes=[8, 8, None, 8]), SHARD, "again (sample 0)"),
        (with_shard(column_names=["i", "x"]), INDEX, "column_sizes do not fit each other: use the index.json of MDS"),
        (with_shard(column_encodings=["int", "str", "pkl", "int"]), INDEX, "column x is pkl: name one of jpeg, png"),
        (with_shard(column_encodings=["int", "str", "jpeg", "str"]), INDEX, "column y is str of size 8: name"),
        (
            with_shard(column_encodings=["int", "str_int", "jpeg", "int"], column_names=["i", "y", "x", "n"]),
            f"{SHARD}:sample 0",
            "and str_int are whole numbers: correct it",
        ),
        (with_shard(column_names=["i", "note", "img", "y"]), INDEX, "has no column x or image, but i (int)"),
        (
            with_shard(column_names=["i", "split", "x", "y"]),
            INDEX,
            "column split ('', 'a', 'an ', ...) divides the samples, and a split here is a directory: write one for",
        ),
        (
            with_shard(column_names=["i", "split", "x", "y"], column_encodings=["int", "json", "jpeg", "int"]),
            INDEX,
            "column split ('', 'a', 'an ', ...) divides",
        ),
        (with_shard(column_names=["is_valid", "note", "x", "y"]), INDEX, "column is_valid (0, 1, 2, ...) divides the"),
        (with_shard(format="json"), INDEX, "format is 'json': use mds"),
        (with_shard(version=3), INDEX, "version is 3: use 2"),
        (with_shard(raw_data={"basename": "../x"}), INDEX, "basename is '../x': use a path below index.json"),
        (with_shard(raw_data={"basename": "x" * 5000}), INDEX, "...: use a path below index.json"),
        (with_shard(raw_data={"basename": "y.mds"}), "y.mds", "is missing, and"),
        (with_shard(raw_data={"bytes": 1 << 40}), INDEX, "bytes is 1099511627776: use a number of bytes up to 2**32"),
        (with_bytes(4, b"\0"), SHARD, "damaged, or not the shard"),
        (with_bytes(8, b"\xff\xff"), SHARD, "again (sample 0)"),
        (with_bytes(-1, b"\xff"), f"{SHARD}:sample 5", "its label is -"),
        (lambda root: (root / INDEX).write_text("{"), INDEX, "is not valid JSON"),
        (lambda root: (root / INDEX).write_text("[]"), INDEX, "an array instead of an object: fetch it again"),
    ],
)
def test_broken_mds(tmp_path: Path, spoil: Spoil, place: str, message: str) -> None:
    write_mds(tmp_path)
    spoil(tmp_path / "train")
    error = error_of("mds", tmp_path)
    assert f"{tmp_path}/train/{place}" in error and message in error


def in_pil(mode: str, pixels: np.ndarray) -> bytes:
    """As Streaming's encoding pil stores an image."""
    return struct.pack("<3I", pixels.shape[1], pixels.shape[0], len(mode)) + mode.encode() + pixels.tobytes()


RGB, GREY = (np.arange(4 * 5 * depth, dtype=np.uint8).reshape(4, 5, depth) for depth in (3, 1))
# The encodings of image and label, the values of two samples, and the right answer: labels and names, or a message.
ENCODINGS: dict[str, tuple[str, str, list[tuple[bytes, bytes]], tuple[list[int], list[str]] | str]] = {
    "str": ("jpeg", "str", [(PICTURE, b"cat"), (PICTURE, b"ant")], ([1, 0], ["ant", "cat"])),
    "str_int": ("png", "str_int", [(PICTURE, b"1"), (PICTURE, b"0")], ([1, 0], ["0", "1"])),
    "names in JSON": ("jpegarray", "json", [(PICTURE, b'"cat"'), (PICTURE, b'"ant"')], ([1, 0], ["ant", "cat"])),
    "a quality": ("jpeg:90", "str", [(PICTURE, b"cat"), (PICTURE, b"ant")], ([1, 0], ["ant", "cat"])),
    "pil": ("pil", "str", [(in_pil("RGB", RGB), b"a"), (in_pil("L", GREY), b"b")], ([0, 1], ["a", "b"])),
    "pil of another mode": ("pil", "str", [(in_pil("CMYK", RGB), b"a")] * 2, "pixels of the mode CMYK, and RGB and L"),
    "pil that is cut off": (
        "pil",
        "str",
        [(in_pil("L", GREY)[:-1], b"a")] * 2,
        "has 19 bytes of pixels, and 5 x 4 are 20",
    ),
    "pil without a header": ("pil", "str", [(b"12345678901", b"a")] * 2, "is cut off"),
    "fractions": (
        "jpeg",
        "str_float",
        [(PICTURE, b"1.0")] * 2,
        "column y is str_float of size None: name one of int (8)",
    ),
}


@pytest.mark.parametrize("case", ENCODINGS)
def test_encodings_of_mds(case: str, tmp_path: Path) -> None:
    image, label, samples, answer = ENCODINGS[case]
    files.write_mds(tmp_path / "mds", {"x": (image, None), "y": (label, None)}, samples)
    if isinstance(answer, str):
        with pytest.raises((DatasetError, BadImageError), match=re.escape(answer)):
            load("mds", tmp_path / "mds")[0]["train"].read(0)
        return
    splits, names = load("mds", tmp_path / "mds")
    assert (splits["train"].labels.tolist(), [*names]) == answer
    first, second = (splits["train"].read(number) for number in range(2))
    if image == "pil":
        assert np.array_equal(first, RGB) and np.array_equal(second, GREY[:, :, 0])
        assert splits["train"][0].is_packed  # so that no index in place has its range of bytes
    else:
        assert first == second == PICTURE


def test_compressed_and_merged_mds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    parquet.write_table(table([0]), parquet_file := tmp_path / "0.parquet")
    write_mds(tmp_path)
    packed, index = tmp_path / "val" / "shard.00000.mds.zstd", json.loads((tmp_path / "val/index.json").read_text())
    assert load("mds", tmp_path / "val")[0]["train"].labels.tolist() == [0, 1, 2]
    # Streaming's merge_index leaves the indexes that it merges.
    for kind in ("raw_data", "zip_data"):
        index["shards"][0][kind]["basename"] = "0/" + index["shards"][0][kind]["basename"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    packed = packed.parent.rename(tmp_path / "0") / packed.name
    shutil.rmtree(tmp_path / "train")
    assert len(load("mds", tmp_path)[0]["train"].labels) == 3
    assert load("mds", tmp_path)[0]["train"].name(2) == "0/shard.00000.mds.zstd:sample 2"

    source = load("mds", tmp_path)[0]["train"]
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", lambda dir: Path("/dev/full").open("r+b"))  # noqa: SIM115
        assert f"{tmp_path.parent}: the source cannot be unpacked here (No space left on device): make as much" in (
            error_of("mds", tmp_path)
        )
        patch.setitem(sys.modules, "pyarrow", None)
        for kind, path in (("mds", tmp_path), ("parquet", parquet_file)):
            assert "with pyarrow, which is missing: pip install 'dali-train[parquet]'" in error_of(kind, path)
    content = bytearray(packed.read_bytes())
    content[0] ^= 255
    packed.write_bytes(content)
    with pytest.raises(DatasetError, match=r"mds.zstd: damaged"):
        source.read(0)
    assert f"{packed}: damaged" in error_of("mds", tmp_path) and "fetch it again" in error_of("mds", tmp_path)
    index["shards"][0]["compression"] = "bz2:9"
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert f"compression is bz2:9, and zstd, gz, br, snappy are read: unpack each shard, this one to {tmp_path}/0/" in (
        error_of("mds", tmp_path)
    )


def test_imagenet21k_as_one_tar_and_broken(tmp_path: Path) -> None:
    def inner(synset: str) -> bytes:
        return tar_bytes((f"{synset}_{n}.JPEG", small_photograph(n)) for n in range(4))

    whole = write_tar(tmp_path / "whole.tar", [(f"winter21_whole/{synset}.tar", inner(synset)) for synset in NAMES])
    splits, names = load("imagenet21k", whole, validation_fraction=0.25)
    assert names == NAMES and np.bincount(splits["validation"].labels).tolist() == [1, 1, 1]
    for name, content, message in (
        ("dogs.tar", inner(NAMES[0]), "dogs.tar: is not SYNSET.tar, such as n01440764.tar: move it out of --source"),
        ("n00000001.tar", inner(NAMES[1]), "holds 'n00000002_0.JPEG', expected n00000001_NUMBER.JPEG"),
        ("n00000001.tar", inner(NAMES[0])[:700], "n00000001.tar: at byte 0: member 'n00000001_0.JPEG' has"),
        (
            "n00000001.tar",
            tar_bytes([("readme", b"")]),
            "n00000001.tar: holds 'readme', expected n00000001_NUMBER.JPEG",
        ),
        ("n00000001.tar", tar_bytes([]), "n00000001.tar: has no images: fetch it"),
        ("n00000001.tar", b"", "n00000001.tar: at byte 0: "),
    ):
        path = tmp_path / "broken" / name
        path.parent.mkdir()
        path.write_bytes(content)
        assert message in error_of("imagenet21k", tmp_path / "broken")
        shutil.rmtree(path.parent)
    assert f"--source {tmp_path}/broken: does not exist" in error_of("imagenet21k", tmp_path / "broken")
    (tmp_path / "broken").mkdir()
    assert "has no *.tar: name the directory that holds them" in error_of("imagenet21k", tmp_path / "broken")
