"""A second set of weights: the moving average of the trained ones."""

from dataclasses import dataclass
from typing import Annotated

from dali_train.config.check import OVER_0, UNDER_1, CountOr0, Positive, Range, require, section


@section("ema")
@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An exponential moving average (EMA) of weights and buffers, as timm's ModelEmaV3 computes it. It is evaluated
    beside the weights, saved in checkpoints, and decides which checkpoint is the best."""

    decay: Annotated[float, Range(OVER_0, UNDER_1, "a share between 0 and 1, such as 0.999")] | None = None
    """Share of the average that stays at each optimizer step. The average spans about 1 / (1 - decay) steps, so choose
    it by the number of steps, not epochs: 300 epochs of ImageNet are 11,729 steps in batches of 32,768. None: no
    average."""
    after_steps: CountOr0 = 0
    """Steps in the beginning during which the average is a copy of the weights."""
    warmup: bool = False
    """Let the decay rise to its value: 1 - (1 + step / warmup_gamma) ** -warmup_power."""
    warmup_gamma: Positive = 1.0
    """Steps in which the decay of a warmup begins to rise: the larger, the later."""
    warmup_power: Positive = 2 / 3
    """How fast the decay of a warmup rises."""

    def __post_init__(self) -> None:
        require(
            self.decay is not None or not self.warmup,
            "ema.warmup is true, but there is no average: set ema.decay, such as 0.999",
        )
