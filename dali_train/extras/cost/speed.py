"""How fast this machine computes, by measurement: matrix products, and passes of a model."""

import time
from collections.abc import Callable, Sequence

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


_LONG_S = 1.0  # measured passes take this long before another has little to add


def seconds_per_image(config: Config, num_classes: int, device: torch.device, micro_batch: int) -> float:
    """Measure forward and backward passes of random images on `device`: the fastest of up to three."""
    return _fastest([_timed_pass(config, num_classes, device, micro_batch)])[0]


def _num_images(device: torch.device, micro_batch: int) -> int:
    """Return how many images a measured pass has.

    On two cores of a Xeon 16 took as long an image as 32, within 15 %, and half the time: 13 instead of 26 s for both
    precisions of ResNet-50. With 8 bf16 seemed to gain less than it does.
    """
    most = 16 if device.type == "cpu" else 32
    return max(2, min(micro_batch, most))  # batch statistics need two


def _timed_pass(config: Config, num_classes: int, device: torch.device, micro_batch: int) -> Callable[[], float]:
    """Return a function that makes a pass and returns its seconds an image."""
    model, autocast = build_model(config, num_classes, device), Precision(config.precision, device).autocast
    size, num_images = config.data.train_size, _num_images(device, micro_batch)
    images = torch.randn(num_images, 3, size, size, device=device)

    def timed() -> float:
        start = time.perf_counter()
        with autocast():
            logits = model(images)
        logits.float().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / num_images

    return timed


def _fastest(passes: Sequence[Callable[[], float]]) -> list[float]:
    """Return the fastest of up to three rounds of each pass. They take turns, since other programs come and go.

    The round before, in which kernels are made and memory is touched for the first time, does not count: of
    EfficientNet-Lite0 in fp32 it took 1.3 times as long as the others on a quiet processor, 1.7 times on a busy one.
    """
    for one in passes:
        one()
    rounds: list[list[float]] = []
    begin = time.perf_counter()
    while len(rounds) < 3 and (not rounds or time.perf_counter() < begin + _LONG_S):
        rounds.append([one() for one in passes])
    return [min(times) for times in zip(*rounds, strict=True)]


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
    plain, half = _fastest(
        [
            _timed_pass(one, num_classes, torch.device("cpu"), config.batch.micro_batch)
            for one in (config.replace({"precision.dtype": dtype}) for dtype in ("fp32", "bf16"))
        ]
    )
    return plain / half
