"""Finding existing TFRecords in the supported layouts, and linking them into ours."""

import os
import re
from collections import defaultdict
from pathlib import Path

from dali_train.data.dataset.found import converter_for
from dali_train.data.dataset.manifest import SplitName
from dali_train.errors import DatasetError

# A split's folder, or the beginning of its files' names where all lie in one folder; the first that is there counts.
_NAMES: dict[SplitName, tuple[str, ...]] = {"train": ("train",), "validation": ("validation", "val")}
_NUMBERED_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?:\.tfrecords?)?$")


def find_splits(root: Path) -> dict[SplitName, list[Path]]:
    """Find the shards of each split in order, in ``ROOT/train`` and ``ROOT/validation`` or ``ROOT/val``, or as
    ``ROOT/train-*`` and ``ROOT/validation-*`` or ``ROOT/val-*``.

    Raises:
        DatasetError: no shards, the same split in two places, or `_in_order`'s errors.
    """
    if not root.is_dir():
        raise DatasetError(f"{root}: this directory does not exist")
    files = _files(root)
    splits: dict[SplitName, list[Path]] = {}
    for split, names in _NAMES.items():
        places: dict[str, list[Path]] = defaultdict(list)
        for name in names:
            if (root / name).is_dir():
                places[str(root / name)] = _files(root / name)
            places[str(root / f"{name}-*")] = [path for path in files if _is_flat_shard(path.name, name)]
        found = {place: paths for place, paths in places.items() if paths}
        # What an earlier run linked is there twice, and is the same.
        if len({frozenset(path.resolve() for path in paths) for paths in found.values()}) > 1:
            raise DatasetError(f"{root}: the {split} split is in {' and in '.join(found)}: keep one of them")
        if found:
            place, paths = next(iter(found.items()))
            splits[split] = _in_order(place, paths)
    if not splits:
        raise DatasetError(
            f"{root} has no shard: expected TFRecord files in {root}/train or {root}/validation, or as {root}/train-*; "
            f"{converter_for(root, indexing=True)}"
        )
    return splits


def link_shards(root: Path, shards: dict[SplitName, list[Path]]) -> None:
    """Make each shard appear as ``ROOT/SPLIT/NAME``: those elsewhere are linked.

    Raises:
        DatasetError: other files are in the way.
    """
    for split, paths in shards.items():
        directory = root / split
        if directory == paths[0].parent:
            continue
        names = {path.name for path in paths}
        unexpected = sorted({path.name for path in directory.iterdir()} - names) if directory.is_dir() else []
        if unexpected:
            raise DatasetError(
                f"{directory} holds {', '.join(unexpected[:5])}, which is not of this dataset: use an empty --out"
            )
        directory.mkdir(parents=True, exist_ok=True)
        for path in paths:
            link = directory / path.name
            if link.exists() and link.samefile(path):
                continue
            if link.exists() or link.is_symlink():
                raise DatasetError(f"{link} is there already and is not {path}: use an empty --out")
            # Within one directory tree the links survive a move of it.
            inside = path.absolute().is_relative_to(root.absolute())
            link.symlink_to(os.path.relpath(path.absolute(), directory.absolute()) if inside else path.resolve())


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))


def _is_flat_shard(file: str, prefix: str) -> bool:
    return file.startswith(f"{prefix}-") and bool(_NUMBERED_SHARD.search(file) or "tfrecord" in file)


def _in_order(place: str, files: list[Path]) -> list[Path]:
    """``SPLIT-00000-of-00042`` where such names exist, else every file in the order of the names.

    Raises:
        DatasetError: numbered shards of which some are missing, or of two different totals.
    """
    numbered = [(match, path) for path in files if (match := _NUMBERED_SHARD.search(path.name))]
    if not numbered:
        return files
    totals = {int(match[2]) for match, _ in numbered}
    if len(totals) > 1:
        raise DatasetError(f"{place} mixes shards of {' and '.join(map(str, sorted(totals)))}: keep one set of them")
    (total,) = totals
    missing = sorted(set(range(total)) - {int(match[1]) for match, _ in numbered})
    if missing:
        names = ", ".join(f"{number:05d}" for number in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise DatasetError(f"{place} lacks {len(missing)} of {total} shards: {names}")
    return [path for _, path in numbered]
