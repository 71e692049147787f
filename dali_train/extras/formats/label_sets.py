"""Several labels an image, as tables, class folders, WebDataset, Parquet and MDS have them.

A listing has one number for each image. Where an image has a list of classes, it is that of a set of classes: each
different set is kept once, and the index's labels number the sets (`Manifest.label_sets`).
"""

from collections.abc import Iterable, Mapping

import numpy as np

from dali_train.data.convert.sources import Images, SourceError
from dali_train.data.dataset.manifest import SplitName
from dali_train.extras.formats.listing import checked_label
from dali_train.text import shortened

_FIRST = -2  # of the labels that stand for a set until all are known; -1: unknown


class LabelSets:
    """The sets of classes of one source, in the order in which they are first seen."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}

    @property
    def is_used(self) -> bool:
        return bool(self._numbers)

    @property
    def num_classes(self) -> int:
        """One more than the largest class in any set."""
        return 1 + max((max(classes, default=-1) for classes in self._numbers), default=-1)

    @property
    def largest(self) -> int:
        """The most classes in any set."""
        return max(map(len, self._numbers), default=0)

    def label(self, value: object, location: str) -> int:
        """Return the label of an image in a listing: a class itself, or what stands for a list of classes.

        Raises:
            SourceError: it is neither.
        """
        if not isinstance(value, list):
            return checked_label(value, location)
        return _FIRST - self._number(checked_label(one, location) for one in value)

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

    def _number(self, classes: Iterable[int]) -> int:
        return self._numbers.setdefault(tuple(sorted({*classes})), len(self._numbers))

    def resolve(self, splits: Mapping[SplitName, Images]) -> None:
        """Number the sets in `splits` from 0, if any image has a list; those of one class have that one.

        Raises:
            SourceError: no image has any class.
        """
        if not self.is_used:
            return
        numbered = {}
        for split, images in splits.items():
            labels = images.labels.tolist()
            numbered[split] = [_FIRST - label if label <= _FIRST else self._number([label]) for label in labels]
        if not self.num_classes:
            raise SourceError("no image has any label: name the right column or field with --label-key")
        label_sets = [*self._numbers]
        for split, numbers in numbered.items():
            splits[split].number_sets(np.array(numbers, dtype=np.int32), label_sets)


def _repeated(classes: list[int]) -> str:
    """Return what is wrong with a list that has a class twice, and what to do."""
    twice = f"in which class {next(one for one in classes if classes.count(one) > 1)} is twice"
    if not {*classes} <= {0, 1}:
        return f"{twice}: write each class of the image once"
    instead = [number for number, has in enumerate(classes) if has]
    return (
        f"{twice}: it looks like a vector with a number for each class, and the numbers of the classes that the image "
        f"has are wanted: write {shortened(str(instead), 60)} instead"
    )
