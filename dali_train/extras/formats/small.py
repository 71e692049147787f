"""Small datasets as they are published, read into memory: CIFAR-10, MNIST, Fashion-MNIST, scikit-learn's digits."""

import gzip
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dali_train.data.convert.archives import FilesByName, open_container
from dali_train.data.convert.sources import Images, PixelSource, SourceError, Sources
from dali_train.data.dataset.manifest import SPLITS, SplitName
from dali_train.data.dataset.packed_files import GZIP, how_packed, not_a_directory
from dali_train.extras.formats.trees import split_folders

DIGITS_SIDE = 32
# The official label order, https://www.cs.toronto.edu/~kriz/cifar.html, which is also that of the sorted names.
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# The order of https://github.com/zalandoresearch/fashion-mnist#labels
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
DIGIT_CLASSES = tuple("0123456789")

_CIFAR10_FILES: dict[SplitName, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "validation": ("test_batch.bin",),
}
_CIFAR10_PICKLES = frozenset(("data_batch_1", "test_batch", "batches.meta"))
_CIFAR10_SHAPE = (3, 32, 32)  # a record is one byte of label, then the planes of red, green and blue
_IDX_PREFIXES: dict[SplitName, str] = {"train": "train", "validation": "t10k"}
_MAX_IDX_BYTES = 1 << 30


def cifar10(path: Path) -> Sources:
    """CIFAR-10 from its binary version, as archive or directory, or from a tree ``train/CLASS``, ``test/CLASS`` of
    images.

    Raises:
        SourceError: neither; or the Python version, which is not read.
    """
    archive = path / "cifar-10-binary.tar.gz"
    container = open_container(archive if archive.is_file() else path)
    files = FilesByName(container)
    if not any(name in files for names in _CIFAR10_FILES.values() for name in names):
        if _CIFAR10_PICKLES & set(files):
            raise SourceError(
                f"{path}: CIFAR-10's Python version is made of pickles, which can run code when they are read, and "
                "is not read: use the binary version, cifar-10-binary.tar.gz, which --download fetches"
            )
        return split_folders(path)
    sources: dict[SplitName, Images] = {}
    for split, names in _CIFAR10_FILES.items():
        if not any(name in files for name in names):
            continue
        parts = [_cifar10_records(container.read(files[name]), files[name].location) for name in names]
        records = np.concatenate(parts)
        pixels = np.ascontiguousarray(records[:, 1:].reshape(-1, *_CIFAR10_SHAPE).transpose(0, 2, 3, 1))
        sources[split] = PixelSource(pixels, records[:, 0].astype(np.int32), title=f"cifar10_{split}").images()
    return sources, CIFAR10_CLASSES


def _cifar10_records(content: bytes, location: str) -> NDArray[np.uint8]:
    size = 1 + int(np.prod(_CIFAR10_SHAPE))
    if not content or len(content) % size:
        raise SourceError(
            f"{location}: has {len(content)} bytes, which is not a multiple of the record size {size}: truncated, or "
            "not CIFAR-10's"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    wrong = np.flatnonzero(records[:, 0] >= len(CIFAR10_CLASSES))
    if len(wrong):
        raise SourceError(f"{location}: at byte {wrong[0] * size}: label {records[wrong[0], 0]}, expected 0 to 9")
    return records


def mnist(directory: Path) -> Sources:
    """MNIST: see `_read_mnist`."""
    return _read_mnist(directory, class_names=DIGIT_CLASSES, title="mnist")


def fashion_mnist(directory: Path) -> Sources:
    """Fashion-MNIST: see `_read_mnist`."""
    return _read_mnist(directory, class_names=FASHION_CLASSES, title="fashion-mnist")


def _read_mnist(directory: Path, *, class_names: Sequence[str], title: str) -> Sources:
    """MNIST, or what has its format: the four idx files, gzipped or not; the two of one split are enough.

    The format is described at the end of http://yann.lecun.com/exdb/mnist/.

    Raises:
        SourceError: files that are missing or are not what they should be.
    """
    if not directory.is_dir():
        raise SourceError(
            f"{directory}: {not_a_directory(directory)}; it should hold train-images-idx3-ubyte.gz and the like"
        )
    sources: dict[SplitName, Images] = {}
    for split in SPLITS:
        images, labels = (_idx_file(directory, _IDX_PREFIXES[split], kind) for kind in ("images-idx3", "labels-idx1"))
        if images is None and labels is None:
            continue
        if images is None or labels is None:
            lost = "images" if images is None else "labels"
            raise SourceError(f"{directory}: {images or labels} is there, but not the {lost} that belong to it")
        pixels, numbers = _read_idx(images, dimensions=3), _read_idx(labels, dimensions=1)
        if len(pixels) != len(numbers):
            raise SourceError(
                f"{images} has {len(pixels)} images, {labels} {len(numbers)} labels: their lengths must match"
            )
        if len(numbers) and numbers.max() >= len(class_names):
            raise SourceError(f"{labels}: label {numbers.max()}, expected 0 to {len(class_names) - 1}")
        sources[split] = PixelSource(pixels, numbers.astype(np.int32), title=f"{title}_{split}").images()
    if not sources:
        raise SourceError(
            f"{directory}: has none of train-images-idx3-ubyte, t10k-images-idx3-ubyte (or .gz): --download fetches "
            "them"
        )
    return sources, class_names


def _idx_file(directory: Path, prefix: str, kind: str) -> Path | None:
    # Some copies have a dot where the official names have a dash.
    names = [
        f"{prefix}-{spelling}-ubyte{suffix}"
        for spelling in (kind, kind.replace("-idx", ".idx"))
        for suffix in ("", ".gz")
    ]
    return next((directory / name for name in names if (directory / name).is_file()), None)


def _read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Read an array of unsigned bytes: magic number 0, 0, 8, dimensions; the sizes as big-endian uint32; the data."""
    try:
        with path.open("rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if raw.peek(2).startswith(GZIP) else raw
            header = file.read(4 + 4 * dimensions)
            if len(header) < 4 + 4 * dimensions or header[:4] != bytes((0, 0, 8, dimensions)):
                begins = f"begins with {header[:4]!r}, expected {bytes((0, 0, 8, dimensions))!r}: not such an idx file"
                raise SourceError(f"{path}: {how_packed(path, header) or begins}")
            shape = struct.unpack(f">{dimensions}I", header[4:])
            size = int(np.prod([int(side) for side in shape], dtype=object))
            if size > _MAX_IDX_BYTES:
                raise SourceError(
                    f"{path}: says it holds {' x '.join(map(str, shape))} bytes: over {_MAX_IDX_BYTES:,} are refused"
                )
            content = file.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(f"{path}: damaged or truncated ({error}): fetch it again") from error
    if len(content) != size:
        raise SourceError(
            f"{path}: {' x '.join(map(str, shape))} bytes expected, there are "
            f"{'more' if len(content) > size else len(content)}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def digits() -> Sources:
    """scikit-learn's 1,797 scans of handwritten digits, enlarged from 8 x 8 to 32 x 32 pixels, and the class names.

    The file is ordered by writer. Its last fifth is the validation split, so training never sees those writers:
    a harder test than a random split.
    """
    from sklearn.datasets import load_digits  # takes a second

    scans, labels = load_digits(return_X_y=True)  # (1797, 64) with values 0 to 16
    small = np.rint(scans.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    size = (DIGITS_SIDE, DIGITS_SIDE)
    grey = np.stack([np.asarray(Image.fromarray(scan).resize(size, Image.Resampling.BICUBIC)) for scan in small])
    pixels = np.repeat(grey[..., None], 3, axis=-1)
    num_train = len(pixels) * 4 // 5
    parts: dict[SplitName, slice] = {"train": slice(0, num_train), "validation": slice(num_train, None)}
    sources: dict[SplitName, Images] = {
        split: PixelSource(pixels[part], labels[part].astype(np.int32), title="digits", first=part.start).images()
        for split, part in parts.items()
    }
    return sources, DIGIT_CLASSES
