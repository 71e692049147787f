"""Files of strangers: manifests, indexes, archives, folders, labels and images that lie, are cut off, or are something
else.

Each is refused with one sentence that names the file; nothing is read or written elsewhere, hangs, or fills the memory.
"""

import io
import json
import os
import re
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dali_train.data.convert.sources import SourceError, Sources
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import Manifest
from dali_train.data.dataset.storage import MappedFiles, stored_image
from dali_train.data.dataset.tfrecord import TFRecordError
from dali_train.errors import DatasetError
from dali_train.extras.formats.trees import folders
from dali_train.extras.indexing.foreign_shards import build_index
from dali_train.extras.pictures.sheets import picture
from tests.conftest import encoded, photograph, write_shard
from tests.convert.files import EPS, convert, files_of, small_photograph, tool, write_folder
from tests.dataset.image_kinds import tiff
from tools.bench.generated import accept_index


def index(*arguments: object) -> int:
    return tool("make_index").main([str(argument) for argument in arguments])


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    root = tmp_path / "dataset"
    write_shard(root / "train" / "a", [(small_photograph(seed), 1 + seed % 3) for seed in range(6)])
    build_index(root)
    return root


# dataset.json


@pytest.mark.parametrize(
    "name", ["../../secret", "/etc/passwd", "..", ".", "", ".hidden", "a/b", "a\0b", "x" * 300, 7, None, ["a"]]
)
def test_a_shard_name_is_a_plain_file_name(indexed: Path, name: object) -> None:
    path = indexed / "dataset.json"
    fields = json.loads(path.read_text())
    fields["splits"]["train"]["shards"][0]["name"] = name
    path.write_text(json.dumps(fields))
    with pytest.raises(
        DatasetError,
        match=r"(?s)dataset.json cannot be used: name is .*: use (a plain file name|UTF-8 without).*; restore",
    ):
        Manifest.read(indexed)


FACTS = {"num_records": 1, "index_crc32c": "01234567"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format_version is 99: use 1"),
        ({"num_classes": 0}, "num_classes is 0: use a whole number from 1 to 1,000,000"),
        ({"num_classes": 10**9}, "num_classes is 1000000000: use"),
        ({"num_classes": "3"}, "num_classes is '3': use"),
        ({"num_classes": True}, "num_classes is True: use"),
        ({"num_classes": 4}, "class_names are 3 values for 4 classes"),
        ({"class_names": [1, 2, 3]}, "class_names is [1, 2, 3]: use a text for each class"),
        ({"class_names": None}, "class_names is None: use"),
        ({"label_base": 1 << 40}, "label_base is 1099511627776: use"),
        ({"encoding": "tar"}, "encoding is 'tar': use image or raw"),
        ({"splits": {"../train": {}}}, "splits is {'../train': {}}: use an object with train and/or validation"),
        ({"splits": {}}, "splits are none"),
        ({"splits": {"train": []}}, "splits is {'train': []}: use"),
        ({"splits": {"train": {"num_records": 6, "shards": []}}}, "index_crc32c is missing"),
        ({"splits": {"train": {**FACTS, "shards": [{"name": "a"}]}}}, "num_records is missing"),
        ({"splits": {"train": {**FACTS, "shards": []}}}, "num_records is 1, that of its shards 0"),
        ({"conversion": 3}, "conversion is 3: use"),
    ],
)
def test_values_of_another_kind(indexed: Path, change: dict[str, Any], message: str) -> None:
    path = indexed / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DatasetError) as error:
        Manifest.read(indexed)
    assert message in str(error.value) and str(path) in str(error.value) and "dali-train data index" in str(error.value)


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"null", b"[" * 100_000, b"\xff\xfe", b"", b'{"format_version": 1e400}']
)
def test_a_manifest_that_is_something_else(indexed: Path, content: bytes) -> None:
    (indexed / "dataset.json").write_bytes(content)
    with pytest.raises(DatasetError, match=r"dataset.json (cannot be used|is not valid JSON)"):
        Manifest.read(indexed)


def test_manifests_and_indexes_that_are_no_files(indexed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, message in (
        (indexed / "index" / "train.npy", "cannot be read"),
        (indexed / "dataset.json", "is not a regular file"),
    ):
        path.unlink()
        os.mkfifo(path)  # opening it would block
        with pytest.raises(DatasetError, match=message):
            Split(indexed, "train")
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(DatasetError, match=message):
            Split(indexed, "train")
    assert tool("verify_dataset").main([str(indexed)]) == 2
    assert "Traceback" not in capsys.readouterr().err


# The index


@pytest.mark.parametrize(
    ("column", "value"),
    [("shard", 7), ("label", 3), ("label", -1), ("offset", 1 << 63), ("size", 1 << 31), ("size", 0), ("width", 0)],
)
def test_rows_that_cannot_be(indexed: Path, column: str, value: int) -> None:
    path = indexed / "index" / "train.npy"
    rows = np.load(path)
    rows[column][4] = value
    np.save(path, rows)
    with pytest.raises(
        DatasetError, match=r"train.npy has CRC32C \w+, dataset.json says \w+: they were not written together"
    ):
        Split(indexed, "train")
    accept_index(indexed)
    with pytest.raises(
        DatasetError, match=rf"row 4 \(record 4 of a\) has {column} {value}, which cannot be with 3 classes"
    ):
        Split(indexed, "train")


@pytest.mark.parametrize("rows", [np.zeros(6), np.zeros((6, 1), "<u8"), np.array(3), np.array([None] * 6)])
def test_an_index_that_is_another_array(indexed: Path, rows: np.ndarray) -> None:
    np.save(indexed / "index" / "train.npy", rows, allow_pickle=True)
    with pytest.raises(DatasetError, match=r"train.npy (has \d rows|cannot be read)"):
        Split(indexed, "train")


@pytest.mark.parametrize(
    "header", [b"{'descr': [(", b"[" * 5_000, b"{'descr': 3, 'fortran_order': 0, 'shape': (-1,)}", b"\0" * 9]
)
def test_an_index_with_a_damaged_header(indexed: Path, header: bytes) -> None:
    """NumPy reads it with Python's tokenizer and parser, each with errors of its own."""
    content = b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header
    (indexed / "index" / "train.npy").write_bytes(content + bytes(6 * 24))
    with pytest.raises(DatasetError, match=r"train.npy cannot be read .*: run `dali-train data index"):
        Split(indexed, "train")


def test_an_indexing_that_was_killed_leaves_no_mixture(indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels of one split by the new base, those of the other by the old: it must not be a dataset."""
    from dali_train.data.dataset import write_index as room

    write_shard(indexed / "validation" / "b", [(small_photograph(seed), 1 + seed % 3) for seed in range(4)])
    build_index(indexed)
    old = (indexed / "dataset.json").read_bytes()
    write = room.write_atomically

    def killed(path: Path, *contents: bytes) -> None:
        if path.name == "validation.npy":
            raise KeyboardInterrupt
        write(path, *contents)

    monkeypatch.setattr(room, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        build_index(indexed, label_base=0)
    with pytest.raises(DatasetError, match=r"dataset.json is missing: .* `dali-train data index` takes TFRecords"):
        Split(indexed, "train")
    (indexed / "dataset.json").write_bytes(old)  # as one sees it who had read it before
    with pytest.raises(DatasetError, match="they were not written together"):
        Split(indexed, "train")


# Labels


@pytest.mark.parametrize("label", [10**9, (1 << 63) - 1])
def test_a_label_that_is_no_class_number(tmp_path: Path, label: int) -> None:
    write_shard(tmp_path / "train" / "a", [(small_photograph(1), 1), (small_photograph(2), label)])
    with pytest.raises(
        TFRecordError, match=rf"train/a: at byte \d+: label {label} would make more than 1,000,000 classes"
    ):
        build_index(tmp_path)
    with pytest.raises(
        TFRecordError, match=rf"train/a: at byte [1-9]\d+: label {label} is out of range: 5 classes from 1 end at 5"
    ):
        build_index(tmp_path, num_classes=5)
    write_shard(tmp_path / "train" / "a", [(small_photograph(1), 1), (small_photograph(2), -(1 << 63))])
    with pytest.raises(TFRecordError, match="is out of range"):
        build_index(tmp_path)


def test_numbers_of_classes_that_make_no_sense(indexed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(indexed)
    for options, message in (
        (["--num-classes", "0"], "--num-classes is 0: use 1 to 1,000,000"),
        (["--num-classes", "2000000000"], "--num-classes is 2000000000: use 1 to 1,000,000"),
        (["--label-base", str(1 << 63)], "--label-base is 9223372036854775808: use the smallest label"),
    ):
        assert index(indexed, *options) == 2
        assert message in capsys.readouterr().err
    assert files_of(indexed) == before


# Images


def jpeg_with(**changes: int) -> bytes:
    """A JPEG whose frame header says something else."""
    content = bytearray(small_photograph(1))
    frame = content.index(b"\xff\xc0")
    for name, value in changes.items():
        match name:
            case "process":
                content[frame + 1] = 0xC0 + value
            case "precision":
                content[frame + 4] = value
            case "height":
                content[frame + 5 : frame + 7] = struct.pack(">H", value)
            case "width":
                content[frame + 7 : frame + 9] = struct.pack(">H", value)
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            EPS,
            "is not an image in a known format (JPEG, PNG, BMP, WEBP, TIFF, PPM, JPEG2000); it begins with b'%!PS-Ado'",
        ),
        *[
            (encoded(photograph(1, 30, 40), kind), "is not an image in a known format")
            for kind in ("ICO", "TGA", "PCX", "DDS")
        ],
        (encoded(photograph(1, 30, 40), "GIF"), "is a GIF, which DALI does not decode"),
        (
            tiff(np.zeros((9, 9, 13), np.uint16), photometric=1),
            "is a TIFF of a kind that is not read (13 bands of 16",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\noid",
            "is a pointer of git-lfs: fetch the files with `git lfs p",
        ),
        (b"II*\0" + b"\xff" * 40, "is a TIFF of a kind that is not read: save what is to be seen of it"),
        (jpeg_with(process=3), "is a JPEG of process SOF3 with 8 bits, which decoders refuse"),
        (jpeg_with(precision=12), "is a JPEG of process SOF0 with 12 bits"),
        (jpeg_with(width=0), "pixels: there is nothing to decode"),
        (jpeg_with(height=0), "pixels: there is nothing to decode"),
        (
            jpeg_with(height=30_000, width=30_000),
            "has 30000 x 30000 pixels: over 100,000,000 are refused as a decompression bomb",
        ),
        (jpeg_with(height=65_535, width=10), "a side may have 65,500; shrink or remove it"),
        (encoded(photograph(1, 30, 40), "PNG")[:20], "image/encoded"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 30, "image/encoded"),
    ],
)
def test_the_indexer_refuses_what_training_cannot_decode(tmp_path: Path, content: bytes, message: str) -> None:
    write_shard(tmp_path / "train" / "a", [(small_photograph(1), 1), (content, 2)])
    with pytest.raises(TFRecordError) as error:
        build_index(tmp_path)
    assert message in str(error.value) and f"{tmp_path}/train/a: at byte " in str(error.value)


def stored_picture(split: Split, number: int) -> Image.Image:
    return picture(split, number, stored_image(MappedFiles(split), number))


def test_verify_decodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The header of a truncated image is sound, so that only decoding finds it; and the picture of it names its
    place."""
    bad = encoded(photograph(1, 300, 400), "JPEG")[:-3000]
    write_shard(
        tmp_path / "train" / "a",
        [(small_photograph(1), 1), (bad, 2), *[(small_photograph(seed), 1) for seed in range(2, 30)]],
    )
    assert index(tmp_path) == 0
    verify = tool("verify_dataset").main
    for options in ([], ["--sample", "30"]):
        capsys.readouterr()
        assert verify([str(tmp_path), *options]) == 1
        output = capsys.readouterr().out
        assert f"fault: {tmp_path}/train/a: the image of record " in output
        assert "cannot be decoded: image file is truncated" in output and output.count("fault:") == 1
    assert verify([str(tmp_path), "--no-decode"]) == 0
    with pytest.raises(DatasetError, match=r"image 1 \(.*train/a, \d+ bytes at byte \d+\) cannot be decoded"):
        stored_picture(Split(tmp_path, "train"), 1)
    assert tool("show_dataset").main([str(tmp_path), "--out", str(tmp_path / "sheets")]) == 2
    assert "image 1 (" in capsys.readouterr().err


# Folders


def test_classes_whose_names_differ_in_a_byte_that_is_not_utf8(tmp_path: Path) -> None:
    """In a tar and in a folder: two classes stay two, and their names are text that every file can hold."""
    names = [b"caf\xe8".decode(errors="surrogateescape"), b"caf\xe9".decode(errors="surrogateescape")]
    path = tmp_path / "latin.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape") as archive:
        for number, name in enumerate(names):
            content = small_photograph(number)
            info = tarfile.TarInfo(f"{name}/{number}.jpg")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
            (tmp_path / "folder" / name).mkdir(parents=True)
            (tmp_path / "folder" / name / "x.jpg").write_bytes(content)
    for source in (path, tmp_path / "folder"):
        out = tmp_path / f"out-{source.name}"
        assert convert("folder", "--train", source, "--out", out) == 0
        split = Split(out, "train")
        assert split.manifest.class_names == ("caf\\xe8", "caf\\xe9")
        assert sorted(split.rows["label"]) == [0, 1]


@pytest.mark.parametrize("in_tar", [False, True])
def test_classes_without_images_are_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_tar: bool
) -> None:
    """As a telephone makes them, and as `mkdir` does: a class must not vanish."""

    def error(train: Path, validation: Path | None = None) -> str:
        with pytest.raises(SourceError) as error:
            sources(train, validation)
        return str(error.value)

    def sources(train: Path, validation: Path | None = None) -> Sources:
        paths = [path and packed(path) if in_tar else path for path in (train, validation)]
        return folders(*paths, validation_fraction=None, seed=0)

    def packed(path: Path) -> Path:
        with tarfile.open(tar := path.with_suffix(".tar"), "w") as archive:
            archive.add(path, arcname=".")
        return tar

    train = write_folder(tmp_path / "train", {"ant": 2, "bee": 1})
    (train / "ant" / "NOTES").touch()
    (train / "owl" / "deep").mkdir(parents=True)
    assert re.search("1 class folder without images: owl .empty.: convert what are images to JPEG", error(train))
    for number, suffix in enumerate((".heic", ".HEIC", ".mov", "." + "x" * 200)):
        (train / "owl" / "deep" / f"{number}{suffix}").touch()
    assert "without images: owl (2 .heic, 1 .mov, 1 .xxxxxxxxxxxxxxxxxx…): convert" in error(train)
    (train / "owl" / "1.jpg").write_bytes(small_photograph(9))
    assert sources(train)[1] == ["ant", "bee", "owl"]
    assert "5 files passed over: 2 .heic (owl), 1 without suffix (ant), 1 .mov (owl)" in caplog.text
    validation = write_folder(tmp_path / "validation", {"ant": 1})
    (validation / "bee").mkdir()
    assert sources(train, validation)[0]["validation"].labels.tolist() == [0]
    assert "0 files passed over: 1 empty folder (bee)" in caplog.text
    (validation / "ant" / "000.jpg").rename(validation / "ant" / "000.avif")
    assert "the validation split has no images: expected files such as CLASS/name.jpg" in error(train, validation)
    assert "but ant (1 .avif), bee (empty)" in error(train, validation)
    (tars := tmp_path / "tars").mkdir()
    packed(train / "ant").rename(tars / "ant.tar")
    assert "(there are files .tar): unpack each archive, into a folder of its class if it has" in error(tars)


def test_a_folder_around_the_class_folders(tmp_path: Path) -> None:
    write_folder(tmp_path / "root" / "photos", {"ant": 1, "bee": 1})
    with pytest.raises(SourceError, match=r"root has one class folder, photos, and all images in 2 folders below it"):
        folders(tmp_path / "root", None, validation_fraction=None, seed=0)
    (tmp_path / "root" / "photos" / "ant" / "000.jpg").rename(tmp_path / "root" / "photos" / "ant.jpg")
    assert folders(tmp_path / "root", None, validation_fraction=None, seed=0)[1] == ["photos"]


def test_a_folder_of_splits_instead_of_classes(tmp_path: Path) -> None:
    write_folder(tmp_path / "root" / "train", {"ant": 2, "bee": 2})
    write_folder(tmp_path / "root" / "val", {"bee": 1}, first_seed=50)
    sources, names = folders(tmp_path / "root", None, validation_fraction=None, seed=0)
    assert names == ["ant", "bee"]
    assert sources["train"].labels.tolist() == [0, 0, 1, 1] and sources["validation"].labels.tolist() == [1]
    with pytest.raises(SourceError, match=r"--validation-fraction is 0\.5 where there is a validation split"):
        folders(tmp_path / "root", None, validation_fraction=0.5, seed=0)
    (tmp_path / "root" / "train" / "cat").mkdir()
    with pytest.raises(SourceError, match=r"1 class folder without images: cat \(empty\): convert"):
        folders(tmp_path / "root", None, validation_fraction=None, seed=0)
    write_folder(tmp_path / "root" / "test", {"0": 1})
    (tmp_path / "root" / "train" / "cat").rmdir()
    sources, names = folders(
        tmp_path / "root", None, validation_fraction=None, seed=0
    )  # as with tars, test is left out
    assert sources["validation"].labels.tolist() == [1] and names == ["ant", "bee"]
    with pytest.raises(SourceError, match="holds test, train, val, which are splits and not classes"):
        folders(tmp_path / "root", tmp_path / "root" / "val", validation_fraction=None, seed=0)
    write_folder(tmp_path / "vehicles", {"bus": 1, "train": 1})  # here it is a class
    assert folders(tmp_path / "vehicles", None, validation_fraction=None, seed=0)[1] == ["bus", "train"]
    with pytest.raises(SourceError, match=r"--validation-fraction is 0\.5 where no class has two images"):
        folders(tmp_path / "vehicles", None, validation_fraction=0.5, seed=0)


def test_paths_that_are_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """dataset.json holds the names of sources and shards, and is UTF-8."""
    folder = write_folder(tmp_path / "\udcff" / "im\udcffages", {"ant": 2, "bee": 2})
    out, smaller = tmp_path / "\udcff" / "out\udcff", tmp_path / "smaller"
    assert convert("folder", "--train", folder, "--out", out) == 0
    assert tool("show_dataset").main([str(out)]) == 0
    assert tool("make_subset").main([str(out), "--classes", "1", "--out", str(smaller)]) == 0
    assert tool("verify_dataset").main([str(smaller)]) == 0
    (tmp_path / "theirs").mkdir()
    (out / "train").rename(tmp_path / "theirs" / "train")
    shard = next((tmp_path / "theirs" / "train").iterdir())
    shard.rename(shard.with_name("\udcff.tfrecord"))
    for path, options in ((tmp_path / "theirs", []), (folder, ["--out", tmp_path / "index"])):
        capsys.readouterr()
        assert index(path, *options) == 2
        assert "\\xff" in (error := capsys.readouterr().err) and "is not UTF-8, and dataset.json must" in error
    assert not (tmp_path / "index").exists() and not (tmp_path / "theirs" / "dataset.json").exists()


def test_thumbnails_open_only_known_formats(indexed: Path) -> None:
    """An index that was made elsewhere may point at anything."""
    path, rows = indexed / "train" / "a", np.load(indexed / "index" / "train.npy")
    content = bytearray(path.read_bytes())
    start = int(rows["offset"][0])
    content[start : start + len(EPS)] = EPS
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"image 0 \(.*\) is not an image in a known format"):
        stored_picture(Split(indexed, "train", local=False), 0)
    assert isinstance(stored_picture(Split(indexed, "train", local=False), 1), Image.Image)
