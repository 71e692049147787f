"""A second set of weights: the moving average of the trained ones."""

from dataclasses import dataclass
from typing import Annotated

from dali_train.config.check import OVER_0, UNDER_1, Rule, refuse, section


@section("ema")
@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An exponential moving average (EMA) of weights and buffers, as timm's ModelEmaV3 computes it. It is evaluated
    beside the weights, saved in checkpoints, and decides which checkpoint is the best."""

    decay: Annotated[float, Rule("a share between 0 and 1, such as 0.999", OVER_0, UNDER_1)] | None = None
    """Weight of the old average at each optimizer step. The average spans about 1 / (1 - decay) steps, so choose it by
    the number of steps, not epochs: 300 epochs of ImageNet are 11,730 steps in batches of 32,768. None: no average."""
    warmup: bool = False
    """Let the decay rise to its value: 1 - (1 + step) ** (-2 / 3)."""

    def __post_init__(self) -> None:
        refuse(self.warmup and self.decay is None, self, "warmup decay", "set ema.decay, such as 0.999")
