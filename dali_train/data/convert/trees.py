"""Image files in one folder per class, in a directory or a tar archive."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from dali_train.data.convert.archive import Container, Member, SourceError, open_container, printable
from dali_train.data.convert.sources import ImageFiles, Sources, hold_out
from dali_train.data.dataset.found import IMAGE_SUFFIXES
from dali_train.data.dataset.manifest import SPLITS, SplitName

_SPLIT_FOLDERS: dict[str, SplitName] = {
    "train": "train",
    "test": "validation",
    "val": "validation",
    "validation": "validation",
}
_log = logging.getLogger(__name__)


def folders(train: Path | None, validation: Path | None, *, validation_fraction: float | None, seed: int) -> Sources:
    """Return the splits and the class names: the subfolders of `train` (or of `validation`, if it comes alone), sorted.

    A `train` that holds ``train`` and one of ``val``, ``validation`` and ``test`` instead of classes gives both splits.
    With `validation_fraction`, that part of each class of `train` becomes the validation split, chosen by `seed`.

    Raises:
        SourceError: no class folders, a class that only `validation` has, or nothing that can be divided.
    """
    paths: dict[SplitName, Path | None] = {"train": train, "validation": validation}
    if train is None and validation is None:
        raise SourceError("nothing to convert: give --train DIR, --validation DIR, or both")
    listed = {
        split: _list_images(open_container(path), _top_folder) for split, path in paths.items() if path is not None
    }
    splits_within = _splits_among(listed["train"][1]) if "train" in listed else []
    if train is not None and splits_within:
        if validation is None and validation_fraction is None and len(splits_within) == len(listed["train"][1]) == 2:
            return split_folders(train)
        raise SourceError(
            f"{train} holds {', '.join(splits_within)}, which are splits and not classes: give --train {train}/train "
            f"and --validation with the folder of the other split, of an archive once it is unpacked"
        )
    sources, names = _with_common_labels(listed)
    return hold_out(sources, validation_fraction, seed=seed), names


def split_folders(path: Path) -> Sources:
    """As `folders`, for one tree with the class folders in ``train`` and in ``test``, ``val`` or ``validation``."""
    container = open_container(path)
    listed: dict[SplitName, tuple[ImageFiles, list[str]]] = {}
    for split in SPLITS:
        files, names = _list_images(container, partial(_class_in_split, split=split))
        if len(files.labels):
            listed[split] = files, names
    if not listed:
        raise SourceError(f"{path}: expected image files in train/CLASS/ or test/CLASS/")
    return _with_common_labels(listed)


def _list_images(
    container: Container, class_of: Callable[[tuple[str, ...]], str | None]
) -> tuple[ImageFiles, list[str]]:
    """Return the images for which `class_of` (the parts of a name) gives a class, and the classes as they appear."""
    numbers: dict[str, int] = {}
    passed_over: list[str] = []

    def images() -> Iterator[tuple[Member, int]]:
        for member in container.members():
            path = PurePosixPath(member.name)
            if path.suffix.lower() not in IMAGE_SUFFIXES:
                passed_over.append(member.name)
                continue
            name = class_of(path.parts)
            if name is not None:
                yield member, numbers.setdefault(name, len(numbers))

    files = ImageFiles(container, images())
    if passed_over:
        _log.warning(
            "%s: %d files without an image's suffix are passed over, e.g. %s",
            container.path,
            len(passed_over),
            printable(passed_over[0]),
        )
    return files, list(numbers)


def _top_folder(parts: tuple[str, ...]) -> str:
    if len(parts) < 2:
        name = printable(parts[0])
        raise SourceError(f"{name}: an image outside of a class folder: expected CLASS/{name}")
    return parts[0]


def _splits_among(classes: Sequence[str]) -> list[str]:
    """Those of the class folders that are really the folders of splits. "train" alone may be a class beside "bus"."""
    found = sorted(set(classes) & set(_SPLIT_FOLDERS))
    return found if "train" in found and (len(found) > 1 or len(classes) == 1) else []


def _class_in_split(parts: tuple[str, ...], split: SplitName) -> str | None:
    """`parts` are those of e.g. cifar10/train/bird/0338.jpg."""
    for number, part in enumerate(parts[:-2]):
        if part in _SPLIT_FOLDERS:
            return parts[number + 1] if _SPLIT_FOLDERS[part] == split else None
    return None


def _with_common_labels(listed: dict[SplitName, tuple[ImageFiles, list[str]]]) -> Sources:
    """Number the classes of all splits by their sorted names."""
    first = next(iter(listed))
    names = sorted(listed[first][1])
    for split, (files, classes) in listed.items():
        if not classes:
            raise SourceError(f"the {split} split has no images: expected files such as CLASS/name.jpg")
        unknown = sorted(set(classes) - set(names))
        if unknown:
            raise SourceError(
                f"{split} has the class {printable(unknown[0])!r}, {first} has not ({len(unknown)} such classes): "
                "the class folders must agree"
            )
        files.labels = np.array([names.index(name) for name in classes], dtype=np.int32)[files.labels]
    texts = [printable(name) for name in names]
    if len(set(texts)) < len(texts):
        raise SourceError("two class folders have names that differ only in bytes that are not UTF-8: rename one")
    return {split: files for split, (files, _) in listed.items()}, texts
