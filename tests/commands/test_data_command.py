"""``dali-train data``: its options, its exit status, other people's layouts, and what it says where there is no
dataset."""

import os
import shutil
import stat
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from dali_train.data.convert import conversion
from dali_train.data.convert.datasets import DATASETS, SOURCE, Converter, advice
from dali_train.data.convert.sources import PixelSource, SourceError, Sources
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import Manifest
from dali_train.data.dataset.storage import MappedFiles, stored_image
from dali_train.data.dataset.tfrecord import write_records
from tests.conftest import write_shard
from tests.convert.files import convert, files_of, small_photograph, write_folder


def data(*arguments: object) -> int:
    from dali_train.cli import main

    return main(["data", *(str(argument) for argument in arguments)])


def write_shards(directory: Path, prefix: str, count: int, *, first_label: int = 1) -> None:
    for shard in range(2):
        records = [(small_photograph(seed), first_label + seed % 3) for seed in range(shard, count, 2)]
        write_shard(directory / f"{prefix}-{shard:05d}-of-00002", records)


def test_commands_and_scripts_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "images", {"ant": 4, "bee": 4})
    assert data("convert", "folder", "--train", folder, "--validation-fraction", 0.25, "--out", tmp_path / "a") == 0
    assert convert("folder", "--train", folder, "--validation-fraction", 0.25, "--out", tmp_path / "b") == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert data("verify", tmp_path / "a") == 0
    assert data("show", tmp_path / "a", "--out", tmp_path / "sheets") == 0
    assert data("subset", tmp_path / "a", "--classes", 1, "--out", tmp_path / "subset") == 0
    before = Manifest.read(tmp_path / "a")
    assert before.applies_orientation
    for options in ((), ("--no-crc",), ()):  # a model that is trained on it must know that photographs were turned
        assert data("index", tmp_path / "a", *options) == 0
        assert Manifest.read(tmp_path / "a").conversion == before.conversion
    assert Manifest.read(tmp_path / "a").splits == before.splits
    assert data("index", tmp_path / "a", "--out", tmp_path / "e") == 0
    assert Manifest.read(tmp_path / "e").conversion == before.conversion
    shutil.copytree(tmp_path / "a", tmp_path / "d")
    first, other = sorted((tmp_path / "d" / "train").iterdir())[:2]
    shutil.copy(other, first)
    assert data("index", tmp_path / "d") == 0
    assert Manifest.read(tmp_path / "d").conversion == {}, "other records, of which nothing is known"
    capsys.readouterr()
    assert data("verify", tmp_path / "a", "--smple", 3) == 2
    assert (
        "dali-train data verify: --smple 3: unknown; `dali-train data verify --help` lists the options"
        in capsys.readouterr().err
    )
    assert data("convert", "cifar10", "--out", tmp_path / "c") == 2
    assert "dali-train data convert cifar10: name the published files with --source" in capsys.readouterr().err
    for arguments in (
        ("verify", tmp_path / "a", "--sample", 0),
        ("verify", tmp_path / "a", "--workers", 0),
        ("index", folder, "--out", tmp_path / "i", "--workers", -1),
        ("convert", "folder", "--train", folder, "--out", tmp_path / "c", "--workers", 0),
    ):
        with pytest.raises(SystemExit) as stop:
            data(*arguments)
        assert stop.value.code == 2


@pytest.mark.parametrize("layout", ["flat", "val", "flat val"])
def test_layouts_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str) -> None:
    root = tmp_path / "theirs"
    for split, count in (("train", 7), ("validation" if layout == "flat" else "val", 5)):
        write_shards(root if "flat" in layout else root / split, split, count)
    for _ in range(2):  # the second time the links are there
        assert data("index", root) == 0
    assert data("verify", root) == 0
    assert (len(Split(root, "train")), len(Split(root, "validation"))) == (7, 5)
    root.rename(tmp_path / "moved")
    assert stored_image(MappedFiles(Split(tmp_path / "moved", "validation")), 0).tobytes() == small_photograph(0)
    write_shards(tmp_path / "moved" / "validation-2", "x", 3)
    capsys.readouterr()
    if layout == "val":
        write_shards(tmp_path / "moved" / "val", "val-extra", 3)
        assert data("index", tmp_path / "moved") == 2
        assert "the validation split is in" in capsys.readouterr().err


def test_an_index_beside_read_only_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = tmp_path / "theirs", tmp_path / "index"
    write_shards(root / "train", "train", 7)
    before = files_of(root)
    for path in (root / "train", root):
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert data("index", root, "--out", out) == 0
        assert data("index", root, "--out", out) == 0
        assert data("verify", out) == 0
        assert stored_image(MappedFiles(Split(out, "train")), 1).tobytes() == small_photograph(2)
    finally:
        for path in (root, root / "train"):
            path.chmod(stat.S_IRWXU)
    assert files_of(root) == before
    (out / "train" / "mine").write_text("a file of somebody")
    assert data("index", root, "--out", out) == 2
    assert "holds mine, which is not of this dataset: use an empty --out" in capsys.readouterr().err


def test_features_of_other_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train" / "a"
    write_records(path, ((b"not the image", {"jpg": small_photograph(seed), "cls": seed % 2}) for seed in range(6)))
    assert data("index", tmp_path, "--image-key", "jpg", "--label-key", "cls", "--label-base", 0) == 0
    split = Split(tmp_path, "train")
    assert stored_image(MappedFiles(split), 3).tobytes() == small_photograph(3)
    assert split.rows["label"].tolist() == [0, 1] * 3
    assert data("verify", tmp_path) == 0 and data("verify", tmp_path, "--sample", 3) == 0
    os.utime(path, (2e9, 2e9))  # copied without its time
    assert len(Split(tmp_path, "train")) == 6
    assert data("index", tmp_path, "--image-key", "png", "--label-key", "cls") == 1
    assert "feature png is missing; the record has cls, image/encoded, jpg" in capsys.readouterr().err


def test_unused_class_numbers_are_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "train" / "a", [(small_photograph(seed), label) for seed, label in enumerate((1, 2, 5))])
    assert data("index", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "train: 3 images in 1 shard, 5 classes" in printed
    assert "note: no record has the label 3, 4: 2 of 5 classes are unused" in printed
    assert data("index", tmp_path, "--label-base", 0) == 0
    assert "note: no record has the label 0, 3, 4: 3 of 6 classes are unused" in capsys.readouterr().out


def test_names_of_the_classes_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "train" / "a", [(small_photograph(seed), label) for seed, label in enumerate((1, 2))])
    names = tmp_path / "names.txt"
    for text, status, message in (
        ("", 2, "use one name"),
        ("ant\nant\n", 2, "use one name"),
        ("ant\n", 1, "label 2 is"),
    ):
        names.write_text(text)
        assert data("index", tmp_path, "--class-names", names) == status and message in capsys.readouterr().err
    names.write_text("ant\nbee\nlarge wasp\n")
    assert data("index", tmp_path, "--class-names", names) == 0
    assert Split(tmp_path, "train").manifest.class_names == ("ant", "bee", "large wasp")


@pytest.mark.parametrize(
    ("files", "command"),
    [
        (["train/train-00000-of-00001"], "run `dali-train data index ROOT`"),
        (["validation-00000-of-00004"], "run `dali-train data index ROOT`"),
        (["val/x.tfrecord"], "run `dali-train data index ROOT`"),
        (
            ["ant/1.jpg", "bee/2.JPEG"],
            "folders of images: run `dali-train data convert folder --train ROOT --out DATASET`",
        ),
        (
            ["train/ant/1.jpg", "val/ant/2.jpg"],
            "folders of images: run `dali-train data convert folder --train ROOT --out DATASET`",
        ),
        (
            ["ILSVRC2012_img_train.tar"],
            "run `dali-train data convert imagenet --train-archive ROOT/ILSVRC2012_img_train.tar",
        ),
        (["photos.tar"], "run `dali-train data convert folder --train ROOT/photos.tar --out DATASET`"),
        (["PHOTOS.TAR"], "run `dali-train data convert folder --train ROOT/PHOTOS.TAR --out DATASET`"),
        (["it's.tar"], "run `dali-train data convert folder --train 'ROOT/it'\"'\"'s.tar' --out DATASET`"),
        (["cifar-10-binary.tar.gz"], "run `dali-train data convert cifar10 --source ROOT"),
        (["train-images-idx3-ubyte.gz"], "run `dali-train data convert mnist --source ROOT"),
        (
            [".conversion/options.json", "train/train-00000-of-00002"],
            "a conversion that is not finished: start the same `dali-train data convert` again",
        ),
        (["flowers/1.0.0/flowers-train.tfrecord-00000-of-00001"], "its TFRecords are in ROOT/flowers/1.0.0: name"),
        (["thesis.tex"], "nothing in the directory, with files .tex, looks like a dataset: `dali-train data convert"),
    ],
)
def test_where_there_is_no_dataset_the_fitting_command_is_named(tmp_path: Path, files: list[str], command: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert command.replace("ROOT", str(tmp_path)) in advice(tmp_path, DATASETS)


def test_a_bit_that_flips_in_a_finished_shard_is_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the conversion is stopped, or just before its last look: never complete with a faulty shard."""
    folder = write_folder(tmp_path / "images", {"ant": 8, "bee": 8})
    out = tmp_path / "out"
    options = ["convert", "folder", "--train", folder, "--train-shards", 4, "--out", out]
    assert data(*options[:-1], tmp_path / "sound") == 0
    shard = out / "train" / "train-00002-of-00004"

    def rot() -> None:
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_index", stop)
        assert data(*options) == 130
    rot()
    assert data(*options) == 0
    assert files_of(out) == files_of(tmp_path / "sound")

    write_index, late = conversion.write_index, tmp_path / "late"
    shard = late / "train" / "train-00002-of-00004"

    def write_index_and_rot(*arguments: object, **named: object) -> None:
        write_index(*arguments, **named)
        rot()

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_index", write_index_and_rot)
        capsys.readouterr()
        assert data(*options[:-1], late) == 1
        error = capsys.readouterr().err
        assert f"{shard}: has CRC32C" in error and "Start the same command again: faulty shards are rewritten" in error
        assert not (late / "dataset.json").exists()
    assert data(*options[:-1], late) == 0
    assert files_of(late) == files_of(tmp_path / "sound")

    index, again = tmp_path / "again" / "idx_files" / "train" / "train-00001-of-00004.idx", tmp_path / "again"

    def write_index_and_lose(*arguments: object, **named: object) -> None:
        write_index(*arguments, **named)
        index.write_text(index.read_text().replace("0 ", "1 ", 1))

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_index", write_index_and_lose)
        assert data(*options[:-1], again) == 1
        assert f"{index}: is missing or does not fit its shard" in capsys.readouterr().err


def test_a_converter_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a file outside of the package: the parser and its help, the advice for a directory, the errors."""
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letters.npz").write_bytes(b"")

    def letters(options: Namespace) -> Sources:
        directory = options.source
        if not (directory / "letters.npz").is_file():
            raise SourceError(f"{directory}: has no letters.npz")
        names = {"a": 3}
        if options.shift:
            names["b"]
        pixels = np.zeros((6, 8, 8), np.uint8)
        return {"train": PixelSource(pixels, np.zeros(6, np.int32), title="letters").images()}, list(names)

    arguments = {**SOURCE, "--shift": {"action": "store_true"}}
    with pytest.MonkeyPatch.context() as patch:
        row = Converter(help="Handwritten letters.", load=letters, arguments=arguments, files="letters.npz")
        patch.setitem(DATASETS, "letters", row)
        with pytest.raises(SystemExit):
            data("convert", "--help")
        assert "Handwritten letters." in capsys.readouterr().out
        command = ["convert", "letters", "--out", tmp_path / "out", "--source"]
        assert data(*command, tmp_path / "none") == 2
        assert f"dali-train data convert letters: {tmp_path}/none: has no letters.npz" in capsys.readouterr().err
        assert data(*command, tmp_path / "letters", "--shift") == 2
        assert "letters: KeyError('b'): what the source should hold is not there" in capsys.readouterr().err
        assert data("verify", tmp_path / "letters") == 2
        advised = f"letters: run `dali-train data convert letters --source {tmp_path}/letters --out DATASET`"
        assert advised in capsys.readouterr().err
        assert data(*command, tmp_path / "letters") == 0
    assert Split(tmp_path / "out", "train").manifest.class_names == ("a",)
    assert data("convert", "folder", "--train", tmp_path / "out", "--out", tmp_path / "none") == 2
