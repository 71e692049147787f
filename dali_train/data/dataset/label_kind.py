"""What the labels of an index stand for: a class each, unless an extra brings another kind.

A dataset's kind of labels answers where that makes a difference. `is_class` is for what can be done only with classes.
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

LABEL_KEY = "image/class/label"  # the feature of a record that has its class
LABEL_BASE = 1  # of the labels in records that we write, as in the usual ImageNet TFRecords (labels 1 to 1000)


class LabelKind:
    """Labels that number classes, and what other kinds inherit from. All labels count from 0."""

    is_class: ClassVar[bool] = True
    """Whether a label is the number of a class: the one that the image has."""
    label_key: ClassVar[str] = LABEL_KEY
    """The feature of a record that has its label."""
    loss: ClassVar[Extra[Callable[..., Any]] | None] = None
    """Returns a `LabelsLoss` (training/loss.py) for (config, classes, weights, device); None: loss.name names a row of
    `LOSSES`."""
    evaluator: ClassVar[Extra[type[Any]] | None] = None
    """A class that inherits from `Evaluator` (training/metrics.py); None: `Evaluator` itself."""

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
        """Return the stratum of each image, (N,); a validation split takes the same fraction of each."""
        return labels

    def of_some_classes(self, new_class: NDArray[np.int32]) -> "tuple[NDArray[np.int32], LabelKind]":
        """Return the new number of each label in a part of the classes, and the kind of the new labels.

        Args:
            new_class: the new number of each class, (classes,); -1: it is left out, and so is a label of such classes.
        """
        return new_class, self

    def features(self, label: int, class_names: Sequence[str]) -> Mapping[str, Value]:
        """Return the features of a record that hold its label."""
        return {self.label_key: label + LABEL_BASE, "image/class/synset": class_names[label]}

    def facts(self) -> dict[str, Any]:
        """Return what a resumed conversion compares."""
        return {}

    def manifest_fields(self) -> dict[str, Any]:
        """Return the fields of `Manifest` that record this kind, if they do not have their defaults."""
        return {}

    def run_values(self) -> dict[str, Any]:
        """Return the fields of `RunValues` (checkpoint/format.py) that record this kind."""
        return {}

    def multi_hot(self, num_classes: int, device: "torch.device") -> "Callable[[torch.Tensor], torch.Tensor] | None":
        """Return a function from labels, (...) int64, to the rows of all classes that a loader yields instead,
        (..., classes) float32; None: a loader yields the labels unchanged."""
        return None

    def require_class(self, dataset_name: str) -> None:
        """Raises ConfigError: a label is not a class, and the caller takes it for one."""

    def check_data(self, data: DataConfig, root: str) -> None:
        """Raises ConfigError: a setting of a loader for training does not fit such labels, those of `root`."""


CLASSES = LabelKind()
