"""What the labels of an index stand for: a class each, unless an extra brings another kind.

A dataset's kind of labels answers wherever that makes a difference, so that nothing else asks which kind it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dali_train.config import DataConfig
from dali_train.config.check import Extra
from dali_train.data.dataset.tfrecord import Value

if TYPE_CHECKING:
    import torch

LABEL_KEY = "image/class/label"
LABEL_BASE = 1  # of the labels in records that we write, as in the usual ImageNet TFRecords (labels 1 to 1000)


class LabelKind:
    """Labels that number classes, and what other kinds inherit from. All labels count from 0."""

    is_class: ClassVar[bool] = True
    """Whether a label is the number of a class: the one that the image has."""
    label_key: ClassVar[str] = LABEL_KEY
    """The feature of a record that has its label."""
    loss: ClassVar[Extra[Callable[..., Any]] | None] = None
    """Returns a `LabelsLoss` for (config, classes, weights, device); None: a row of `LOSSES` is used."""
    evaluator: ClassVar[Extra[type[Any]] | None] = None
    """An `Evaluator`; None: that one."""

    def num_labels(self, num_classes: int) -> int:
        """Return how many labels there are."""
        return num_classes

    def classes_of(self, label: int) -> tuple[int, ...]:
        """Return the classes that a label stands for."""
        return (label,)

    def count_classes(self, labels: NDArray[np.integer[Any]], num_classes: int) -> NDArray[np.int64]:
        """Return how many of these labels stand for each class, (classes,)."""
        return np.bincount(labels, minlength=num_classes)

    def strata(self, labels: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return of each image what a validation split has a fraction of each of."""
        return labels

    def of_some_classes(self, new_class: NDArray[np.int32]) -> "tuple[NDArray[np.int32], LabelKind]":
        """Return the new number of each label in a part of the classes, and the kind of the new labels.

        Args:
            new_class: the new number of each class, (classes,); -1: it is left out, and so is a label of such classes.
        """
        return new_class, self

    def features(self, label: int, class_names: Sequence[str]) -> Mapping[str, Value]:
        """Return the features of a record that say which classes its image has."""
        return {LABEL_KEY: label + LABEL_BASE, "image/class/synset": class_names[label]}

    def facts(self) -> dict[str, Any]:
        """Return what tells labels of this kind from others, for a conversion that goes on."""
        return {}

    def manifest_fields(self) -> dict[str, Any]:
        """Return the fields of `Manifest` that say it."""
        return {}

    def run_values(self) -> dict[str, Any]:
        """Return the fields of `RunValues` (checkpoint/format.py) that say it."""
        return {}

    def targets(self, num_classes: int, device: "torch.device") -> "Callable[[torch.Tensor], torch.Tensor] | None":
        """Return a function from labels (...) int64 to what a loader yields instead, (..., classes) float32; None: they
        stay."""
        return None

    def require_class(self, dataset_name: str) -> None:
        """Refuse labels that are no classes, for callers that take them for classes.

        Raises:
            ConfigError: they are none.
        """

    def check_data(self, data: DataConfig, root: str) -> None:
        """Raises ConfigError: a setting of a loader for training does not fit such labels, which `root` has."""


CLASSES = LabelKind()
