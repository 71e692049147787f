"""Floating-point operations of a model, and the most that a device can do."""

import re
import time
from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from dali_train.config import Config
from dali_train.model import build_model

# Dense TFLOP/s without sparsity, from NVIDIA's data sheets (H100, H200, A100 Tensor Core GPU), which print those of H100
# and H200 with sparsity: twice as much. The first name that the device's name holds counts. "matrix" is bf16 and fp16.
_PEAKS: list[tuple[str, dict[str, float]]] = [
    ("H100 PCIe", {"matrix": 756.5, "tf32": 378.0, "fp32": 51.0}),
    ("H100 NVL", {"matrix": 835.5, "tf32": 417.5, "fp32": 60.0}),
    ("H200 NVL", {"matrix": 835.5, "tf32": 417.5, "fp32": 60.0}),
    ("H200", {"matrix": 989.4, "tf32": 494.7, "fp32": 67.0}),
    ("H100", {"matrix": 989.4, "tf32": 494.7, "fp32": 67.0}),  # SXM: its name says "HBM3"
    ("A100", {"matrix": 312.0, "tf32": 156.0, "fp32": 19.5}),
]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Peak:
    flops_per_second: float
    source: str


def flops_per_image(config: Config, num_classes: int) -> float:
    """Of one forward and backward pass, as torch's flop counter counts them: matrix products and convolutions, a
    multiplication and an addition being two operations.

    Counted on the meta device with attention as two matrix products and without activation checkpointing, so that what
    a kernel computes a second time in the backward pass does not count: it is no work of the model's.
    """
    plain = replace(config, model=replace(config.model, activation_checkpointing=False))
    model = build_model(plain, num_classes, torch.device("meta")).train()
    size = config.data.train_size
    dtype = next(model.parameters()).dtype
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, size, size, device="meta", dtype=dtype)).sum().backward()
    return float(counter.get_total_flops())


def peak(config: Config, device: torch.device) -> Peak:
    """The data sheet's for a GPU that is known, else what one large matrix product reaches here."""
    dtype = config.precision.dtype
    kind = {"bf16": "matrix", "fp16": "matrix", "fp32": "tf32" if config.precision.tf32 else "fp32"}.get(dtype)
    if device.type == "cuda" and kind is not None:
        name = torch.cuda.get_device_name(device)
        for part, peaks in _PEAKS:
            if re.search(part, name):
                return Peak(peaks[kind] * 1e12, f"{peaks[kind]:g} TFLOP/s: NVIDIA's data sheet of {part}, {kind}, dense")
    rate = _largest_product(_DTYPES[dtype], device)
    threads = f"on {torch.get_num_threads()} threads" if device.type == "cpu" else f"on {torch.cuda.get_device_name(device)}"
    return Peak(rate, f"{rate / 1e12:.3g} TFLOP/s: measured, the best of several large matrix products in {dtype} {threads}")


def _largest_product(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of the fastest of several n x n products."""
    n = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + 2
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * n**3 / best
