"""Several labels an image: settings, losses, evaluation and predictions."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from dali_train.config.check import OVER_0, UNDER_1, Conflict, NotInRecipe, Rule


@dataclass(frozen=True, kw_only=True)
class LossOfSeveralSettings:
    """The settings of the section loss for several labels an image."""

    FOR_SEVERAL_LABELS: ClassVar[tuple[str, ...]] = ("asymmetric", "poly", "two-way", "zlpr", "distribution-balanced")
    """Losses only for several labels an image."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of timm's loss for several labels an image, such as gamma_neg and clip of asymmetric, as
    loss.kwargs.gamma_neg."""

    CONFLICTS: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            names=("kwargs", "name"),
            when=lambda loss: loss.kwargs != {} and loss.name not in loss.FOR_SEVERAL_LABELS,
            remedy=f"leave it out, or use {', '.join(FOR_SEVERAL_LABELS)}",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class RunOfSeveralSettings:
    """The settings of the section run for several labels an image."""

    f1_threshold: NotInRecipe[Annotated[float, Rule("a share between 0 and 1, such as 0.3", OVER_0, UNDER_1)]] = 0.5
    """With several labels an image: the probability over which an image is taken to have a class, in F1 (timm's
    --multilabel-threshold)."""
