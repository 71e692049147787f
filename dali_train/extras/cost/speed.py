"""How fast this machine computes, by measurement: matrix products, and passes of a model."""

import time

import torch
from torch import nn

from dali_train.config import Config
from dali_train.training.cost import DTYPES, FASTER, measure_largest_product
from dali_train.training.model import build_model
from dali_train.training.precision import Precision


def measured_peak(dtype: str, device: torch.device, seconds: float = 2.0) -> float:
    """Measure FLOP/s: the fastest of several large square products in precision.dtype `dtype`."""
    n = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * n**3 / best


_LONG_S = 1.0  # measured passes of a processor take this long before another has little to add


def seconds_per_image(config: Config, num_classes: int, device: torch.device, micro_batch: int) -> float:
    """Measure forward and backward passes of up to 32 random images on `device`, the fastest of three.

    A processor, which has little to prepare, computes fewer if they take more than `_LONG_S` together.
    """
    model, autocast = build_model(config, num_classes, device), Precision(config.precision, device).autocast
    size, num_images = config.data.train_size, max(2, min(micro_batch, 32))  # batch statistics need two
    images = torch.randn(num_images, 3, size, size, device=device)
    seconds: list[float] = []
    while len(seconds) < 3 and (device.type != "cpu" or sum(seconds) < _LONG_S):  # the first one prepares kernels
        start = time.perf_counter()
        with autocast():
            logits = model(images)
        logits.float().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / num_images


def half_precision(capability: tuple[int, int]) -> str | None:
    """Return the half precision of a GPU's tensor cores: "bf16" since Ampere, "fp16" since Volta, None before.

    Args:
        capability: CUDA's compute capability, as of `torch.cuda.get_device_capability`.
    """
    if capability >= (8, 0):
        return "bf16"
    return "fp16" if capability >= (7, 0) else None


def bf16_speedup(config: Config, model: nn.Module, num_classes: int) -> float:
    """Return how many times as fast forward and backward passes in bf16 are as those in fp32 on this processor; 1 where
    its largest product is not, since an emulated format takes minutes.

    In a small network casts can cost more than products gain: that of configs/digits.py took 41 ms in bf16 and 26 ms in
    fp32 where its largest product was 1.7 times as fast in bf16 (AMD EPYC with AVX512_BF16, one thread).

    Args:
        model: that of `config` on the meta device.
    """
    if measure_largest_product(config, model).speedup("bf16") < FASTER:
        return 1.0
    plain, half = (
        seconds_per_image(one, num_classes, torch.device("cpu"), config.batch.micro_batch)
        for one in (config.replace({"precision.dtype": dtype}) for dtype in ("fp32", "bf16"))
    )
    return plain / half
