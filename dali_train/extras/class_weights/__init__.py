"""How much each class counts in the loss: `loss.class_weights` and `loss.positive_weight`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from dali_train.config.check import Conflict, NotNegative, Positive, Rule

_WEIGHTED = ("cross-entropy", "binary-cross-entropy", "asymmetric")
ByClass = tuple[tuple[str, NotNegative], ...]
"""Pairs of a class, by its name or its number from 0, and its weight."""


@dataclass(frozen=True, kw_only=True)
class ClassWeightSettings:
    """What the section loss says of single classes."""

    class_weights: Annotated[
        Annotated[str, Rule("", pattern=r"none|balanced|effective-0\.\d{1,15}")] | ByClass,
        Rule("none, balanced, effective-BETA such as effective-0.999, or pairs such as cat,2 dog,0.5"),
    ] = "none"
    """Factor of each class's part of the loss. balanced: 1 / n for a class with n training images, so that rare classes
    count as much as frequent ones. effective-0.999: (1 - beta) / (1 - beta ** n) with beta 0.999, by the effective
    number of images (Cui et al., arXiv 1901.05555): those beyond about 1 / (1 - beta) count no more. Both are scaled to
    a mean of 1, over the images with cross-entropy and over the classes with binary losses. Or pairs of a class and its
    weight, used as they are, and 1 for the other classes: cat,2 dog,0.5, by name or by number from 0. The loss is
    divided by the number of images, never by the sum of their weights, so it does not depend on how images fall into
    micro-batches."""
    positive_weight: Annotated[
        Positive | Literal["balanced"] | ByClass,
        Rule("a number over 0, at most 1e30, balanced, or pairs such as cat,2 dog,0.5"),
    ] = 1.0
    """binary-cross-entropy: factor of the part of the loss that pulls towards an image's own classes (timm's
    --bce-pos-weight). balanced: for each class the number of training images without it by that with it. Or pairs of a
    class and its factor, and 1 for the other classes: cat,2 dog,0.5, by name or by number from 0."""

    @property
    def weights_classes(self) -> bool:
        """Whether classes count differently in the loss, so that it depends on the training images."""
        return self.class_weights != "none" or isinstance(self.positive_weight, str | tuple)

    CONFLICTS: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            names=("positive_weight", "name"),
            when=lambda loss: (
                loss.positive_weight != 1 and loss.name in {"cross-entropy", *loss.TIMM_LOSSES} - {"asymmetric"}
            ),
            remedy="leave it out, or use binary-cross-entropy",
        ),
        Conflict(
            names=("class_weights", "name"),
            when=lambda loss: loss.class_weights != "none" and loss.name not in _WEIGHTED,
            remedy=f"leave it out, or use {' or '.join(_WEIGHTED)}, or data.shuffle balanced",
        ),
    )
