"""Recognising the content of a directory that is not a dataset yet, and the command that makes it one."""

import os
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_MOST_ENTRIES = 2000  # of a directory that are looked at
_TFRECORD = re.compile(r"tfrecord|-\d{5}-of-\d{5}(?!.*\.parquet$)", re.IGNORECASE)
_SPLIT_FOLDERS = ("train", "validation", "val", "test")


PUBLISHED: Mapping[str, Any] = {}
"""The table of `dali_train.data.convert.datasets`, which puts it here, since this layer cannot import it."""


def converter_for(root: Path, *, indexing: bool = False) -> str:
    """Return a sentence with the command that makes a dataset of the files in `root`, judged only by their names.

    Args:
        indexing: `data index` asks, which is not to be advised.
    """
    names = _names(root)
    below = {name: _names(root / name) for name in names[:50] if (root / name).is_dir()}
    shards = [name for name in names if _TFRECORD.search(name)]
    shards += [name for folder in _SPLIT_FOLDERS for name in below.get(folder, []) if _TFRECORD.search(name)]
    if shards or "idx_files" in names:  # as an indexing that was killed leaves it
        return "move its TFRecords there" if indexing else f"run `dali-train data index {root}` to index its TFRecords"
    for dataset, published in PUBLISHED.items():
        if published.files and any(re.match(published.files, name) for name in names):
            options = published.command.replace("ROOT", str(root))
            return f"it holds files of {dataset}: run `dali-train data convert {dataset} {options} --out DATASET`"
    archives = [name for name in names if name.endswith((".tar", ".tar.gz", ".tgz"))]
    if archives:
        return (
            f"it holds tar archives: run `dali-train data convert folder --train {root}/{archives[0]} --out DATASET` "
            f"if they hold CLASS/name.jpg, `dali-train data convert webdataset --source {root} --out DATASET` if they "
            "hold KEY.jpg and KEY.cls"
        )
    inner = [root / split / name for split in _SPLIT_FOLDERS for name in below.get(split, [])[:5]]
    found = (Path(name) for inside in [*below.values(), *map(_names, inner)] for name in inside)
    if any(path.suffix.lower() in IMAGE_SUFFIXES for path in found):
        return f"it holds folders of images: run `dali-train data convert folder --train {root} --out DATASET`"
    remedy = (
        "nothing in the directory looks like a dataset: `dali-train data convert --help` lists what can be converted"
    )
    return (
        remedy
        if indexing
        else (f"{remedy}, `dali-train data index {root}` takes TFRecords in {root}/train and {root}/validation")
    )


def _names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in islice(entries, _MOST_ENTRIES) if not entry.name.startswith("."))
    except OSError:
        return []
