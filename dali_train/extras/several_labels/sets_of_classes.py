"""Labels that number sets of classes: one of an index, for all classes that an image has."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.config import DataConfig
from dali_train.config.check import Extra
from dali_train.data.dataset.label_kind import LABEL_BASE, LabelKind
from dali_train.data.dataset.tfrecord import Value
from dali_train.errors import ConfigError

if TYPE_CHECKING:
    import torch

# Imported where they are used: reading a dataset needs no torch.
MULTI_HOT = Extra[Callable[["SetsOfClasses", int, "torch.device"], Callable[["torch.Tensor"], "torch.Tensor"]]](
    "dali_train.extras.several_labels.labels:MultiHot"
)


class SetsOfClasses(LabelKind):
    """Labels that number sets of classes.

    `padded` has the classes of each label, (labels, most) int32, and -1 after them: a million sets as Python objects
    would take hundreds of megabytes.
    """

    is_class: ClassVar[bool] = False
    label_key: ClassVar[str] = "image/class/label_set"
    loss: ClassVar = Extra("dali_train.extras.several_labels.losses:SeveralLabelsLoss")
    evaluator: ClassVar = Extra("dali_train.extras.several_labels.evaluation:SeveralLabelsEvaluator")

    def __init__(self, sets: Sequence[tuple[int, ...]]) -> None:
        self.padded = np.full((len(sets), max(map(len, sets), default=0) or 1), -1, dtype=np.int32)
        for number, classes in enumerate(sets):
            self.padded[number, : len(classes)] = classes

    @property
    def text(self) -> str:
        """``Manifest.label_sets``."""
        return ",".join(" ".join(map(str, classes)) for classes in self._sets())

    def _sets(self) -> Iterator[tuple[int, ...]]:
        return map(self.classes_of, range(len(self.padded)))

    def num_labels(self, num_classes: int) -> int:
        return len(self.padded)

    def classes_of(self, label: int) -> tuple[int, ...]:
        return tuple(number for number in self.padded[label].tolist() if number >= 0)

    def count_classes(self, labels: NDArray[np.integer[Any]], num_classes: int) -> NDArray[np.int64]:
        counts = np.bincount(labels, minlength=len(self.padded))
        is_there = self.padded >= 0
        of_each = np.repeat(counts, is_there.sum(axis=1))
        return np.bincount(self.padded[is_there], weights=of_each, minlength=num_classes).astype(np.int64)

    def strata(self, labels: NDArray[np.int32]) -> NDArray[np.int32]:
        """All images are of one stratum, since most sets of classes are those of a single image."""
        return np.zeros_like(labels)

    def of_some_classes(self, new_class: NDArray[np.int32]) -> tuple[NDArray[np.int32], LabelKind]:
        """The new sets have the chosen classes only. A set without any is left out, unless all classes are chosen:
        images without a class then stay."""
        numbers: dict[tuple[int, ...], int] = {}
        stays = bool((new_class >= 0).all())
        new_labels = []
        for classes in self._sets():
            renumbered = new_class[list(classes)]
            chosen = tuple(renumbered[renumbered >= 0].tolist())
            new_labels.append(numbers.setdefault(chosen, len(numbers)) if chosen or stays else -1)
        return np.array(new_labels, dtype=np.int32), SetsOfClasses([*numbers])

    def features(self, label: int, class_names: Sequence[str]) -> Mapping[str, Value]:
        # Under other names, so that a reader that knows only one label does not take the set's number for it.
        classes = tuple(number + LABEL_BASE for number in self.classes_of(label))
        return {self.label_key: label + LABEL_BASE, "image/class/labels": classes}

    def facts(self) -> dict[str, Any]:
        return {"label_sets_crc32c": f"{crc32c(self.text.encode()):08x}"}

    def manifest_fields(self) -> dict[str, Any]:
        return {"label_sets": self.text, "format_version": 2}

    def run_values(self) -> dict[str, Any]:
        return {"several_labels": True}

    def multi_hot(self, num_classes: int, device: "torch.device") -> "Callable[[torch.Tensor], torch.Tensor]":
        return MULTI_HOT.load()(self, num_classes, device)

    def require_class(self, dataset_name: str) -> None:
        raise ConfigError(
            f"{dataset_name}: its images have several labels, and this needs one: use a dataset with one; "
            "docs/own-images.md names the commands for several"
        )

    def check_data(self, data: DataConfig, root: str) -> None:
        refuse(data_remedies(data), root)


def data_remedies(data: DataConfig) -> dict[str, str | bool]:
    """Return settings that need one label an image, and what to do about each that is there."""
    return {
        "data.shuffle balanced": data.shuffle == "balanced" and "use full and loss.positive_weight balanced",
        "data.reader dali": data.reader == "dali" and "use data.reader index",
    }


def refuse(remedies: Mapping[str, str | bool], root: str) -> None:
    """Raises ConfigError: a setting has a remedy."""
    for setting, remedy in remedies.items():
        if remedy:
            raise ConfigError(f"{setting} is for one label an image, and {root} has several: {remedy}")
