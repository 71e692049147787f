"""Indexing somebody else's TFRecords, and opening a dataset."""

import os
import re
import resource
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tfrecord import writer

from dali_train.cli import main
from dali_train.data.convert.datasets import DATASETS, advice
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles, stored_image
from dali_train.data.dataset.tfrecord import TFRecordError
from dali_train.errors import ConfigError, DatasetError, NoDatasetError
from dali_train.extras.indexing.foreign_shards import build_index
from tests.conftest import encoded, photograph, write_shard
from tests.convert.files import files_of, small_photograph
from tests.helpers import EXCLUDED
from tests.ranks import FORK


def write_records(path: Path, records: list[dict[str, tuple[Any, str]]]) -> Path:
    """With another implementation of the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    other = writer.TFRecordWriter(str(path))
    for record in records:
        other.write(record)
    other.close()
    return path


def example(seed: int, **changes: tuple[Any, str] | None) -> dict[str, tuple[Any, str]]:
    features: dict[str, tuple[Any, str] | None] = {
        "image/width": (1, "int"),  # untrue: sizes come from the images
        "image/encoded": (small_photograph(seed), "byte"),
        "image/class/label": (1 + seed % 3, "int"),
        "image/class/synset": (f"n0000000{seed % 3}".encode(), "byte"),
        "image/colorspace": (b"RGB", "byte"),
    }
    features |= {name.replace("__", "/"): value for name, value in changes.items()}
    return {name: value for name, value in features.items() if value is not None}


def test_indexes_what_another_writer_wrote(tmp_path: Path) -> None:
    images = [small_photograph(seed) for seed in range(11)]
    for number in range(2):
        records = [example(seed) for seed in range(number, 11, 2)]
        write_records(tmp_path / "train" / f"train-{number:05d}-of-00002", records)
    manifest = build_index(tmp_path, workers=2)
    assert manifest.class_names == ("n00000000", "n00000001", "n00000002")
    split = Split(tmp_path, "train")
    order = [*range(0, 11, 2), *range(1, 11, 2)]
    for image, seed in enumerate(order):
        assert stored_image(MappedFiles(split), image).tobytes() == images[seed]
        row = split.rows[image]
        assert row["label"] == seed % 3
        assert (row["height"], row["width"]) == (32 + 2 * (seed % 9), 60 - 2 * (seed % 11))
    assert not stored_image(MappedFiles(split), 0).flags.writeable


@pytest.mark.parametrize(
    ("texts", "names", "message"),
    [
        (["cat", "dog", "cat", "dog"], ("cat", "dog"), None),
        (["a cat", "dog", "this cat", "dog"], ("class 0", "class 1"), "label 0 is 'a cat' in "),  # captions
        (["crane"] * 4, ("class 0", "class 1"), "'crane' is label 0 in "),  # the bird and the machine
        (["cat", None, "cat", None], ("class 0", "class 1"), None),
    ],
)
def test_names_in_words(
    tmp_path: Path,
    texts: list[str | None],
    names: tuple[str, ...],
    message: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where there are no synsets; in two shards."""
    for first in (0, 2):
        records = [
            example(
                number,
                image__class__label=(number % 2, "int"),
                image__class__synset=None,
                image__class__text=None if (text := texts[number]) is None else (text.encode(), "byte"),
            )
            for number in (first, first + 1)
        ]
        write_records(tmp_path / "train" / f"{first}.TFRecord", records)
    (tmp_path / "train" / "README").touch()
    assert build_index(tmp_path, label_base=0).class_names == names
    assert (message or "") in caplog.text and ("are called by their numbers" in caplog.text) == (message is not None)


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        ({1: "cat", 2: "owl"}, {1: "owl", 2: "cat"}, "label 1 is 'cat' in .* and 'owl' in "),
        ({1: "cat"}, {1: "owl"}, "label 1 is 'cat' in .*train/0.tfrecord and 'owl' in .*validation/0.tfrecord"),
        ({0: "cat", 1: "owl"}, {2: "owl"}, "'owl' is label 1 in .*train/0.tfrecord and label 2 in .*validation/0.tfre"),
    ],
)
def test_splits_that_number_classes_differently_in_words(
    tmp_path: Path, train: dict[int, str], validation: dict[int, str], message: str
) -> None:
    for split, texts in (("train", train), ("validation", validation)):
        records = [
            example(
                label,
                image__class__label=(label, "int"),
                image__class__synset=None,
                image__class__text=(text.encode(), "byte"),
            )
            for label, text in texts.items()
        ]
        write_records(tmp_path / split / "0.tfrecord", records)
    with pytest.raises(DatasetError, match=f"{message}.*: the shards number the classes differently: write them with"):
        build_index(tmp_path, label_base=0)


def test_class_names_against_those_in_the_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_records(tmp_path / "train" / "a", [example(seed) for seed in range(3)])
    names = tmp_path / "names.txt"
    names.write_text("n00000000\nn00000002\nn00000001\n")
    with pytest.raises(DatasetError, match="has n00000002 for label 1, and the files say n00000001: put its lines in"):
        build_index(tmp_path, class_names=names)
    assert not (tmp_path / "dataset.json").exists()
    names.write_text("ant\nbee\ncat\nowl\n")
    assert build_index(tmp_path, class_names=names).class_names == ("ant", "bee", "cat", "owl")
    assert "names.txt has ant for label 0, and the files say n00000000: they are called as in names.txt" in caplog.text


def test_shards_that_number_classes_differently(tmp_path: Path) -> None:
    write_records(tmp_path / "train" / "1.tfrecord", [example(0)])
    other = example(0, image__class__synset=(b"n00000009", "byte"))
    write_records(tmp_path / "validation" / "1.tfrecord", [other])
    with pytest.raises(TFRecordError, match="label 1 belongs to n00000009 here and to n00000000 in another shard"):
        build_index(tmp_path)


def test_images_of_any_format_and_any_file_name(tmp_path: Path) -> None:
    contents = [encoded(photograph(n, 20, 30), kind) for n, kind in enumerate(("PNG", "BMP", "WEBP", "JPEG"))]
    write_shard(tmp_path / "validation" / "whatever.tfrecord", [(content, 0) for content in contents])
    build_index(tmp_path, label_base=0)
    split = Split(tmp_path, "validation")
    assert [stored_image(MappedFiles(split), image).tobytes() for image in range(4)] == contents
    assert set(split.rows["height"]) == {20}
    assert set(split.rows["width"]) == {30}


# The feature with the names, those of two records, options of `data index`, the lines of --class-names, and the right
# answer: the classes of the records, and all in their order, or a message.
NAMED: dict[str, tuple[str, list[bytes | list[bytes]], list[str], str, tuple[list[str], list[str]] | str]] = {
    "image/class/text": ("image/class/text", [b"cat", b"ant"], [], "", (["cat", "ant"], ["ant", "cat"])),
    "a feature of another name": (
        "breed",
        [b"cat", b"ant"],
        ["--label-key", "breed"],
        "",
        (["cat", "ant"], ["ant", "cat"]),
    ),
    "the label itself": ("image/class/label", [b"cat", b"ant"], [], "", (["cat", "ant"], ["ant", "cat"])),
    "a list of names": (
        "breed",
        [b"cat", b"ant"],
        ["--label-key", "breed"],
        "cat bee ant",
        (["cat", "ant"], ["cat", "bee", "ant"]),
    ),
    "a name that is not in it": (
        "breed",
        [b"cat", b"ant"],
        ["--label-key", "breed"],
        "cat bee",
        "the class 'ant' is none of its 2",
    ),
    "several names": (
        "breed",
        [[b"cat", b"ant"], b"ant"],
        ["--label-key", "breed"],
        "",
        (["ant cat", "ant"], ["ant", "cat"]),
    ),
    "no name": ("breed", [b"cat", []], ["--label-key", "breed"], "", "has no label in breed; the record has"),
}


@pytest.mark.parametrize("case", NAMED)
def test_names_without_numbers(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that `data index` prints reads them."""
    key, texts, options, lines, answer = NAMED[case]
    changes = {"image__class__label": None, "image__class__synset": None}
    records = [example(n, **changes | {key: (text, "byte")}) for n, text in enumerate(texts)]  # type: ignore[arg-type]
    write_records(tmp_path / "source" / "train-00000-of-00001", records)
    assert main(["data", "index", str(tmp_path / "source"), *options]) == 1
    command = re.findall("`dali-train (data convert [^`]+)`", capsys.readouterr().err)[0]
    words = shlex.split(command.replace("DIR", f"{tmp_path}/source").replace("DATASET", f"{tmp_path}/out"))
    (tmp_path / "names").write_text("".join(f"{line}\n" for line in lines.split()))
    status = main([*words, *(["--class-names", str(tmp_path / "names")] if lines else [])])
    if isinstance(answer, str):
        assert status > 0 and answer in capsys.readouterr().err
        return
    assert status == 0, capsys.readouterr().err
    split = Split(tmp_path / "out", "train")
    labels = split.rows["label"].tolist()
    names = [" ".join(answer[1][one] for one in split.label_kind.classes_of(label)) for label in labels]
    found = {stored_image(MappedFiles(split), image).tobytes(): name for image, name in enumerate(names)}
    assert found == {small_photograph(n): name for n, name in enumerate(answer[0])}
    assert [*split.manifest.class_names] == answer[1]


@pytest.mark.parametrize("name", ["", "train-00000-of-00001"], ids=["a directory", "a file"])
def test_records_with_numbers_are_divided(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command that `data index` prints."""
    records = [example(n, image__class__label=(n % 2, "int"), image__class__synset=None) for n in range(8)]
    directory, out = tmp_path / "source", tmp_path / "out"
    write_records(directory / "train-00000-of-00001", records)
    assert main(["data", "index", str(directory), "--validation-fraction", "0.5"]) == 2
    (line,) = re.findall("`dali-train (data convert [^`]+)`", capsys.readouterr().err)
    line = line.replace(str(directory), str(directory / name)).replace("DATASET", str(out)).replace(" F", " 0.5")
    assert main(shlex.split(line)) == 0
    for half in ("train", "validation"):
        split = Split(out, half)
        of = {stored_image(MappedFiles(split), image).tobytes(): int(split.rows["label"][image]) for image in range(4)}
        assert len(split) == 4 and of.items() <= {(small_photograph(n), n % 2) for n in range(8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image__encoded": None},
            "feature image/encoded is missing; the record has image/class/label, image/class/synset",
        ),
        ({"image__class__label": None}, "feature image/class/label is missing"),
        (
            {"image__class__label": (0.5, "float")},
            "feature image/class/label is a list of float, expected int64: write the class's number (its name goes "
            "into image/class/text) as int64",
        ),
        ({"image__class__label": (b"cat", "byte")}, "is a list of bytes, expected int64: write the class's number"),
        ({"image__class__label": ([1, 2], "int")}, "feature image/class/label has 2 values, expected 1"),
        ({"image__encoded": (3, "int")}, "feature image/encoded is a list of int64, expected bytes: write the"),
        (
            {"image__encoded": (b"hello", "byte")},
            "image/encoded is not an image in a known format (JPEG, PNG, BMP, WEBP, TIFF, PPM, JPEG2000); it begins "
            "with b'hello'",
        ),
        (
            {"image__encoded": (b"\xff\xd8\xff\xe0", "byte")},
            "image/encoded is not a JPEG that can be read: the file ends",
        ),
        ({"image__class__synset": (b"n00000009", "byte")}, "label 3 belongs to n00000002 before and to n00000009 here"),
        (
            {"image__class__label": (0, "int")},
            "label 0 is out of range: 3 classes from 1 end at 3; labels that start at 0",
        ),
        (
            {"image__format": (b"RAW", "byte"), "image__height": (4, "int"), "image__width": (5, "int")},
            "bytes, 4 x 5 RGB pixels have 60",
        ),
        (
            {"image__format": (b"RAW", "byte"), "image__height": (4, "int"), "image__width": None},
            "feature image/width is missing",
        ),
    ],
)
def test_records_that_cannot_be_used_are_named(tmp_path: Path, changes: dict, message: str) -> None:
    path = write_records(tmp_path / "train" / "a", [example(0), example(1), example(2), example(5, **changes)])
    before = files_of(tmp_path)
    with pytest.raises(TFRecordError) as error:
        build_index(tmp_path)
    assert message in str(error.value)
    assert f"{path}: at byte " in str(error.value)
    assert files_of(tmp_path) == before  # an error leaves nothing behind


def test_raw_pixels(tmp_path: Path) -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8)
    raw = {"image__format": (b"RAW", "byte"), "image__height": (2, "int"), "image__width": (3, "int")}
    records = [example(seed, image__encoded=((pixels + seed).tobytes(), "byte"), **raw) for seed in range(3)]
    write_records(tmp_path / "train" / "a", records)
    assert build_index(tmp_path).encoding == "raw"
    split = Split(tmp_path, "train")
    assert np.array_equal(stored_image(MappedFiles(split), 2), pixels + 2)
    assert (split.rows[2]["height"], split.rows[2]["width"]) == (2, 3)

    write_records(tmp_path / "validation" / "b", [example(1)])
    with pytest.raises(DatasetError, match="a holds raw pixels and b images: make two datasets of them"):
        build_index(tmp_path)
    write_records(tmp_path / "validation" / "b", [records[0], example(1)])
    with pytest.raises(TFRecordError, match="the file mixes images with raw pixels"):
        build_index(tmp_path)


def test_which_files_are_shards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DatasetError, match="this directory does not exist"):
        build_index(tmp_path / "nowhere")
    for name, remedy in (
        ("a.txt", "convert --help` lists what can be converted"),
        ("a.tfrecord", "move its TFRecords"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(NoDatasetError, match="has no shard, expected TFRecord files in"):
            build_index(tmp_path)
        assert remedy in advice(tmp_path, DATASETS, indexing=True)
    for number in (0, 1, 3):
        write_records(tmp_path / "train" / f"train-{number:05d}-of-00004", [example(number)])
    (tmp_path / "train" / "README").write_text("hello")
    (tmp_path / "train" / ".hidden").write_text("hello")
    with pytest.raises(DatasetError, match="lacks 1 of 4 shards: 00002"):
        build_index(tmp_path)
    write_records(tmp_path / "train" / "train-00002-of-00004", [example(2)])
    assert build_index(tmp_path).splits["train"].num_records == 4
    write_records(tmp_path / "train" / "train-00000-of-00005", [example(2)])
    with pytest.raises(DatasetError, match="mixes shards of 4 and 5: keep one set of them"):
        build_index(tmp_path)
    (tmp_path / "validation").mkdir()
    (tmp_path / "train" / "train-00000-of-00005").unlink()
    (tmp_path / "train" / "train-00001-of-00004").write_bytes(b"")
    (tmp_path / "train" / "_SUCCESS").touch()
    assert [shard.name[:11] for shard in build_index(tmp_path).splits["train"].shards] == [
        "train-00000",
        "train-00002",
        "train-00003",
    ]
    assert "1 without a record (0 bytes) (train)" in caplog.text
    assert "1 with _ before its name, as Spark's _SUCCESS (train)" in caplog.text


def test_damage_is_found_only_as_far_as_it_is_looked_for(tmp_path: Path) -> None:
    path = write_records(tmp_path / "train" / "a", [example(0), example(1)])
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1  # in the first image's pixels
    path.write_bytes(content)
    with pytest.raises(TFRecordError, match="CRC mismatch of the record's"):
        build_index(tmp_path)
    assert build_index(tmp_path, check_crc=False).splits["train"].shards[0].crc32c is None


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    write_records(tmp_path / "train" / "a", [example(seed) for seed in range(5)])
    build_index(tmp_path)
    return tmp_path


def test_a_shard_that_changed_since_is_refused(indexed: Path) -> None:
    path = indexed / "train" / "a"
    content = path.read_bytes()
    path.write_bytes(content + b"x")
    with pytest.raises(
        DatasetError, match=rf"has {len(content) + 1} bytes, the index was made for {len(content)}: restore the shard"
    ):
        Split(indexed, "train")
    path.write_bytes(content)
    later = time.time() + 10
    os.utime(path, (later, later))
    assert len(Split(indexed, "train")) == 5  # copied without its time: the content counts
    other = write_records(indexed / "other", [example(seed + 1) for seed in range(5)]).read_bytes()
    path.write_bytes(other.ljust(len(content), b"x")[: len(content)])
    os.utime(path, (later, later))
    with pytest.raises(
        DatasetError, match=r"is newer than .* and its record 0 is not what the index says: .*data index"
    ):
        Split(indexed, "train")
    path.unlink()
    with pytest.raises(DatasetError, match=r"is missing, dataset.json names it"):
        Split(indexed, "train")
    with pytest.raises(DatasetError, match="has no validation split, only train"):
        Split(indexed, "validation")


def test_images_to_leave_out(dataset: Path, tmp_path: Path) -> None:
    """One a line, or in a table's first column."""
    split = Split(dataset, "train", exclude=EXCLUDED)
    assert split.kept is not None and np.flatnonzero(~split.kept).tolist() == [7, 30]
    assert (split.num_images, len(split)) == (48, 50)
    path = tmp_path / "list.txt"
    mistakes = {
        "3\n50": "line 2 begins with '50': use the numbers of images from 0 to 49",
        "-1": "line 1 begins with '-1'",
        "file,image\na.jpg,3": "line 2 begins with 'a.jpg'",
        "\n".join(map(str, range(50))): "leaves none of 50 images",
    }
    for text, message in mistakes.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"data.exclude is .*{message}"):
            Split(dataset, "train", exclude=path)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        Split(dataset, "train", exclude=path)


def open_with_limits(root: Path, soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if hard > 300:
        split = Split(root, "train")
        assert len({stored_image(MappedFiles(split), image).tobytes() for image in range(len(split))}) == len(split)
    else:
        with pytest.raises(DatasetError, match=r"316 files would be open, `ulimit -Hn` allows 280; raise that limit"):
            MappedFiles(Split(root, "train"))


@pytest.mark.parametrize("hard", [400, 280])
def test_more_shards_than_open_files(tmp_path: Path, hard: int) -> None:
    for number in range(60):
        write_shard(tmp_path / "train" / f"train-{number:05d}-of-00060", [(small_photograph(number), 1)])
    build_index(tmp_path)
    process = FORK.Process(target=open_with_limits, args=(tmp_path, 50, hard))
    process.start()
    process.join(60)
    assert process.exitcode == 0
