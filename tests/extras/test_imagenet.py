"""ImageNet's archives in the official layout, built here: labels must be the sorted synsets, not the ILSVRC ids."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from dali_train.cli import main
from dali_train.data.convert.sources import SourceError
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles, open_shards, stored_image
from dali_train.extras.formats import imagenet as imagenet_archives
from dali_train.extras.formats.imagenet import imagenet
from tests.convert.files import (
    SYNSETS,
    convert,
    records,
    small_photograph,
    tar_bytes,
    write_devkit,
    write_tar,
    write_training_archive,
    write_validation_archive,
)


def test_official_layout_converts_to_the_right_labels(tmp_path: Path) -> None:
    validation_synsets = [SYNSETS[n * 7 % 5] for n in range(12)]
    write_training_archive(tmp_path / "train.tar")
    write_validation_archive(tmp_path / "val.tar", 12)
    write_devkit(tmp_path / "devkit.tar.gz", validation_synsets)
    train, out = ("imagenet", "--train-archive", tmp_path / "train.tar"), tmp_path / "out"
    validation = ("--validation-archive", tmp_path / "val.tar", "--devkit", tmp_path / "devkit.tar.gz")
    assert convert(*train, *validation, "--out", out, "--train-shards", 3) == 0

    train = records(out, "train")
    assert len(train) == 20
    with tarfile.open(tmp_path / "train.tar") as outer:
        for member in outer:
            synset = member.name.removesuffix(".tar")
            with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                for image in inner:
                    content = inner.extractfile(image).read()
                    assert train[image.name] == (sorted(SYNSETS).index(synset) + 1, synset, content)
    validation = records(out, "validation")
    assert len(validation) == 12
    for number, synset in enumerate(validation_synsets, start=1):
        name = f"ILSVRC2012_val_{number:08d}.JPEG"
        assert validation[name] == (sorted(SYNSETS).index(synset) + 1, synset, small_photograph(1000 + number))

    split = Split(out, "train")
    assert split.manifest.class_names == SYNSETS
    assert split.manifest.label_base == 1
    for image in range(len(split)):
        label, _, content = next(r for r in train.values() if r[2] == stored_image(MappedFiles(split), image).tobytes())
        assert split.rows[image]["label"] == label - 1


def test_archives_in_place_are_what_a_conversion_makes_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    official, out, converted = tmp_path / "official", tmp_path / "index", tmp_path / "converted"
    train, validation, devkit = (official / name for name in imagenet_archives._OFFICIAL)
    write_training_archive(train)
    write_validation_archive(validation, 12)
    words = ("--train-archive", train, "--validation-archive", validation, "--devkit", devkit)
    assert main(["data", "index", str(official), "--out", str(out)]) == 2
    assert "ILSVRC2012_img_val.tar: its labels are in ILSVRC2012_devkit_t12.tar.gz: put that" in capsys.readouterr().err
    write_devkit(devkit, [SYNSETS[n * 7 % 5] for n in range(12)])
    assert convert("imagenet", *words, "--out", converted) == 0
    assert main(["data", "index", str(official), "--out", str(out)]) == 0
    assert "indexes 2 files in" in capsys.readouterr().out
    for name in ("train", "validation"):
        ours, theirs = Split(out, name), Split(converted, name)
        assert ours.manifest.class_names == theirs.manifest.class_names == SYNSETS
        for column in ("label", "size", "height", "width"):
            assert (ours.rows[column] == theirs.rows[column]).all()
        assert (ours.checksums == theirs.checksums).all()
        one, other = (open_shards(split).read(np.arange(len(split))) for split in (ours, theirs))
        assert all((a == b).all() for a, b in zip(one, other, strict=True))
    assert main(["data", "verify", str(out)]) == 0
    write_devkit(devkit, [SYNSETS[n * 3 % 5] for n in range(12)])
    capsys.readouterr()
    assert main(["data", "verify", str(out)]) == 1
    assert f"{devkit} has changed since the labels were read from it: restore it" in capsys.readouterr().out
    # The training archive alone, of which a part can be held out.
    alone = ("data", "index", str(train), "--out", str(tmp_path / "alone"), "--validation-fraction", "0.25")
    assert main([*alone]) == 0
    assert [len(Split(tmp_path / "alone", name)) for name in ("train", "validation")] == [15, 5]
    assert main([*alone, "--class-names", str(devkit)]) == 2
    assert "--class-names: has no effect on images that are read in place (imagenet)" in capsys.readouterr().err


def test_one_split_alone_and_flat_archives(tmp_path: Path) -> None:
    archive = write_tar(
        tmp_path / "flat.tar", [(f"./{synset}_a {n}.JPEG", b"x") for synset in SYNSETS for n in range(2)]
    )
    sources, names = imagenet(archive, None, None)
    assert list(sources) == ["train"] and tuple(names) == SYNSETS
    assert sources["train"].labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    write_validation_archive(tmp_path / "val.tar", 3)
    write_devkit(tmp_path / "devkit.tar.gz", [SYNSETS[2], SYNSETS[0], SYNSETS[4]])
    sources, names = imagenet(None, tmp_path / "val.tar", tmp_path / "devkit.tar.gz")
    assert list(sources) == ["validation"] and tuple(names) == SYNSETS
    assert sources["validation"].labels.tolist() == [4, 0, 2]  # the archive counts down


def test_wrong_archives_say_which_is_right(tmp_path: Path) -> None:
    train = write_training_archive(tmp_path / "train.tar", num_images=1)
    validation = write_validation_archive(tmp_path / "val.tar", 3)
    devkit = write_devkit(tmp_path / "devkit.tar.gz", [SYNSETS[0]] * 3)

    def message(*paths: Path | None) -> str:
        with pytest.raises(SourceError) as error:
            imagenet(*paths)
        return str(error.value)

    assert "nothing to convert: give --train-archive FILE" in message(None, None, devkit)
    assert "--validation-archive needs --devkit ILSVRC2012_devkit_t12.tar.gz" in message(None, validation, None)
    assert "neither SYNSET.tar, such as n01440764.tar, nor SYNSET_name.JPEG" in message(validation, None, None)
    assert "expected ILSVRC2012_val_NUMBER.JPEG" in message(None, train, devkit)
    assert "train.tar: meta.mat is missing: this is the wrong archive" in message(None, validation, train)
    short = write_validation_archive(tmp_path / "short.tar", 2)
    assert "2 images, the devkit has 3 labels" in message(None, short, devkit)
    long = write_validation_archive(tmp_path / "long.tar", 4)
    assert "is not one of the devkit's 3 validation images" in message(None, long, devkit)
    images = [(f"{folder}ILSVRC2012_val_00000001.JPEG", b"1") for folder in ("", "copy/")]
    twice = write_tar(tmp_path / "twice.tar", images)
    assert "appears twice" in message(None, twice, devkit)
    other = write_training_archive(tmp_path / "other.tar", num_images=1, synsets=["n99999999"])
    assert "n99999999 (1 synsets) are not in" in message(other, None, devkit)
    mixed = write_tar(tmp_path / "mixed.tar", [("n01440764.tar", tar_bytes([("n01443537_1.JPEG", b"1")]))])
    assert "holds 'n01443537_1.JPEG', expected n01440764_NUMBER.JPEG" in message(mixed, None, None)
    wrong = write_devkit(tmp_path / "wrong.tar.gz", [], truth=b"1\n6\n")
    assert "ILSVRC ids [6] are not among the 5 synsets of meta.mat" in message(None, validation, wrong)
    words = write_devkit(tmp_path / "words.tar.gz", [], truth=b"tench\n")
    assert "expected one ILSVRC id per line" in message(None, validation, words)
    assert "nowhere.tar: cannot be opened (No such file or directory)" in message(tmp_path / "nowhere.tar", None, None)
    no_table = write_tar(
        tmp_path / "bad.tar.gz",
        [("meta.mat", b"MATLAB"), ("ILSVRC2012_validation_ground_truth.txt", b"1")],
        mode="w:gz",
    )
    assert "not the devkit's table of synsets" in message(None, validation, no_table)


def test_a_member_too_large_for_an_image_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.tar"
    entry = tarfile.TarInfo("n01440764_1.JPEG")
    entry.size = 200_000_000
    with path.open("wb") as file:  # sparse: nothing is written
        file.write(entry.tobuf())
        file.truncate(512 + entry.size + 1024)
    with pytest.raises(
        SourceError, match=r"n01440764_1.JPEG: 200,000,000 bytes: the limit for an image is 100,000,000"
    ):
        imagenet(path, None, None)
