"""A subset keeps the bytes and names of what it takes, and renumbers the classes."""

from pathlib import Path

import pytest

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles, stored_image
from tests.conftest import write_shard
from tests.convert.files import convert, files_of, records, small_photograph, tool, write_folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("subset")
    train = write_folder(root / "train", {"ant": 6, "bee": 7, "cat": 8, "dog": 9})
    validation = write_folder(root / "validation", {"ant": 2, "bee": 3, "cat": 4, "dog": 5}, first_seed=100)
    assert convert("folder", "--train", train, "--validation", validation, "--out", root / "out") == 0
    return root / "out"


def make_subset(*arguments: object) -> int:
    return tool("make_subset").main([str(argument) for argument in arguments])


def test_a_class_list(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "list").write_text("dog\n\n bee \n")
    assert make_subset(whole, "--class-list", tmp_path / "list", "--out", tmp_path / "out") == 0
    assert Split(tmp_path / "out", "train").manifest.class_names == ("bee", "dog")
    original, found = records(whole, "train"), records(tmp_path / "out", "train")
    assert len(found) == 16
    for name, (label, synset, image) in found.items():
        assert label == {"bee": 1, "dog": 2}[synset]
        assert original[name][1:] == (synset, image)
    assert len(records(tmp_path / "out", "validation")) == 8


def test_so_many_classes_and_images(whole: Path, tmp_path: Path) -> None:
    arguments = [whole, "--classes", 3, "--images-per-class", 5]
    assert make_subset(*arguments, "--out", tmp_path / "a") == 0
    assert make_subset(*arguments, "--out", tmp_path / "b", "--workers", 7) == 0
    assert make_subset(*arguments, "--out", tmp_path / "c", "--seed", 8) == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") != files_of(tmp_path / "c")
    assert len(Split(tmp_path / "a", "train")) == 15
    names = Split(tmp_path / "a", "train").manifest.class_names
    expected = sum({"ant": 2, "bee": 3, "cat": 4, "dog": 5}[name] for name in names)
    assert len(Split(tmp_path / "a", "validation")) == expected
    assert make_subset(*arguments, "--out", tmp_path / "a") == 0  # whole already


def test_a_subset_of_raw_pixels(tmp_path: Path) -> None:
    train = write_folder(tmp_path / "train", {"ant": 3, "bee": 3})
    assert convert("folder", "--train", train, "--format", "raw", "--out", tmp_path / "raw") == 0
    (tmp_path / "list").write_text("bee")
    assert make_subset(tmp_path / "raw", "--class-list", tmp_path / "list", "--out", tmp_path / "out") == 0
    split, original = Split(tmp_path / "out", "train"), Split(tmp_path / "raw", "train")
    assert split.manifest.encoding == "raw"
    chosen, all_images = MappedFiles(split), MappedFiles(original)
    assert {stored_image(chosen, i).tobytes() for i in range(3)} <= {
        stored_image(all_images, i).tobytes() for i in range(6)
    }


def test_mistakes(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message(*options: object) -> str:
        assert make_subset(whole, *options, "--out", tmp_path / "out") == 2
        return capsys.readouterr().err

    assert "--classes is 5: use 1 to 4, the dataset has no more" in message("--classes", 5)
    (tmp_path / "list").write_text("cow\n")
    error = message("--class-list", tmp_path / "list")
    assert "'cow' is not a class of the dataset: one name per line is expected, such as ant, bee, cat" in error
    assert "cannot be read (No such file or directory)" in message("--class-list", tmp_path / "nowhere")
    (tmp_path / "list").write_bytes(b"b\xea\n")
    assert f"--class-list {tmp_path}/list: cannot be read ('utf-8' codec" in message("--class-list", tmp_path / "list")
    assert "--class-list /dev/zero: cannot be read (is larger than" in message("--class-list", "/dev/zero")
    assert "--images-per-class is 0: use at least 1" in message("--images-per-class", 0)
    assert "--seed is -1: use 0 to 2**63 - 1" in message("--classes", 2, "--seed", -1)


def test_a_dataset_without_names_or_file_names(tmp_path: Path) -> None:
    """Somebody else's records may have nothing but the image and its label."""
    write_shard(tmp_path / "theirs" / "train" / "a", [(small_photograph(seed), 1 + seed % 3) for seed in range(9)])
    assert tool("make_index").main([str(tmp_path / "theirs")]) == 0
    assert make_subset(tmp_path / "theirs", "--classes", 2, "--out", tmp_path / "out") == 0
    assert set(records(tmp_path / "out", "train")) < {f"train_{number}" for number in range(9)}
