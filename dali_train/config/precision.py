"""Number formats."""

from dataclasses import dataclass
from typing import Literal

from dali_train.config.check import NotInRecipe, Positive, require, section


@section("precision")
@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """bf16 and fp16 are autocast over float32 weights, fp16 with a gradient scaler. fp64 is for checks on the CPU: it
    shows which differences are rounding."""
    autocast: bool = True
    """With fp16 or bf16, torch's autocast keeps norms, softmax and the residual stream in float32. False: everything is
    computed in dtype, over weights and gradients in float32, and nothing is compiled."""
    initial_scale: Positive = 65536.0
    """First loss scale of fp16; it doubles after 2,000 steps without an overflow."""
    tf32: NotInRecipe[bool] = True
    """On GPUs that have TensorFloat-32, compute float32 matrix products and convolutions in it: 10 bits of mantissa
    instead of 23, sums in float32. Deterministic, but set it to false to compare with a CPU."""

    def __post_init__(self) -> None:
        require(
            self.autocast or self.dtype in ("fp16", "bf16"),
            f"precision.autocast is false with precision.dtype {self.dtype}: it is for fp16 and bf16, set it to true",
        )
