"""Several labels an image: settings, losses, evaluation and predictions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from dali_train.config.check import OVER_0, UNDER_1, Conflict, Extra, NotInRecipe, Rule

if TYPE_CHECKING:
    import torch

    from dali_train.config import LossConfig

LOSSES_OF_SEVERAL: "dict[str, Callable[[LossConfig, torch.Tensor, torch.Tensor], torch.Tensor]]" = {}
"""A config file's own losses for several labels an image. Each takes the settings, logits (n, classes) and targets (n,
classes), mixed and smoothed, both float32 or wider, and returns the batch's mean loss."""


@dataclass(frozen=True, kw_only=True)
class LossOfSeveralSettings:
    """The settings of the section loss for several labels an image."""

    if TYPE_CHECKING:
        name: str  # a field of the section

    TIMM_LOSSES: ClassVar[tuple[str, ...]] = ("asymmetric", "poly", "two-way", "zlpr", "distribution-balanced")
    """timm's losses that are only for several labels an image."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of timm's loss for several labels an image, such as gamma_neg and clip of asymmetric, as
    loss.kwargs.gamma_neg."""

    CONFLICTS: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            names=("kwargs", "name"),
            when=lambda loss: loss.kwargs != {} and loss.name not in loss.TIMM_LOSSES,
            remedy=f"leave it out, or use {', '.join(TIMM_LOSSES)}",
        ),
    )
    EXPLANATIONS: ClassVar[Mapping[str, str]] = {
        "name": "For several labels an image: binary-cross-entropy, timm's asymmetric, poly, two-way, zlpr and "
        "distribution-balanced, or a row of dali_train.extras.several_labels.LOSSES_OF_SEVERAL.",
        "label_smoothing": "With several labels an image, the targets of each class move to 1/2 by it.",
    }

    @property
    def is_for_other_labels(self) -> bool:
        """Whether the loss is only for several labels an image."""
        return self.name in (*self.TIMM_LOSSES, *LOSSES_OF_SEVERAL)


@dataclass(frozen=True, kw_only=True)
class RunOfSeveralSettings:
    """The settings of the section run for several labels an image."""

    f1_threshold: NotInRecipe[Annotated[float, Rule("a share between 0 and 1, such as 0.3", OVER_0, UNDER_1)]] = 0.5
    """With several labels an image: the probability over which an image is taken to have a class, in F1 (timm's
    --multilabel-threshold)."""

    CHECKS_OF_SPLIT: ClassVar[tuple[Extra[Any], ...]] = (
        Extra("dali_train.extras.several_labels.labels:check_labels", "run.f1_threshold"),
    )
    EXPLANATIONS: ClassVar[Mapping[str, str]] = {
        "best_by": "mean-ap: with several labels an image, the mean of the classes' average precisions.",
    }
