"""Image files, archives and datasets for the tests of the data rooms."""

import gzip
import importlib.util
import io
import json
import struct
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import scipy.io

from dali_train.data.dataset.tfrecord import parse_example, walk_records
from tests.conftest import REPOSITORY, jpeg, photograph

SYNSETS = ("n01440764", "n01443537", "n02084071", "n02121808", "n03001627")
# ILSVRC ids count in no order that anybody else uses; synsets with children have ids beyond those of the leaves.
ID_OF_SYNSET = dict(zip(SYNSETS, (3, 5, 1, 4, 2), strict=True))
PARENTS = {"n00001740": 6, "n00015388": 7}


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"


def small_photograph(seed: int) -> bytes:
    """A JPEG of some 40 x 50 pixels, another one for every seed."""
    return jpeg(photograph(seed, 32 + 2 * (seed % 9), 60 - 2 * (seed % 11)))


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], *, mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members, mode=mode))
    return path


def tar_bytes(members: Iterable[tuple[str, bytes]], *, mode: str = "w") -> bytes:
    """A tar archive of (name, content)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def write_mds(
    directory: Path, columns: Mapping[str, tuple[str, int | None]], samples: Sequence[Sequence[bytes]], shards: int = 1
) -> None:
    """As Streaming's MDSWriter writes samples, each with the bytes of each column, of which the encoding and the size
    are given."""
    directory.mkdir(parents=True)
    index = []
    for number in range(shards):
        part = samples[number * len(samples) // shards : (number + 1) * len(samples) // shards]
        stored = []
        for values in part:
            sizes = [len(value) for value, (_, size) in zip(values, columns.values(), strict=True) if size is None]
            stored.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values))
        begins = np.cumsum([4 * (len(part) + 2), *map(len, stored)]).astype("<u4")
        content = struct.pack("<I", len(part)) + begins.tobytes() + b"".join(stored)
        name = f"shard.{number:05d}.mds"
        (directory / name).write_bytes(content)
        index.append(
            {
                "version": 2,
                "format": "mds",
                "samples": len(part),
                "column_names": [*columns],
                "column_encodings": [encoding for encoding, _ in columns.values()],
                "column_sizes": [size for _, size in columns.values()],
                "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
                "zip_data": None,
                "compression": None,
                "hashes": [],
                "size_limit": 1 << 26,
            }
        )
    (directory / "index.json").write_text(json.dumps({"version": 2, "shards": index}))


def write_training_archive(
    path: Path, *, num_images: int = 4, synsets: Iterable[str] = SYNSETS, first_seed: int = 0
) -> Path:
    """ImageNet's layout: a tar of a tar a synset. `num_images` each, in an order that is not sorted."""
    seed = first_seed
    members = []
    for synset in sorted(synsets, reverse=True):
        images = [(f"{synset}_{n}.JPEG", small_photograph(seed + n)) for n in range(num_images)]
        members.append((f"{synset}.tar", tar_bytes(images)))
        seed += num_images
    return write_tar(path, members)


def write_folder(root: Path, classes: Mapping[str, int], *, first_seed: int = 0) -> Path:
    """``root/CLASS/NUMBER.jpg``, with this number of images of each class."""
    seed = first_seed
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number:03d}.jpg").write_bytes(small_photograph(seed))
            seed += 1
    return root


def files_of(root: Path) -> dict[str, bytes]:
    """Every file below `root` with its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def write_devkit(path: Path, validation_synsets: list[str], *, truth: bytes | None = None) -> Path:
    """``ILSVRC2012_devkit_t12.tar.gz`` with the parts that a converter needs, as MATLAB writes them."""
    fields = [
        ("ILSVRC2012_ID", "O"),
        ("WNID", "O"),
        ("words", "O"),
        ("gloss", "O"),
        ("num_children", "O"),
        ("children", "O"),
    ]
    rows = sorted((number, synset, 0) for synset, number in ID_OF_SYNSET.items())
    rows += [(number, synset, 2) for synset, number in PARENTS.items()]
    table = np.zeros((len(rows), 1), dtype=fields)
    for place, (number, synset, children) in enumerate(rows):
        table[place, 0] = (
            float(number),
            synset,
            f"words of {synset}",
            "a gloss",
            float(children),
            np.arange(children, dtype=float),
        )
    meta = io.BytesIO()
    scipy.io.savemat(meta, {"synsets": table}, do_compression=True)
    if truth is None:
        truth = "".join(f"{ID_OF_SYNSET[synset]}\n" for synset in validation_synsets).encode()
    root = "ILSVRC2012_devkit_t12"
    members = [
        (f"{root}/readme.txt", b"hello"),
        (f"{root}/data/meta.mat", meta.getvalue()),
        (f"{root}/data/ILSVRC2012_validation_ground_truth.txt", truth),
    ]
    return write_tar(path, members, mode="w:gz")


def write_validation_archive(path: Path, num_images: int) -> Path:
    """In an order that is not that of the numbers."""
    members = [(f"ILSVRC2012_val_{n:08d}.JPEG", small_photograph(1000 + n)) for n in range(num_images, 0, -1)]
    return write_tar(path, members)


def records(root: Path, split: str) -> dict[str, tuple[int, str, bytes]]:
    """image/filename -> (label as stored, synset, image)."""
    found = {}
    for path in sorted((root / split).iterdir()):
        content = memoryview(path.read_bytes())
        for record in walk_records(content, path, check_payload=True):
            features = parse_example(content, record, path)
            text = {
                name: bytes(content[slice(*features[name].spans[0])])
                for name in ("image/filename", "image/class/synset", "image/encoded")
            }
            (label,) = features["image/class/label"].integers
            found[text["image/filename"].decode()] = (label, text["image/class/synset"].decode(), text["image/encoded"])
    return found


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(
    directory: Path, *, packed: bool, num_train: int = 20, num_test: int = 6
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    directory.mkdir()
    random = np.random.default_rng(0)
    content = {}
    for prefix, split, count in (("train", "train", num_train), ("t10k", "validation", num_test)):
        images, labels = (
            random.integers(0, 256, (count, 28, 28), np.uint8),
            random.integers(0, 10, count).astype(np.uint8),
        )
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            name = f"{prefix}-{kind}-ubyte"
            if packed:
                (directory / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (directory / name).write_bytes(idx(array))
        content[split] = images, labels
    return content


def convert(*words: object) -> int:
    """The status of ``make_tfrecords`` with these words."""
    return tool("make_tfrecords").main([str(word) for word in words])


def tool(name: str) -> ModuleType:
    """A file of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
