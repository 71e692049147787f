"""Nothing vanishes without a word: each file is an image, counted by its reason, or an error that names it."""

import os
import tarfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from dali_train.cli import main
from dali_train.data.convert.datasets import DATASETS, in_place
from dali_train.data.convert.sources import SourceError, Sources
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import Manifest, order_classes, split_folders_among, split_word
from dali_train.data.dataset.passed_over import missing_numbers
from dali_train.data.dataset.storage import open_shards, stored_image
from dali_train.data.dataset.tfrecord import write_records
from dali_train.errors import DatasetError
from dali_train.extras.formats.trees import folders
from dali_train.extras.indexing.foreign_shards import find_splits
from tests.convert.files import small_photograph, write_folder, write_mds, write_tar

JPEG = small_photograph(0)


def webdataset(source: Path, label_key: str | None = None) -> Sources:
    options = Namespace(
        source=source, label_key=label_key, class_names=None, validation_fraction=None, group_by=None, seed=0
    )
    return DATASETS["webdataset"].load(options)


def tree(root: Path, **options: object) -> Sources:
    given = {
        "validation": None,
        "validation_fraction": None,
        "group_by": None,
        "class_order": "name",
        "class_names": None,
        "several_labels": False,
    }
    return DATASETS["folder"].load(Namespace(train=root, seed=0, **{**given, **options}))


def num_images(sources: Sources) -> dict[str, int]:
    return {split: len(images.labels) for split, images in sources[0].items()}


def test_keys_with_dots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """WebDataset ends a key at the first dot of the file's name; what has an image and a label there is a sample, and
    so is what has them up to its last dot."""
    names = ["2.image", "v1.0/img0", "2020.01.02-a", "2020.01.02-b", "photo.edited", "img1"]
    members = [(f"{name}.{ending}", JPEG if ending == "jpg" else b"1") for name in names for ending in ("jpg", "cls")]
    members[1] = "2.label.cls", b"1"
    members += [("img1.seg.png", JPEG), ("img1.json", b"{}"), ("img1.edited.jpg", JPEG), ("readme", b"")]
    members += [("2020.01.02-c.JPG", JPEG), ("2020.01.02-c.txt", b""), ("2020.01.02-c.cls", b"0"), ("._x.jpg", b"")]
    write_tar(tmp_path / "0.tar", members)
    (tmp_path / "0_stats.json").touch()
    sources, _ = webdataset(tmp_path)
    found = [sources["train"].name(number) for number in range(len(sources["train"].labels))]
    assert found == [f"0.tar:{name}.jpg" for name in names] + ["0.tar:2020.01.02-c.JPG"]
    reasons = {one.reason: count for one, count in sources["train"].passed_over.items() if one.place == "0.tar"}
    assert reasons == {".seg.png": 1, ".json": 1, ".edited.jpg": 1, "without suffix": 1, ".txt": 1}
    assert "7 files passed over" in caplog.text and "1 hidden" in caplog.text


@pytest.mark.parametrize(
    ("members", "label_key", "message"),
    [
        ([("2020.01-a.jpg", JPEG)], None, ":2020.01-a: has 1 image and 0 .cls files"),
        ([("2020.01-a.cls", b"1"), ("2020.01-a.heic", b"")], None, r"0 images and 1 .cls file: .*there is .heic"),
        ([("1.avif", b""), ("1.json", b'{"label": 1}')], "label", r"0 images and 1 .json file: .*there is .avif"),
        ([("1.jpg", JPEG), ("1.txt", b"")], "label", "1 image and 0 .json files"),
        ([("1.image.jpg", JPEG), ("1.a.png", JPEG), ("1.label.cls", b"1")], None, "1.image: has 1 image and 0 .cls"),
        ([("2020.01.jpg", JPEG), ("2020.02.cls", b"1")], None, "2020.01: has 1 image and 0 .cls files"),
    ],
)
def test_half_a_sample_is_an_error(
    tmp_path: Path, members: list[tuple[str, bytes]], label_key: str | None, message: str
) -> None:
    write_tar(tmp_path / "0.tar", members)
    with pytest.raises(SourceError, match=message):
        webdataset(tmp_path, label_key)


def test_words_of_splits() -> None:
    words = {"Training": "train", "seg_test": "test", "VALID": "val", "a/train/val-0.tar": "val", "latest-trains": None}
    words |= {
        "trainLabels": "train",
        "eyesTest": "test",
        "Constraint": None,
        "dev": "val",
        "a/eval.tfrecord": "test",
        "devkit": None,
        "testament": None,
        "TRAINS": None,
    }
    assert {name: split_word(name) for name in words} == words
    around = ("1_train", "2_val"), ("01-train", "03-test"), ("train", "test1")
    for names in (("Training", "Testing"), ("seg_train", "seg_test"), ("val", "test"), ("train",), *around):
        assert [*split_folders_among([*names, *(["docs"] if len(names) > 1 else [])])] == [*names]
    for names in (("train", "bus"), ("bullet_train", "test_tube"), ("val_d_isere", "test_pilot"), ("a_val", "a_test")):
        assert split_folders_among(names) == {}


@pytest.mark.parametrize("in_tar", [False, True])
def test_folders_of_splits_in_any_case(tmp_path: Path, in_tar: bool, caplog: pytest.LogCaptureFixture) -> None:
    def sources(name: str) -> Sources:
        root = tmp_path / name
        if in_tar:
            with tarfile.open(root.with_suffix(".tar"), "w") as archive:
                archive.add(root, arcname=".")
        return tree(root.with_suffix(".tar") if in_tar else root)

    for name in ("Training", "Testing"):
        write_folder(tmp_path / "mri" / name, {"glioma": 2, "pituitary": 1})
    write_folder(tmp_path / "mri" / "docs", {})
    (tmp_path / "mri" / "docs").mkdir()
    (tmp_path / "mri" / "docs" / "paper.pdf").touch()
    (tmp_path / "mri" / "__MACOSX").mkdir()
    found = sources("mri")
    assert num_images(found) == {"train": 3, "validation": 3} and found[1] == ["glioma", "pituitary"]
    assert "1 .pdf (docs)" in caplog.text and "empty" not in caplog.text
    assert in_place(tmp_path / "mri") == "folder"

    # Kaggle's ImageNet: the validation images have no folders. The same of its test split does not matter.
    write_folder(tmp_path / "kaggle" / "train", {"n1": 2, "n2": 1})
    for name in ("val", "test"):
        (tmp_path / "kaggle" / name).mkdir()
        (tmp_path / "kaggle" / name / "1.JPEG").write_bytes(JPEG)
    with pytest.raises(SourceError, match=r"val/1\.JPEG: an image outside of a class folder: .*val/CLASS/1.JPEG"):
        sources("kaggle")
    (tmp_path / "kaggle" / "val" / "n1").mkdir()
    (tmp_path / "kaggle" / "val" / "1.JPEG").rename(tmp_path / "kaggle" / "val" / "n1" / "1.JPEG")
    assert num_images(sources("kaggle")) == {"train": 3, "validation": 1}
    assert "1 of the test split, since there is another" in caplog.text
    (tmp_path / "kaggle" / "loose.jpg").write_bytes(JPEG)
    with pytest.raises(SourceError, match=r"loose\.jpg: an image outside of test, train, val, the folders of the spl"):
        sources("kaggle")

    for name in ("train", "val"):
        write_folder(tmp_path / "deeper" / name / "images", {"ant": 2, "bee": 1})
    found = sources("deeper")
    assert num_images(found) == {"train": 3, "validation": 3} and found[1] == ["ant", "bee"]

    # The classes lie a folder deeper, in two folders that are no known splits; as classes they need a list.
    for name in ("fold1", "fold2"):
        write_folder(tmp_path / "folds" / name, {"ant": 1, "bee": 1})
    with pytest.raises(SourceError, match=r"2 folders, fold1 and others, each with all images in the same .*ant, bee"):
        sources("folds")
    (tmp_path / "names").write_text("fold2\nfold1\n")
    found = tree(tmp_path / "folds", class_names=tmp_path / "names")
    assert found[1] == ["fold2", "fold1"] and found[0]["train"].labels.tolist() == [1, 1, 0, 0]


def test_two_folders_of_one_split(tmp_path: Path) -> None:
    for name in ("train", "val", "Validation"):
        write_folder(tmp_path / name, {"ant": 1})
    with pytest.raises(SourceError, match="Validation and val are one split"):
        folders(tmp_path, None, validation_fraction=None, seed=0)


def test_order_of_classes(tmp_path: Path) -> None:
    """As torchvision's, as timm's, or as a list says; the last also names folders that are numbers."""
    from timm.utils import natural_key

    names = ["apple", "Cat", "dog", "Zebra", "1", "10", "2", "x-12b", "x-2c", "é1"]
    assert order_classes(names) == sorted(names)
    assert order_classes(names, "natural") == sorted(names, key=natural_key) != sorted(names)
    write_folder(tmp_path / "photos" / "train", {"10": 1, "2": 2, "1": 3})
    write_folder(tmp_path / "photos" / "val", {"2": 1})
    for order, expected in (("name", ["1", "10", "2"]), ("natural", ["1", "2", "10"])):
        for action, source in (("index", ()), ("convert", ("folder", "--train"))):
            out = tmp_path / f"{action}-{order}"
            assert (
                main(["data", action, *source, *map(str, (tmp_path / "photos", "--out", out, "--class-order", order))])
                == 0
            )
            manifest = Manifest.read(out)
            assert list(manifest.class_names) == expected
            options = manifest.conversion["options"]
            assert options.get("class_order", "name") == order
            rows = np.load(out / "index" / "train.npy")
            assert np.bincount(rows["label"]).tolist() == [{"1": 3, "2": 2, "10": 1}[name] for name in expected]
    lines = [f"n{number:02d}" for number in range(12)]
    (tmp_path / "names").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    sources, found = tree(tmp_path / "photos", class_names=tmp_path / "names")
    assert found == lines and sources["train"].labels.tolist() == [1, 1, 1, 10, 2, 2]
    (tmp_path / "names").write_text("2\n10\n1\nfour\n")
    sources, found = tree(tmp_path / "photos", class_names=tmp_path / "names")
    assert found == ["2", "10", "1", "four"] and sources["train"].labels.tolist() == [2, 2, 2, 1, 0, 0]
    (tmp_path / "names").write_text("2\n10\n")
    with pytest.raises(DatasetError, match="the class '1' is none of its 2 lines"):
        tree(tmp_path / "photos", class_names=tmp_path / "names")


def test_resuming_with_another_order_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "photos", {"10": 1, "2": 2})
    words = ["data", "convert", "folder", "--train", str(tmp_path / "photos"), "--out", str(tmp_path / "out")]
    assert main(words) == 0 and main(words) == 0
    assert main([*words, "--class-order", "natural"]) == 2
    assert "--class-order was not given, now natural" in capsys.readouterr().err


def test_foreign_files_beside_tfrecords(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [(JPEG, {"image/class/label": 1})]
    for name in ("Train/a.tfrecord", "Train/b.tfrecord", "valid/x-000001-of-000002", "valid/x-000002-of-000002"):
        write_records(tmp_path / name, records)
    for name in ("Train/a.tfindex", "Train/.x", "valid/notes.txt", "test/0.tfrecord"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"0 100\n")
    (tmp_path / "valid" / "dead.tfrecord").symlink_to("nothing")
    found = find_splits(tmp_path)
    assert {split: [path.name for path in paths] for split, paths in found.items()} == {
        "train": ["a.tfrecord", "b.tfrecord"],
        "validation": ["x-000001-of-000002", "x-000002-of-000002"],
    }
    for words in (
        "1 .tfindex (Train)",
        "1 hidden (Train)",
        "1 .txt (valid)",
        "1 link to nothing",
        "1 of the test split",
    ):
        assert words in caplog.text
    (tmp_path / "valid" / "x-000001-of-000002").unlink()
    with pytest.raises(DatasetError, match="lacks 1 of 2 shards: 000001"):
        find_splits(tmp_path)

    for name in ("tfrecord-train", "tfrecord-valid"):  # the word ends the name
        write_records(tmp_path / "flat" / name, records)
    assert {split: paths[0].name for split, paths in find_splits(tmp_path / "flat").items()} == {
        "train": "tfrecord-train",
        "validation": "tfrecord-valid",
    }

    (tmp_path / "arrow" / "train").mkdir(parents=True)
    (tmp_path / "arrow" / "train" / "data-00000-of-00001.arrow").write_bytes(b"ARROW1\0\0" + bytes(400))
    assert main(["data", "index", str(tmp_path / "arrow")]) == 1
    assert "is a table of Arrow (Feather), which is not read: write it as Parquet, or" in capsys.readouterr().err


def test_gaps_in_numbered_shards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert missing_numbers(["a-0", "a-2", "a-3"]) == ["1"]
    assert missing_numbers(["00-224x224-8.tfrec", "02-224x224-8.tfrec"]) == ["01"]
    assert missing_numbers(["train-000001-of-000003"]) == ["000000", "000002"]
    assert missing_numbers(["t-1-of-2", "t-2-of-2"]) == []
    for names in (["n01440764", "n01443537"], ["x"], ["a-1", "b-3"], []):  # nothing is counted by these
        assert missing_numbers(names) == []
    sample = [("1.jpg", JPEG), ("1.cls", b"0")]
    for number in (0, 1, 3):
        write_tar(tmp_path / f"train-{number:04d}.tar", sample)
    webdataset(tmp_path)
    assert "1 file is missing: 0002" in caplog.text


def test_what_mds_passes_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_mds(tmp_path / "mds", {"x": ("jpeg", None), "y": ("uint8", 1)}, [(JPEG, b"\0")])
    (tmp_path / "mds" / "shard.00001.mds").write_bytes(b"left over")
    (tmp_path / "mds" / "README.md").touch()
    options = Namespace(source=tmp_path / "mds", out=tmp_path, image_key=None, label_key=None, class_names=None, seed=0)
    sources, _ = DATASETS["mds"].load(Namespace(**vars(options), validation_fraction=None, group_by=None))
    assert {one.reason: count for one, count in sources["train"].passed_over.items()} == {
        "shard that index.json does not use": 1,
        ".md": 1,
    }
    assert "2 files passed over" in caplog.text


def test_a_failed_index_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And an OUT that cannot be is said at once."""

    def error(out: str) -> str:
        assert main(["data", "index", str(tmp_path / "photos"), "--out", str(tmp_path / out)]) == 2
        return capsys.readouterr().err

    write_folder(tmp_path / "photos", {"ant": 1, "bee": 1})
    (tmp_path / "file").touch()
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    for out in ("file", "file/out", "file/out/deeper"):
        assert f"{tmp_path}/file is a file: name a new directory" in error(out)
    assert f"--out {tmp_path}/one: Too many levels of symbolic links" in error("one")
    (tmp_path / "photos" / "bee" / "one.jpg").symlink_to(tmp_path / "one")
    assert f"{tmp_path}/photos/bee/one.jpg: cannot be read (Too many levels of symbolic links)" in error("out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "photos" / "bee" / "one.jpg").unlink()
    os.mkfifo(tmp_path / "photos" / "bee" / "pipe.jpg")
    assert "pipe.jpg: a device, FIFO or socket" in error("out") and not (tmp_path / "out").exists()


def test_a_file_that_becomes_a_fifo(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos", {"ant": 1, "bee": 1})
    assert main(["data", "index", str(tmp_path / "photos"), "--out", str(tmp_path / "out")]) == 0
    images = open_shards(Split(tmp_path / "out", "train"))
    for path in [*(tmp_path / "photos").rglob("*.jpg")]:
        path.unlink()
        os.mkfifo(path)
    for number in (0, 1):
        with pytest.raises(DatasetError, match=r"000\.jpg is a FIFO, a device or a directory now: restore it"):
            stored_image(images, number)
