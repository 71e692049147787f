"""GPUs by name: their memory, and how fast they multiply matrices, from data sheets."""

import re
from dataclasses import dataclass

from dali_train.config.check import close_names
from dali_train.errors import ConfigError
from dali_train.text import printable


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
_GPUS = [
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
    for gpu in _GPUS:
        if "Laptop" not in device_name and re.search(rf"\b{gpu.name}\b", device_name):
            return gpu.peak(dtype, tf32=tf32)
    return None


def find_gpu(text: str) -> Gpu:
    """Return the GPU that a user calls `text`, such as h100, H100-PCIe or rtx4090.

    Raises:
        ConfigError: the table has no such GPU.
    """
    by_name = {gpu.name.lower().replace(" ", ""): gpu for gpu in _GPUS}
    name = re.sub(r"[\s_-]", "", text.lower())
    if name not in by_name:
        close = close_names(name, by_name, n=3)
        remedy = f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(by_name)}"
        raise ConfigError(f"--gpu {printable(text)}: no such GPU is known; {remedy}")
    return by_name[name]
