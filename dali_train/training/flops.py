"""Model FLOP utilisation: the model's FLOP/s as a fraction of the device's peak.

    MFU = images/s x FLOPs per image / (devices x dense peak)

FLOPs per image are those of the model, counted once on the meta device; recomputation, in a kernel or by activation
checkpointing, does not count. The peak is that of dense matrix products.
"""

import re
import time
from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from dali_train.config import Config
from dali_train.training.model import build_model

# Dense TFLOP/s of (bf16 and fp16 with float32 accumulation, TF32, FP32) from NVIDIA's data sheets and architecture
# papers, which print most of them with sparsity: twice as much. None: the GPU lacks the format. The first row whose
# name occurs in the device's name is used, so a variant must precede its family.
#   Blackwell: HGX B200 and GB200 NVL72 data sheets (2024), RTX Blackwell architecture paper
#   Hopper: H100, H200, GH200 and H20 data sheets (2022 to 2024). H100 SXM calls itself "H100 80GB HBM3"
#   Ada: L4, L40, L40S data sheets (2023), Ada architecture paper (RTX 4090 with float32 sums)
#   Ampere: A100, A30, A10, A40 data sheets (2021), GA102 architecture paper
#   Volta, Turing: V100 SXM2 and T4 data sheets (2017, 2018); their matrix format is fp16 alone
# torch's own table (torch._inductor.analysis.device_info, 2.15) mixes sparse figures with dense ones: 1,979 for H100 in
# bf16, 242 for L4.
_PEAKS: list[tuple[str, tuple[float | None, float | None, float]]] = [
    ("GB200", (2500.0, 1250.0, 80.0)),
    ("B200", (2250.0, 1125.0, 75.0)),
    ("RTX 5090", (209.5, 104.8, 104.8)),
    ("GH200", (989.4, 494.7, 67.0)),
    ("H200 NVL", (835.5, 417.5, 60.0)),
    ("H200", (989.4, 494.7, 67.0)),
    ("H100 PCIe", (756.5, 378.0, 51.0)),
    ("H100 NVL", (835.5, 417.5, 60.0)),
    ("H100", (989.4, 494.7, 67.0)),
    ("H20", (148.0, 74.0, 44.0)),
    ("L40S", (362.0, 183.0, 91.6)),
    ("L40", (181.0, 90.5, 90.5)),
    ("L4", (121.0, 60.0, 30.3)),
    ("RTX 4090", (165.2, 82.6, 82.6)),
    ("A100", (312.0, 156.0, 19.5)),
    ("A40", (149.7, 74.8, 37.4)),
    ("A30", (165.0, 82.0, 10.3)),
    ("A10", (125.0, 62.5, 31.2)),
    ("RTX 3090", (71.0, 35.6, 35.6)),
    ("V100", (125.0, None, 15.7)),
    ("T4", (65.0, None, 8.1)),
]
_WITHOUT_BF16 = ("V100", "T4")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Peak:
    flops_per_second: float
    source: str


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


def flops_per_image(config: Config, num_classes: int) -> float:
    """Count one forward and backward pass at data.train_size: matrix products and convolutions.

    A multiplication and an addition are two operations, as in torch's FLOP counter; attention is two matrix products.
    """
    plain = replace(config, model=replace(config.model, activation_checkpointing=False))
    model = build_model(plain, num_classes, torch.device("meta")).train()
    size = config.data.train_size
    dtype = next(model.parameters()).dtype
    with FlopCounterMode(display=False) as counter:
        model(
            torch.empty(2, 3, size, size, device="meta", dtype=dtype)
        ).sum().backward()  # batch statistics need two images
    return counter.get_total_flops() / 2


def data_sheet_peak(device_name: str, dtype: str, *, tf32: bool) -> Peak | None:
    """Return the peak of a GPU that is in the table, for precision.dtype `dtype`; None for another GPU or format."""
    for part, (matrix, tensor_float, single) in _PEAKS:
        if "Laptop" in device_name or not re.search(rf"\b{part}\b", device_name):
            continue
        if dtype in ("bf16", "fp16"):
            peak, kind = (None if dtype == "bf16" and part in _WITHOUT_BF16 else matrix), dtype
        elif dtype == "fp32":
            peak, kind = (tensor_float, "TF32") if tf32 and tensor_float is not None else (single, "FP32")
        else:
            return None
        return (
            None
            if peak is None
            else Peak(peak * 1e12, f"{peak:g} TFLOP/s: NVIDIA's data sheet of {part}, {kind}, dense")
        )
    return None


def measured_peak(dtype: str, device: torch.device, seconds: float = 2.0) -> float:
    """Measure FLOP/s: the fastest of several large square products in precision.dtype `dtype`."""
    n = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(_DTYPES[dtype]) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * n**3 / best
