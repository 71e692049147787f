"""Mixing images: Mixup, CutMix, and the choice between them."""

from dataclasses import dataclass

from dali_train.config.check import NotNegative, section


@section("mixup")
@dataclass(frozen=True, kw_only=True)
class MixupConfig:
    """Mixup and CutMix, drawn once per micro-batch, with timm's meaning of alpha. If both are on, each micro-batch uses
    one of them."""

    alpha: NotNegative = 0.0
    """Mixup's lambda is drawn from Beta(alpha, alpha). 0 turns Mixup off."""
    cutmix_alpha: NotNegative = 0.0
    """CutMix: a box of the partner covers a fraction 1 - lambda of the image, with lambda from Beta(cutmix_alpha,
    cutmix_alpha). 0 turns CutMix off. Only with data.reader index."""

    @property
    def enabled(self) -> bool:
        return self.alpha > 0 or self.cutmix_alpha > 0
