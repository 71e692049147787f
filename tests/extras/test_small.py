"""CIFAR-10, MNIST, Fashion-MNIST, digits and folders, in the layouts in which they are published."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles, stored_image
from tests.convert.files import convert, idx, small_photograph, write_folder, write_mnist, write_tar

RANDOM = np.random.default_rng(0)


def stored(out: Path, split: str) -> dict[bytes, int]:
    """The stored bytes of each image and its label from 0."""
    opened = Split(out, split)
    shards = MappedFiles(opened)
    return {stored_image(shards, image).tobytes(): int(opened.rows[image]["label"]) for image in range(len(opened))}


def cifar10_files() -> dict[str, np.ndarray]:
    """The official files, of 7 records each instead of 10,000: label, then planes of red, green and blue."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    return {
        name: np.hstack([RANDOM.integers(0, 10, (7, 1), np.uint8), RANDOM.integers(0, 256, (7, 3072), np.uint8)])
        for name in names
    }


@pytest.mark.parametrize("packed", [True, False])
def test_cifar10_binary_version_raw(tmp_path: Path, packed: bool) -> None:
    files = cifar10_files()
    if packed:
        source = write_tar(
            tmp_path / "cifar-10-binary.tar.gz",
            [(f"cifar-10-batches-bin/{name}", records.tobytes()) for name, records in files.items()],
            mode="w:gz",
        )
    else:
        source = tmp_path / "cifar-10-batches-bin"
        source.mkdir()
        for name, records in files.items():
            (source / name).write_bytes(records.tobytes())
    assert convert("cifar10", "--source", source, "--out", tmp_path / "out", "--format", "raw") == 0
    split = Split(tmp_path / "out", "train")
    assert split.manifest.encoding == "raw"
    assert split.manifest.class_names[:3] == ("airplane", "automobile", "bird")
    assert set(split.rows["height"]) == set(split.rows["width"]) == {32}
    for name, records in files.items():
        found = stored(tmp_path / "out", "validation" if name == "test_batch.bin" else "train")
        for record in records:
            pixels = record[1:].reshape(3, 32, 32).transpose(1, 2, 0)
            assert found[pixels.tobytes()] == record[0]


def test_cifar10_as_a_tree_of_images(tmp_path: Path) -> None:
    members = [
        (f"train/{name}/{n}.jpg", small_photograph(10 * c + n))
        for c, name in enumerate(("bird", "cat"))
        for n in range(3)
    ]
    members += [("test/cat/1.jpg", small_photograph(77)), ("test/README.txt", b"hello")]
    archive = write_tar(tmp_path / "tree.tar.gz", members, mode="w:gz")
    assert convert("cifar10", "--source", archive, "--out", tmp_path / "out") == 0
    assert stored(tmp_path / "out", "train") == {small_photograph(10 * c + n): c for c in range(2) for n in range(3)}
    assert stored(tmp_path / "out", "validation") == {small_photograph(77): 1}


def test_cifar10_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message(source: Path) -> str:
        assert convert("cifar10", "--source", source, "--out", tmp_path / "out") == 2
        return capsys.readouterr().err

    pickles = write_tar(tmp_path / "python.tar.gz", [("cifar-10-batches-py/data_batch_1", b"\x80\x02")], mode="w:gz")
    error = message(pickles)
    assert (
        "CIFAR-10's Python version is made of pickles" in error
        and "use the binary version, cifar-10-binary.tar.gz" in error
    )
    files = {name: records.tobytes() for name, records in cifar10_files().items()}
    cut = write_tar(tmp_path / "cut.tar", [*files.items(), ("test_batch.bin", bytes(3073 + 5))])
    assert "which is not a multiple of the record size 3073" in message(cut)
    label = write_tar(tmp_path / "label.tar", [("test_batch.bin", bytes(3073) + b"\x0b" + bytes(3072))])
    assert "at byte 3073: label 11, expected 0 to 9" in message(label)
    part = write_tar(tmp_path / "part.tar", [("data_batch_1.bin", bytes(3073))])
    assert "part.tar: data_batch_2.bin is missing" in message(part)
    assert "expected image files in train/CLASS/ or test/CLASS/" in message(
        write_tar(tmp_path / "empty.tar", [("a.txt", b"")])
    )
    assert "nowhere: cannot be opened (No such file" in message(tmp_path / "nowhere")


@pytest.mark.parametrize(("dataset", "packed"), [("mnist", True), ("fashion-mnist", False)])
def test_mnist(tmp_path: Path, dataset: str, packed: bool) -> None:
    content = write_mnist(tmp_path / "source", packed=packed)
    assert convert(dataset, "--source", tmp_path / "source", "--out", tmp_path / "out") == 0
    for name, (images, labels) in content.items():
        split = Split(tmp_path / "out", name)
        assert split.manifest.class_names[0] == ("0" if dataset == "mnist" else "T-shirt/top")
        found = []
        for image in range(len(split)):
            picture = Image.open(io.BytesIO(stored_image(MappedFiles(split), image).tobytes()))
            assert (picture.mode, picture.size) == ("L", (28, 28))
            # Each stored image is nearest to the one it came from, of the right label.
            original = int(np.abs(images.astype(float) - np.asarray(picture, float)).mean(axis=(1, 2)).argmin())
            assert labels[original] == split.rows[image]["label"]
            found.append(original)
        assert sorted(found) == list(range(len(images)))


def test_mnist_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    write_mnist(source, packed=False)

    def message() -> str:
        assert convert("mnist", "--source", source, "--out", tmp_path / "out") == 2
        return capsys.readouterr().err

    labels = source / "train-labels-idx1-ubyte"
    good = labels.read_bytes()
    labels.write_bytes(good[:-1])
    assert "20 bytes expected, there are 19" in message()
    labels.write_bytes(good + b"0")
    assert "20 bytes expected, there are more" in message()
    labels.write_bytes(idx(np.zeros(19, np.uint8)))
    assert "has 20 images" in message()
    labels.write_bytes(idx(np.full(20, 10, np.uint8)))
    assert "label 10, expected 0 to 9" in message()
    labels.write_bytes(b"\0\0\x08\x03" + good[4:])
    assert "not such an idx file" in message()
    labels.unlink()
    assert "train-images-idx3-ubyte is there, but not the labels that belong to it" in message()
    (source / "train-images-idx3-ubyte").write_bytes(bytes((0, 0, 8, 3)) + struct.pack(">3I", 1 << 31, 28, 28))
    labels.write_bytes(good)
    assert "over 1,073,741,824 are refused" in message()
    for path in source.iterdir():
        path.unlink()
    assert "has none of train-images-idx3-ubyte" in message()
    assert convert("mnist", "--out", tmp_path / "out") == 2
    assert "name the published files with --source, or let --download fetch them" in capsys.readouterr().err


def test_digits_hold_out_the_last_writers(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    assert convert("digits", "--out", tmp_path / "out") == 0
    scans, labels = load_digits(return_X_y=True)
    for name, part in (("train", slice(0, 1437)), ("validation", slice(1437, None))):
        split = Split(tmp_path / "out", name)
        assert np.bincount(split.rows["label"]).tolist() == np.bincount(labels[part]).tolist()
        assert set(split.rows["height"]) == {32}
        picture = Image.open(io.BytesIO(stored_image(MappedFiles(split), 0).tobytes()))
        assert picture.mode == "RGB"
        small = np.asarray(picture.convert("L").resize((8, 8), Image.Resampling.BOX), float) / 255 * 16
        nearest = int(np.abs(scans[part] - small.reshape(64)).mean(axis=1).argmin())
        assert labels[part][nearest] == split.rows[0]["label"]
    assert len(Split(tmp_path / "out", "train").paths) == 4


def test_folder_with_its_own_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    train = write_folder(tmp_path / "train", {"b": 3, "a": 2})
    validation = write_folder(tmp_path / "validation", {"b": 2}, first_seed=50)
    (train / "a" / "Thumbs.db").write_bytes(b"junk")
    (train / "a" / "deep").mkdir()
    (train / "a" / "deep" / "x.JPEG").write_bytes(small_photograph(99))
    assert convert("folder", "--train", train, "--validation", validation, "--out", tmp_path / "out") == 0
    assert f"{train}: 1 file passed over: 1 .db (a)" in caplog.text
    assert stored(tmp_path / "out", "validation") == {small_photograph(50): 1, small_photograph(51): 1}
    assert stored(tmp_path / "out", "train")[small_photograph(99)] == 0
    assert Split(tmp_path / "out", "train").manifest.class_names == ("a", "b")

    (train / "stray.jpg").write_bytes(small_photograph(1))
    assert convert("folder", "--train", train, "--out", tmp_path / "other") == 2
    assert "stray.jpg: an image outside of a class folder: expected CLASS/stray.jpg" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert convert("folder", "--train", tmp_path / "none", "--out", tmp_path / "other") == 2
    assert "the train split has no images: expected files such as CLASS/name.jpg" in capsys.readouterr().err
    assert convert("folder", "--out", tmp_path / "other") == 2
    assert "nothing to convert: give --train DIR, --validation DIR, or both" in capsys.readouterr().err


def test_shrunken_and_raw_together(tmp_path: Path) -> None:
    """Raw pixels need no common size: every row has its own."""
    train = write_folder(tmp_path / "train", {"a": 5, "b": 5})
    assert convert("folder", "--train", train, "--out", tmp_path / "out", "--format", "raw", "--short-side", 24) == 0
    rows = Split(tmp_path / "out", "train").rows
    assert set(np.minimum(rows["height"], rows["width"])) == {24}
    assert np.array_equal(rows["size"], rows["height"].astype(int) * rows["width"] * 3)
