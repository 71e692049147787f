"""Labels as tables, class folders, WebDataset, Parquet and MDS have them: a number, a name, or several of these.

A listing has one number for each image. Where an image has a list of classes, it is that of a set of classes: each
different set is kept once, and the index's labels number the sets (`Manifest.label_sets`). A name stands for a set of
one class until all names are known, which decide the order of the classes.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from dali_train.data.convert.sources import Images, SourceError
from dali_train.data.dataset.manifest import (
    SETS_OF_CLASSES,
    SplitName,
    check_spellings,
    number_classes,
    order_classes,
    read_class_names,
)
from dali_train.extras.formats.listing import checked_label
from dali_train.text import shortened

_log = logging.getLogger(__name__)
_FIRST = -2  # of the labels that stand for a set until all are known; -1: unknown
_LONGEST_NAME = 200  # letters; what is longer is a caption
FEW = 10  # images, each of which may have a label of its own


class LabelSets:
    """The sets of classes of one source, in the order in which they are first seen."""

    def __init__(self, class_names: Path | None = None) -> None:
        """Args: class_names: a file with the names of the classes, see `number_classes`."""
        self._class_names = class_names
        self._numbers: dict[tuple[int | str, ...], int] = {}
        self._has_lists = False
        self._kind: type[int] | type[str] | None = None  # of all classes

    @property
    def largest(self) -> int:
        """The most classes in any set."""
        return max(map(len, self._numbers), default=0)

    def label(self, value: object, location: str) -> int:
        """Return the label of an image in a listing: a class's number itself, or what stands for a name or a list.

        Raises:
            SourceError: it is none of them, or a name where others are numbers.
        """
        if isinstance(value, list):
            self._has_lists = True
            return _FIRST - self._number(self._class(one, location) for one in value)
        one = self._class(value, location)
        return one if isinstance(one, int) else _FIRST - self._number([one])

    def stored_label(self, value: object, location: str) -> int:
        """Return `label` of a value as it is in a file, and not put together from several, of which two may name one
        class (boxes, copies in class folders).

        Raises:
            SourceError: also, a list with a class twice.
        """
        label = self.label(value, location)
        if isinstance(value, list) and len({*value}) < len(value):
            raise SourceError(f"{location}: its label is {shortened(str(value), 60)}, {_repeated(value)}")
        return label

    def _class(self, value: object, location: str) -> int | str:
        is_name = isinstance(value, str) and value.isprintable() and 0 < len(value) <= _LONGEST_NAME
        one = str(value) if is_name else checked_label(value, location)
        self._kind = self._kind or type(one)
        if type(one) is not self._kind:
            others = "names" if self._kind is str else "numbers"
            raise SourceError(f"{location}: its label is {one!r}, and those before are {others}: write all alike")
        return one

    def _number(self, classes: Iterable[int | str]) -> int:
        return self._numbers.setdefault(tuple(sorted({*classes})), len(self._numbers))

    def resolve(self, splits: Mapping[SplitName, Images]) -> list[str]:
        """Number the classes and the sets in `splits` from 0, if any image has a name or a list; a list of one class
        and this class alone are one set. Return the names of the classes, in their order; none if they are numbers.

        Raises:
            SourceError: no image has any class, or each has another name.
            DatasetError: see `number_classes` and `check_spellings`.
        """
        if not self._numbers:
            return []
        numbered = {}
        for split, images in splits.items():
            labels = images.labels.tolist()
            numbered[split] = [_FIRST - label if label <= _FIRST else self._number([label]) for label in labels]
        if not any(self._numbers):
            raise SourceError("no image has any label: name the right column or field with --label-key")
        names, number_of = self._numbered_names(sum(map(len, numbered.values())))
        label_sets = [
            tuple(sorted(one if isinstance(one, int) else number_of[one] for one in classes))
            for classes in self._numbers
        ]
        for split, numbers in numbered.items():
            if self._has_lists:
                splits[split].relabel(np.array(numbers, dtype=np.int32), SETS_OF_CLASSES.load()(label_sets))
            else:
                splits[split].labels = np.array([label_sets[number][0] for number in numbers], dtype=np.int32)
        return names

    def _numbered_names(self, num_images: int) -> tuple[list[str], Mapping[str, int]]:
        """Return the names of the classes in their order, and the number of each."""
        found = {one for classes in self._numbers for one in classes if isinstance(one, str)}
        if not found:
            return [], {}
        if self._class_names is not None:
            names = read_class_names(self._class_names)
            return names, number_classes(found, names, self._class_names)
        if not self._has_lists and FEW <= num_images == len(found):
            raise SourceError(
                f"each of the {num_images:,} images has a label of its own, such as {shortened(min(found), 60)}: name "
                "another --label-key"
            )
        check_spellings(found)
        names = order_names(found)
        return names, {name: number for number, name in enumerate(names)}


def order_names(names: Collection[str]) -> list[str]:
    """Return the names of classes in the order of their labels: sorted, whole numbers by their value."""
    warn_of_spellings(names)
    return order_classes(names, "natural" if all(name.isdecimal() for name in names) else "name")


def warn_of_spellings(names: Iterable[str]) -> None:
    """Warn of two classes that may be one: ``Cat`` and ``cat``, ``01`` and ``1``."""
    alike: dict[str, str] = {}
    for name in sorted(names):
        other = alike.setdefault(str(int(name)) if name.isdecimal() else name.casefold(), name)
        if other != name:
            _log.warning("%r and %r are two classes: if they are one, write its labels in one way", other, name)
            break


def _repeated(classes: list[int | str]) -> str:
    """Return what is wrong with a list that has a class twice, and what to do."""
    twice = f"in which class {next(one for one in classes if classes.count(one) > 1)} is twice"
    if not {*classes} <= {0, 1}:
        return f"{twice}: write each class of the image once"
    instead = [number for number, has in enumerate(classes) if has]
    return (
        f"{twice}: it looks like a vector with a number for each class, and the numbers of the classes that the image "
        f"has are wanted: write {shortened(str(instead), 60)} instead"
    )
