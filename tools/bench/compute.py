"""What a device computes in a step, by class of kernel, and its peak. Needs torch and timm alone."""

import re
from dataclasses import replace

import torch
from torch.profiler import profile

from dali_train.config import Config
from dali_train.extras.cost.speed import measured_peak
from dali_train.training.cost import Peak, data_sheet_peak

# Contenders of tools/bench/step.py.
REAL, SYNTHETIC, BARE = "trainer, real data", "trainer, synthetic data", "bare loop"
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by precision.dtype

# Classes of GPU kernels and CPU operators by name; the first match counts. Inductor's names show what it fused.
KERNEL_CLASSES = [
    ("all-reduce", r"nccl|gloo|all_?reduce"),
    ("memory copy", r"memcpy|memset|aten::(copy_|clone|contiguous|zero_|fill_)"),
    ("image decoding", r"jpeg|nvjpeg|dali|huffman|idct|ycbcr|decode"),
    ("attention", r"flash|fmha|attention|sdpa|mha_"),
    ("convolution", r"conv|implicit_gemm|wgrad|dgrad|cudnn"),
    (
        "matrix product",
        r"gemm|cutlass|cublas|nvjet|xmma|sm\d\d_.*tensorop|aten::(mm|bmm|addmm|baddbmm|linear)|mkldnn|splitk",
    ),
    ("optimizer", r"multi_tensor|foreach|lamb(?!da)|lerp|addcmul"),
    ("normalisation", r"layer_?norm|batch_?norm|native_norm|rms_?norm|GammaBeta"),
    ("softmax and loss", r"softmax|nll_loss|cross_entropy"),
    ("dropout", r"dropout|bernoulli|philox|random|distribution"),
    (
        "element-wise and reduction",
        r"elementwise|pointwise|triton_|reduce|gelu|aten::(add|mul|div|sum|sub|where|neg|sqrt|norm)|cat",
    ),
]


def time_by_class(profiler: profile, on_gpu: bool) -> dict[str, float]:
    """Return the seconds of GPU kernels, or of CPU operators without the operators that they call, by class."""
    seconds: dict[str, float] = {}
    for event in profiler.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kind = next((kind for kind, pattern in KERNEL_CLASSES if re.search(pattern, event.key, re.IGNORECASE)), "other")
        seconds[kind] = seconds.get(kind, 0.0) + spent / 1e6
    return seconds


def peak(config: Config, device: torch.device) -> Peak:
    """Return the data sheet's peak of a known GPU, otherwise the measured rate of large matrix products."""
    dtype = config.precision.dtype
    rate = measured_peak(dtype, device)
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    measured = f"{rate / 1e12:.3g} TFLOP/s: measured, the best of several large matrix products in {dtype} on {where}"
    known = None
    if device.type == "cuda":
        known = data_sheet_peak(torch.cuda.get_device_name(device), dtype, tf32=config.precision.tf32)
    return Peak(rate, measured) if known is None else replace(known, source=f"{known.source}; {measured}")
