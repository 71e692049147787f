"""Number formats."""

from dataclasses import dataclass
from typing import Literal

from dali_train.config.check import NotInRecipe, Positive, require, section


@section("precision")
@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """bf16 and fp16: autocast with float32 weights, fp16 also with a gradient scaler. fp64: for checks on the CPU, to
    show which differences are rounding."""
    autocast: bool = True
    """With fp16 or bf16, torch's autocast keeps norms, softmax and the residual stream in float32. False: compute
    everything in dtype, with float32 master weights and gradients, and without compiling."""
    initial_scale: Positive = 65536.0
    """Initial loss scale of fp16; it doubles after 2,000 steps without an overflow."""
    tf32: NotInRecipe[bool] = True
    """Compute float32 matrix products and convolutions in TensorFloat-32 on GPUs that have it: 10 bits of mantissa
    instead of 23, accumulated in float32. It is deterministic, but set it to false to compare with a CPU."""

    def __post_init__(self) -> None:
        require(
            self.autocast or self.dtype in ("fp16", "bf16"),
            f"precision.autocast is false with precision.dtype {self.dtype}, but needs fp16 or bf16: set it to true",
        )
