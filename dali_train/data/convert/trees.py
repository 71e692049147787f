"""Image files in one folder per class, in a directory or a tar archive."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath

import numpy as np

from dali_train.data.convert.sources import (
    Container,
    Image,
    ImageFiles,
    Images,
    SourceError,
    Sources,
    hold_out,
    open_container,
    printable,
)
from dali_train.data.dataset.image_file import IMAGE_SUFFIXES
from dali_train.data.dataset.manifest import SPLITS, SplitName
from dali_train.text import plural, shortened

_SPLIT_FOLDERS: dict[str, SplitName] = {
    "train": "train",
    "test": "validation",
    "val": "validation",
    "validation": "validation",
}
_MOST_NAMED = 5  # classes in a message
_MOST_LETTERS = 100  # of a name in a message
_log = logging.getLogger(__name__)


def folders(train: Path | None, validation: Path | None, *, validation_fraction: float | None, seed: int) -> Sources:
    """Return the splits and the class names: the subfolders of `train` (or of `validation`, if it comes alone), sorted.

    A `train` that holds ``train`` and one of ``val``, ``validation`` and ``test`` instead of classes gives both splits.
    With `validation_fraction`, that part of each class of `train` becomes the validation split, chosen by `seed`.

    Raises:
        SourceError: no class folders, or classes that lie a folder deeper, a class that only `validation` has, or
            nothing that can be divided.
    """
    paths: dict[SplitName, Path | None] = {"train": train, "validation": validation}
    if train is None and validation is None:
        raise SourceError("nothing to convert: give --train DIR, --validation DIR, or both")
    listed = {
        split: _list_images(open_container(path), _top_folder) for split, path in paths.items() if path is not None
    }
    splits_within = _splits_among(listed["train"].classes) if "train" in listed else []
    if train is not None and splits_within:
        if (
            validation is None
            and validation_fraction is None
            and len(splits_within) == len(listed["train"].classes) == 2
        ):
            return split_folders(train)
        raise SourceError(
            f"{train} holds {', '.join(splits_within)}, which are splits and not classes: give --train {train}/train "
            f"and --validation with the folder of the other split, of an archive once it is unpacked"
        )
    for listing in listed.values():
        if len(listing.classes) == 1 and len(listing.deeper) > 1:
            name = shortened(printable(listing.classes[0]), _MOST_LETTERS)
            raise SourceError(
                f"{listing.path} has one class folder, {name}, and all images in {len(listing.deeper):,} folders below "
                f"it: if these are the classes, name {name} instead (of an archive once it is unpacked)"
            )
    sources, names = _with_common_labels(listed)
    return hold_out(sources, validation_fraction, seed=seed), names


def split_folders(path: Path) -> Sources:
    """As `folders`, for one tree with the class folders in ``train`` and in ``test``, ``val`` or ``validation``."""
    container = open_container(path)
    listed: dict[SplitName, _Listing] = {}
    for split in SPLITS:
        listing = _list_images(container, partial(_class_in_split, split=split))
        if listing.classes or listing.skipped:
            listed[split] = listing
    if not any(listing.classes for listing in listed.values()):
        raise SourceError(f"{path}: expected image files in train/CLASS/ or test/CLASS/")
    return _with_common_labels(listed)


@dataclass(frozen=True)
class _Listing:
    """The images of a split, and what else is in its class folders."""

    path: Path
    images: Images
    classes: list[str]  # that have images, as they appear: labels are places in this list
    skipped: dict[str, Counter[str]]  # class -> suffix -> files that are no images; of an empty folder none
    deeper: set[tuple[str, ...]]  # the folders below class folders, if all images lie in such

    @cached_property
    def empty(self) -> dict[str, Counter[str]]:
        """The class folders without images."""
        classes = set(self.classes)
        return {name: suffixes for name, suffixes in self.skipped.items() if name not in classes}


def _list_images(container: Container, class_of: Callable[[tuple[str, ...]], str | None]) -> _Listing:
    """List the files in the class folders; `class_of` returns the class of a name by its parts, None if it has none."""
    numbers: dict[str, int] = {}
    skipped: dict[str, Counter[str]] = {}
    deeper: set[tuple[str, ...]] = set()

    def images() -> Iterator[Image]:
        for entry in container.list(folders=True):
            path = PurePosixPath(entry.name)
            is_folder, suffix = entry.name.endswith("/"), path.suffix.lower()
            if suffix in IMAGE_SUFFIXES and not is_folder:
                name = class_of(path.parts)
                if name is not None:
                    deeper.add(path.parts[:-1][:2])
                    yield entry._replace(label=numbers.setdefault(name, len(numbers)))
            elif len(path.parts) > (not is_folder):
                # A folder belongs to the class that a file in it would have.
                name = class_of((*path.parts, "")) if is_folder else class_of(path.parts)
                if name is not None:
                    skipped.setdefault(name, Counter()).update([] if is_folder else [suffix])

    listed = Images(ImageFiles(images, container.read), container.path)
    if any(len(folder) < 2 for folder in deeper):
        deeper.clear()
    return _Listing(container.path, listed, list(numbers), skipped, deeper)


def _described(skipped: Mapping[str, Counter[str]]) -> str:
    """Return ``owl (12 .heic, 1 .txt), wren (empty)``."""
    texts = []
    for name, suffixes in list(skipped.items())[:_MOST_NAMED]:
        counts = [
            f"{count:,} {shortened(printable(suffix), 20) or 'without suffix'}"
            for suffix, count in suffixes.most_common(3)
        ]
        others = sum(suffixes.values()) - sum(count for _, count in suffixes.most_common(3))
        counts += [f"{others:,} other"] if others else []
        texts.append(f"{shortened(printable(name), _MOST_LETTERS)} ({', '.join(counts) or 'empty'})")
    return ", ".join([*texts, *([f"and {len(skipped) - _MOST_NAMED} more"] if len(skipped) > _MOST_NAMED else [])])


def _top_folder(parts: tuple[str, ...]) -> str:
    if len(parts) < 2:
        name = shortened(printable(parts[0]), _MOST_LETTERS)
        raise SourceError(f"{name}: an image outside of a class folder: expected CLASS/{name}")
    return parts[0]


def _splits_among(classes: Sequence[str]) -> list[str]:
    """Those of the class folders that are really the folders of splits. "train" alone may be a class beside "bus"."""
    splits = sorted(set(classes) & set(_SPLIT_FOLDERS))
    return splits if "train" in splits and (len(splits) > 1 or len(classes) == 1) else []


def _class_in_split(parts: tuple[str, ...], split: SplitName) -> str | None:
    """`parts` are those of e.g. cifar10/train/bird/0338.jpg."""
    for number, part in enumerate(parts[:-2]):
        if part in _SPLIT_FOLDERS:
            return parts[number + 1] if _SPLIT_FOLDERS[part] == split else None
    return None


def _with_common_labels(listed: Mapping[SplitName, _Listing]) -> Sources:
    """Number the classes of all splits by their sorted names."""
    first = next(iter(listed))
    names = sorted(listed[first].classes)
    for split, listing in listed.items():
        if split == first and names and listing.empty:
            raise SourceError(
                f"{listing.path}: {plural(len(listing.empty), 'class folder')} without images: "
                f"{_described(listing.empty)}: convert what are images to JPEG or PNG, or move the folder away"
            )
        if not listing.classes:
            there = f", but {_described(listing.skipped)}" if listing.skipped else ""
            raise SourceError(
                f"the {split} split has no images: expected files such as CLASS/name.jpg in {listing.path}{there}"
            )
        skipped = {name: suffixes for name, suffixes in listing.skipped.items() if suffixes or name in listing.empty}
        if skipped:
            _log.warning(
                "%s: %s skipped, whose suffix is not an image's: %s",
                listing.path,
                plural(sum(map(Counter.total, skipped.values())), "file"),
                _described(skipped),
            )
        unknown = sorted(set(listing.classes) - set(names))
        if unknown:
            raise SourceError(
                f"{split} has the class {shortened(printable(unknown[0]), _MOST_LETTERS)!r}, {first} has not "
                f"({len(unknown)} such classes): the class folders must agree"
            )
        number_of = {name: number for number, name in enumerate(names)}
        listing.images.labels = np.array([number_of[name] for name in listing.classes], np.int32)[listing.images.labels]
    texts = [printable(name) for name in names]
    if len(set(texts)) < len(texts):
        raise SourceError("two class folders have names that differ only in bytes that are not UTF-8: rename one")
    return {split: listing.images for split, listing in listed.items()}, texts
