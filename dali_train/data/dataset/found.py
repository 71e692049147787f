"""What lies in a directory that is not a dataset yet, and the command that makes one of it."""

import os
import re
from itertools import islice
from pathlib import Path

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_MOST_ENTRIES = 2000  # of a directory that are looked at
_TFRECORD = re.compile(r"tfrecord|-\d{5}-of-\d{5}", re.IGNORECASE)
_SPLIT_FOLDERS = ("train", "validation", "val", "test")


def converter_for(root: Path) -> str:
    """A sentence with the command that makes a dataset of what lies in `root`, judged by names alone."""
    names = _names(root)
    below = {name: _names(root / name) for name in names[:50] if (root / name).is_dir()}
    shards = [name for name in names if _TFRECORD.search(name)]
    shards += [name for folder in _SPLIT_FOLDERS for name in below.get(folder, []) if _TFRECORD.search(name)]
    if shards or "idx_files" in names:  # as an indexing that was killed leaves it
        return f"run `dali-train data index {root}` to index its TFRecords"
    if any(name.startswith("ILSVRC2012_img_") for name in names):
        return (
            "it holds ImageNet's archives: run `dali-train data convert imagenet --train-archive "
            f"{root}/ILSVRC2012_img_train.tar --validation-archive {root}/ILSVRC2012_img_val.tar --devkit "
            f"{root}/ILSVRC2012_devkit_t12.tar.gz --out DATASET`"
        )
    if any(name.startswith(("cifar-10-binary", "data_batch_")) for name in names):
        return f"it holds CIFAR-10: run `dali-train data convert cifar10 --source {root} --out DATASET`"
    if any(re.match(r"(train|t10k)-images[-.]idx3", name) for name in names):
        return f"it holds MNIST or Fashion-MNIST: run `dali-train data convert mnist --source {root} --out DATASET`"
    archives = [name for name in names if name.endswith((".tar", ".tar.gz", ".tgz"))]
    if archives:
        return (
            f"it holds tar archives: run `dali-train data convert folder --train {root}/{archives[0]} --out DATASET` "
            "if they hold CLASS/name.jpg"
        )
    folders = [
        name for name in _SPLIT_FOLDERS if any(_holds_images(root / name / inner) for inner in below.get(name, [])[:5])
    ]
    if folders or any(_is_image(name) for inner in below.values() for name in inner):
        return f"it holds folders of images: run `dali-train data convert folder --train {root} --out DATASET`"
    return (
        "nothing in the directory looks like a dataset: `dali-train data convert --help` lists what can be converted, "
        f"`dali-train data index {root}` takes TFRecords in {root}/train and {root}/validation"
    )


def _names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in islice(entries, _MOST_ENTRIES) if not entry.name.startswith("."))
    except OSError:
        return []


def _holds_images(directory: Path) -> bool:
    return any(_is_image(name) for name in _names(directory))


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in IMAGE_SUFFIXES
