"""Number formats."""

from dataclasses import dataclass
from typing import Literal

from dali_train.config.check import Count, NotInRecipe, Positive, require, section


@section("precision")
@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """bf16 and fp16 are autocast over float32 weights, fp16 with a gradient scaler. fp64 is for checks on the CPU: it
    shows which differences are rounding."""
    pure: bool = False
    """With fp16 or bf16: compute everything in it instead of under autocast, which keeps norms, softmax and the
    residual stream in float32. Weights and gradients stay float32. Nothing is compiled then."""
    initial_scale: Positive = 65536.0
    """First loss scale of fp16."""
    growth_interval: Count = 2000
    """Steps without an overflow after which fp16's loss scale doubles."""
    tf32: NotInRecipe[bool] = True
    """On GPUs that have TensorFloat-32, compute float32 matrix products and convolutions in it: 10 bits of mantissa
    instead of 23, sums in float32. Deterministic, but set it to false to compare with a CPU."""

    def __post_init__(self) -> None:
        require(
            not self.pure or self.dtype in ("fp16", "bf16"),
            f"precision.pure is true with precision.dtype {self.dtype}: it is for fp16 and bf16, set it to false",
        )
