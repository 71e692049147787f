"""Training on several labels an image: the targets, and which settings fit them."""

from functools import cached_property

import numpy as np
import torch

from dali_train.config import Config
from dali_train.config.check import Mark, as_typed
from dali_train.data.dataset.index import Split
from dali_train.errors import ConfigError
from dali_train.extras.several_labels import LOSSES_OF_SEVERAL
from dali_train.extras.several_labels.sets_of_classes import SetsOfClasses, data_remedies, refuse

BINARY_TARGETS = ("two-way", "zlpr")
"""Losses that rank an image's classes above the others, so that a target is 0 or 1."""


def check_labels(config: Config, split: Split) -> None:
    """Check the settings of a run that need one label an image, or several.

    Raises:
        ConfigError: one does not fit `split`.
    """
    if isinstance(split.label_kind, SetsOfClasses):
        _check_settings(config, str(split.root))
        return
    settings = {
        f"loss.name is {config.loss.name}": config.loss.is_for_other_labels,
        f"run.f1_threshold is {config.run.f1_threshold:g}": config.run.f1_threshold != 0.5,
    }
    for setting, is_set in settings.items():
        if is_set:
            raise ConfigError(
                f"{setting}, which is for several labels an image, and {split.root} has one: use another, or leave it "
                "out"
            )


def _check_settings(config: Config, root: str) -> None:
    loss = config.loss
    names = ("binary-cross-entropy", *loss.TIMM_LOSSES, *LOSSES_OF_SEVERAL)
    remedies = {
        f"loss.name {loss.name}": loss.name not in names and f"use {', '.join(names)}, or a row of LOSSES_OF_SEVERAL",
        "loss.label_smoothing": loss.name in BINARY_TARGETS and loss.label_smoothing > 0 and "set it to 0",
        "mixup.alpha, mixup.cutmix_alpha": loss.name in BINARY_TARGETS and config.mixup.enabled and "set them to 0",
        **data_remedies(config.data),
        "data.eval_sets": config.data.eval_sets != () and "evaluate on them with `dali-train eval --data.root`",
        "run.best_by balanced-top1": config.run.best_by == "balanced-top1" and "use mean-ap",
        **{f"{name} {as_typed(value)}": "leave it out" for name, value in config.changed(Mark.NEEDS_ONE_LABEL)},
    }
    refuse(remedies, root)


class MultiHot:
    """What labels that number sets of classes stand for, as targets.

    Args:
        device: of labels and targets.
    """

    def __init__(self, kind: SetsOfClasses, num_classes: int, device: torch.device) -> None:
        self._kind = kind
        self._num_classes = num_classes
        self._device = device

    @cached_property
    def _padded(self) -> torch.Tensor:
        """The classes of each label, (labels, most) int64, and `num_classes` after them."""
        padded = np.where(self._kind.padded < 0, self._num_classes, self._kind.padded)
        return torch.from_numpy(padded.astype(np.int64)).to(self._device)

    def __call__(self, labels: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return 1 for the classes of each label and 0 for others, (..., classes).

        Args:
            labels: (...) int64.
        """
        padded = self._padded[labels]
        # The last column is the padding's.
        hot = torch.zeros(*labels.shape, self._num_classes + 1, dtype=dtype, device=padded.device)
        return hot.scatter_(-1, padded, 1)[..., :-1]
