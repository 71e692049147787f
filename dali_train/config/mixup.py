"""Mixing images with each other: Mixup, CutMix, and the switch between them."""

from dataclasses import dataclass

from dali_train.config.check import Fraction, NotNegative, require, section


@section("mixup")
@dataclass(frozen=True, kw_only=True)
class MixupConfig:
    """Mixup and CutMix, with timm's meaning of alpha, prob and switch_prob."""

    alpha: NotNegative = 0.0
    """Mixup's lambda is drawn from Beta(alpha, alpha). 0 turns Mixup off."""
    cutmix_alpha: NotNegative = 0.0
    """CutMix: a box of the partner covers a share of the image, 1 - lambda with lambda from Beta(cutmix_alpha,
    cutmix_alpha). 0 turns CutMix off. Only with data.reader index."""
    prob: Fraction = 1.0
    """Probability of mixing at all."""
    switch_prob: Fraction = 0.5
    """Where both are on: probability of CutMix rather than Mixup."""
    per_image: bool = False
    """Draw all of this once per image instead of once per micro-batch."""

    def __post_init__(self) -> None:
        require(
            self.enabled or self.prob == 1,
            f"mixup.prob is {self.prob}, but nothing is mixed: set mixup.alpha or mixup.cutmix_alpha, or leave "
            "mixup.prob out",
        )

    @property
    def enabled(self) -> bool:
        return self.alpha > 0 or self.cutmix_alpha > 0
