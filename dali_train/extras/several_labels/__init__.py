"""Training and evaluation with several labels an image; the index's labels then number sets of classes."""

import numpy as np
import torch
from numpy.typing import NDArray

from dali_train.config import Config
from dali_train.config.sections import SEVERAL_LABELS_LOSSES
from dali_train.data.dataset.index import Split
from dali_train.errors import ConfigError

BINARY_TARGETS = ("two-way", "zlpr")
"""Losses that rank an image's classes above the others, so that a target is 0 or 1."""


def check_labels(config: Config, split: Split) -> None:
    """Check the settings of a run that need one label an image, or several.

    Raises:
        ConfigError: one does not fit `split`.
    """
    if split.label_sets is not None:
        _check_settings(config, str(split.root))
        return
    settings = {"loss.name": config.loss.name, "run.best_by": config.run.best_by}
    for name, value in settings.items():
        if value in (*SEVERAL_LABELS_LOSSES, "mean-ap"):
            raise ConfigError(
                f"{name} is {value}, which is for several labels an image, and {split.root} has one: use another"
            )


def _check_settings(config: Config, root: str) -> None:
    loss = config.loss
    names = ("binary-cross-entropy", *SEVERAL_LABELS_LOSSES)
    remedies = {
        f"loss.name {loss.name}": loss.name not in names and f"use {', '.join(names)}",
        "loss.label_smoothing": loss.name in BINARY_TARGETS and loss.label_smoothing > 0 and "set it to 0",
        "mixup.alpha, mixup.cutmix_alpha": loss.name in BINARY_TARGETS and config.mixup.enabled and "set them to 0",
        f"loss.distillation {loss.distillation}": loss.distillation != "none" and "leave the teacher out",
        "data.shuffle balanced": config.data.shuffle == "balanced" and "use full and loss.positive_weight balanced",
        "data.reader dali": config.data.reader == "dali" and "use data.reader index",
        "data.eval_sets": config.data.eval_sets != () and "evaluate on them with `dali-train eval --data.root`",
        "hooks.ledger true": config.hooks.ledger and "leave it out",
        "run.best_by balanced-top1": config.run.best_by == "balanced-top1" and "use mean-ap",
    }
    for setting, remedy in remedies.items():
        if remedy:
            raise ConfigError(f"{setting} is for one label an image, and {root} has several: {remedy}")


def padded_for(label_sets: NDArray[np.int32], num_classes: int, device: torch.device) -> torch.Tensor:
    """Return the classes of each label, (labels, most) int64 on `device`, and `num_classes` after them."""
    return torch.from_numpy(np.where(label_sets < 0, num_classes, label_sets).astype(np.int64)).to(device)


def multi_hot(padded: torch.Tensor, labels: torch.Tensor, num_classes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 for the classes of each label and 0 for others, (n, num_classes).

    Args:
        padded: of `padded_for`.
        labels: (n,) int64.
    """
    hot = torch.zeros(len(labels), num_classes + 1, dtype=dtype, device=padded.device)  # the last column: padding
    return hot.scatter_(1, padded[labels], 1)[:, :num_classes]
