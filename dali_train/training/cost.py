"""What a model costs: the FLOPs of an image, from shapes alone; the peaks of GPUs, from data sheets; and the format in
which this machine's processor computes its largest product fastest, by measurement.

The FLOPs give model FLOP utilisation, the model's FLOP/s as a fraction of the device's peak:

    MFU = images/s x FLOPs per image / (devices x dense peak)

They are those of the model, counted once on the meta device; recomputation, in a kernel or by activation checkpointing,
does not count. The peak is that of dense matrix products.
"""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from dali_train.config import Config
from dali_train.text import duration
from dali_train.training.model import build_model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class ModelFlops:
    """Converts throughput into model FLOP utilisation. Created once per run."""

    per_image: dict[int, float]  # of one forward and backward pass, by the side of the images in pixels
    peak: float  # dense FLOP/s of all devices together

    def utilisation(self, images_per_second: float, size: int) -> float:
        """Return the fraction of the peak, 0 to 1.

        Args:
            images_per_second: over all ranks, without evaluation and checkpoints.
            size: the side of the images in pixels.
        """
        return images_per_second * self.per_image[size] / self.peak


def model_flops(config: Config, num_classes: int, device: torch.device, *, num_devices: int) -> ModelFlops | None:
    """Return the FLOPs of a run on `num_devices` devices like `device`.

    None if there is no peak to compare with (on a CPU, or on a GPU that is not in the table), or if the model cannot be
    counted on the meta device.
    """
    if device.type != "cuda":
        return None
    peak = data_sheet_peak(torch.cuda.get_device_name(device), config.precision.dtype, tf32=config.precision.tf32)
    if peak is None:
        return None
    try:
        per_image = {size: flops_per_image(config.at_size(size), num_classes) for size in config.data.train_sizes}
    except (RuntimeError, NotImplementedError):  # the model needs values, which the meta device does not have
        return None
    return ModelFlops(per_image, peak.flops_per_second * num_devices)


def flops_per_image(config: Config, num_classes: int, model: nn.Module | None = None) -> float:
    """Count one forward and backward pass at data.train_size: matrix products and convolutions.

    A multiplication and an addition are two operations, as in torch's FLOP counter; attention is two matrix products.

    Args:
        model: that of `config` on the meta device, if it is built. With activation checkpointing another one is built,
            since recomputation does not count.
    """
    if model is None or config.model.activation_checkpointing:
        plain = replace(config, model=replace(config.model, activation_checkpointing=False))
        model = build_model(plain, num_classes, torch.device("meta"))
    size = config.data.train_size
    dtype = next(model.parameters()).dtype
    corrected: Any = {torch.ops.aten.convolution_backward: _flops_of_convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=corrected) as counter:
        model(
            torch.empty(2, 3, size, size, device="meta", dtype=dtype)
        ).sum().backward()  # batch statistics need two images
    model.zero_grad()
    return counter.get_total_flops() / 2


def _flops_of_convolution_backward(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *arguments: Any, **named: Any
) -> int:
    """Return the FLOPs of a convolution's backward pass, from the shapes of its tensors and torch's other arguments:
    those of the forward pass for each of the gradients of `x` and of `weight` that is computed.

    torch's own formula (2.15) counts the gradient of the weight as if there were a single group: ConvNeXt-T, with
    depthwise convolutions, would have 2.9 times its FLOPs.
    """
    transposed, output_mask = arguments[4], arguments[7]
    pixels = x if transposed else grad
    return 2 * math.prod(weight) * pixels[0] * math.prod(pixels[2:]) * sum(output_mask[:2])


_PRODUCT_FLOPS = 2e9  # of the product that is measured, at most: 40 ms at 50 GFLOP/s
FASTER = 1.2  # a ratio of two measured times that is more than their noise


@dataclass(frozen=True)
class Product:
    """A model's largest matrix product or convolution, as this machine's processor computes it."""

    flops: float
    seconds: dict[str, float]  # by precision.dtype

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    def speedup(self, dtype: str) -> float:
        """Return how many times as fast as fp32 `dtype` is; below 1 where the processor emulates it."""
        return self.seconds["fp32"] / self.seconds[dtype]

    def emulates(self, dtype: str) -> bool:
        """Return whether the processor has no instructions for `dtype`, fp32, bf16 or fp16, and is slower for it."""
        return self.speedup(dtype) < 1 / FASTER

    def warning(self, dtype: str) -> str | None:
        """Return what a user of precision.dtype `dtype` should know: by how much the processor is slower for it."""
        if dtype not in ("bf16", "fp16") or not self.emulates(dtype):
            return None
        return (
            f"precision.dtype is {dtype}, which this machine's CPU emulates: the model's largest product takes "
            f"{1 / self.speedup(dtype):.1f} times as long as in fp32. Set precision.dtype {self.fastest}"
        )

    def describe(self) -> str:
        times = ", ".join(f"{dtype} {duration(seconds)}" for dtype, seconds in self.seconds.items())
        words = f"this machine's CPU takes {times} for the model's largest product"
        if self.speedup(self.fastest) < FASTER:
            return words
        return f"{words}; {self.fastest} is {self.speedup(self.fastest):.1f} times as fast as fp32"


def emulation_warning(config: Config, num_classes: int, device: torch.device) -> str | None:
    """Return a warning where the processor emulates precision.dtype, which makes a run many times as long.

    None for other devices, where a format is not slower, and for models that the meta device cannot compute.
    """
    if device.type != "cpu" or config.precision.dtype not in ("bf16", "fp16"):
        return None
    try:
        product = measure_largest_product(config, build_model(config, num_classes, torch.device("meta")))
    except (RuntimeError, NotImplementedError):  # the model needs values
        return None
    return product.warning(config.precision.dtype)


def measure_largest_product(config: Config, model: nn.Module) -> Product:
    """Time the largest operator of a forward pass on this machine's processor, in fp32, bf16, fp16 and the dtype of
    `config`, for about a second in all.

    Whole models gain less: norms, activations and the optimizer are in float32 under autocast.

    Args:
        model: that of `config` on the meta device.

    Raises:
        RuntimeError, NotImplementedError: the model needs values, which the meta device does not have.
    """
    size, largest = config.data.train_size, _Largest()
    num_images, dtype = 2, next(model.parameters()).dtype  # batch statistics need two images
    for _ in range(2):
        with torch.no_grad(), largest:
            model(torch.empty(num_images, 3, size, size, device="meta", dtype=dtype))
        fitting = int(num_images * _PRODUCT_FLOPS / max(1.0, largest.flops))
        num_images = max(2, min(config.batch.micro_batch, fitting))
    assert largest.call is not None, "a model without a product"
    func, args, kwargs = largest.call
    best: dict[str, float] = dict.fromkeys(("fp32", "bf16", "fp16", config.precision.dtype), float("inf"))
    left, inputs = dict.fromkeys(best, 0.3), {}
    for name in best:
        like = partial(torch.empty_like, device="cpu", dtype=DTYPES[name])
        inputs[name] = [like(one).normal_() if isinstance(one, torch.Tensor) else one for one in args]
        func(*inputs[name], **kwargs)  # the first call compiles a kernel
    while any(seconds > 0 for seconds in left.values()):
        for name in left:  # in turns, because other processes disturb
            if left[name] > 0:
                start = time.perf_counter()
                func(*inputs[name], **kwargs)
                seconds = time.perf_counter() - start
                best[name], left[name] = min(seconds, best[name]), left[name] - seconds
    return Product(largest.flops, best)


class _Largest(TorchDispatchMode):
    """A mode that remembers the call with the most FLOPs, by torch's FLOP counter."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.call = 0.0, None  # type: float, tuple[Any, Any, Any] | None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if count := flop_registry.get(func._overloadpacket):
            flops = count(*args, **kwargs, out_val=outputs)
            if flops > self.flops:
                self.flops, self.call = float(flops), (func, args, kwargs)
        return outputs


@dataclass(frozen=True)
class Peak:
    flops_per_second: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """A row of the table below."""

    name: str
    memory_gb: float
    matrix: float  # TFLOP/s
    tensor_float: float | None
    single: float

    def peak(self, dtype: str, *, tf32: bool) -> Peak | None:
        """Return the peak for precision.dtype `dtype`; None for a format that the GPU or the table lacks."""
        if dtype in ("bf16", "fp16"):
            peak = None if dtype == "bf16" and self.name in _WITHOUT_BF16 else self.matrix
            kind = dtype
        elif dtype == "fp32":
            uses_tf32 = tf32 and self.tensor_float is not None
            peak, kind = (self.tensor_float, "TF32") if uses_tf32 else (self.single, "FP32")
        else:
            return None
        if peak is None:
            return None
        return Peak(peak * 1e12, f"{peak:g} TFLOP/s: NVIDIA's data sheet of {self.name}, {kind}, dense")


# Memory in GB (A100, V100 and GH200 also come with another: --gpu-memory precedes this), and dense TFLOP/s of
# (bf16 and fp16 with float32 accumulation, TF32, FP32) from NVIDIA's data sheets and architecture papers, which print
# most of them with sparsity: twice as much. None: the GPU lacks the format. The first row whose name occurs in the
# device's name is used, so a variant must precede its family.
#   Blackwell: HGX B200 and GB200 NVL72 data sheets (2024), RTX Blackwell architecture paper
#   Hopper: H100, H200, GH200 and H20 data sheets (2022 to 2024). H100 SXM calls itself "H100 80GB HBM3"
#   Ada: L4, L40, L40S data sheets (2023), Ada architecture paper (RTX 4090 with float32 sums)
#   Ampere: A100, A30, A10, A40 data sheets (2021), GA102 architecture paper
#   Volta, Turing: V100 SXM2 and T4 data sheets (2017, 2018); their matrix format is fp16 alone
# torch's own table (torch._inductor.analysis.device_info, 2.15) mixes sparse figures with dense ones: 1,979 for H100 in
# bf16, 242 for L4.
GPUS = [
    Gpu("GB200", 186, 2500.0, 1250.0, 80.0),
    Gpu("B200", 180, 2250.0, 1125.0, 75.0),
    Gpu("RTX 5090", 32, 209.5, 104.8, 104.8),
    Gpu("GH200", 96, 989.4, 494.7, 67.0),
    Gpu("H200 NVL", 141, 835.5, 417.5, 60.0),
    Gpu("H200", 141, 989.4, 494.7, 67.0),
    Gpu("H100 PCIe", 80, 756.5, 378.0, 51.0),
    Gpu("H100 NVL", 94, 835.5, 417.5, 60.0),
    Gpu("H100", 80, 989.4, 494.7, 67.0),
    Gpu("H20", 96, 148.0, 74.0, 44.0),
    Gpu("L40S", 48, 362.0, 183.0, 91.6),
    Gpu("L40", 48, 181.0, 90.5, 90.5),
    Gpu("L4", 24, 121.0, 60.0, 30.3),
    Gpu("RTX 4090", 24, 165.2, 82.6, 82.6),
    Gpu("A100", 80, 312.0, 156.0, 19.5),
    Gpu("A40", 48, 149.7, 74.8, 37.4),
    Gpu("A30", 24, 165.0, 82.0, 10.3),
    Gpu("A10", 24, 125.0, 62.5, 31.2),
    Gpu("RTX 3090", 24, 71.0, 35.6, 35.6),
    Gpu("V100", 32, 125.0, None, 15.7),
    Gpu("T4", 16, 65.0, None, 8.1),
]
_WITHOUT_BF16 = ("V100", "T4")


def data_sheet_peak(device_name: str, dtype: str, *, tf32: bool) -> Peak | None:
    """Return the peak of a GPU that is in the table, for precision.dtype `dtype`; None for another GPU or format."""
    for gpu in GPUS:
        if "Laptop" not in device_name and re.search(rf"\b{gpu.name}\b", device_name):
            return gpu.peak(dtype, tf32=tf32)
    return None
