"""How images are decoded: the output format, and workarounds for versions of nvImageCodec."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nvidia import dali
from nvidia.dali import backend_impl, fn, types

from dali_train.config import DataConfig
from dali_train.data.dataset.index import Split

# nvImageCodec 0.9.0 fails or crashes when it decodes a box of a JPEG on a GPU (its issue 55: an error on A100, SIGSEGV
# on H100 and B200; 0.8.0 works). No later version is known to be fixed, so from 0.9 on complete frames are decoded and
# sliced: the same pixels, and the hardware decoder decodes complete frames anyway. The CPU decoder has no such bug.
_FIRST_BAD_WITH_BOXES = 900  # 0.9.0 in DALI's spelling, major * 1,000 + minor * 100 + patch

LOG_VARIABLE = "DALI_NVIMGCODEC_LOG_LEVEL"
"""Set to 4 before the first decoder is created, it makes nvImageCodec print the lines that `decoder_in_log` reads."""

# RGB, without EXIF rotation, as PIL and torchvision read images. affine=True would pin threads through NVML, which
# virtual machines and containers may not support, and override the CPU affinity that `configure_torch` has set.
COMMON_OPTIONS = {"output_type": types.RGB, "adjust_orientation": False, "affine": False}

# Speed of a decoding thread relative to the hardware decoder: 600 ImageNet photographs/s, since nvJPEG does Huffman
# decoding on the CPU, over 7,000/s of an H100's seven engines (NVIDIA gives 5,000/s for an A100's five). An estimate:
# `python -m tools.bench.gpu_data` measures which share is fastest.
_THREAD_OVER_HARDWARE = 600 / 7000


@dataclass(frozen=True, kw_only=True)
class PixelFormat:
    """How images leave the data path: always (n, 3, size, size), normalised."""

    device_id: int | None  # GPU on which images are decoded; None: on the CPU
    num_threads: int
    dtype: torch.dtype  # float32, float16 or bfloat16
    channels_last: bool  # memory format
    pinned: bool  # decoded on the CPU for a model on a GPU: in page-locked memory, so that the copy is asynchronous

    @property
    def dali_dtype(self) -> types.DALIDataType:
        """Return the dtype of the DALI graph's output: float16 for bfloat16, which DALI lacks and is less precise."""
        return types.FLOAT if self.dtype == torch.float32 else types.FLOAT16


def decodes_boxes(pixels: PixelFormat) -> bool:
    """Return whether only the crop box of an image is decoded, not the whole image."""
    return pixels.device_id is None or _nvimagecodec_version() < _FIRST_BAD_WITH_BOXES


def _nvimagecodec_version() -> int:
    version: int = backend_impl.GetNvimgcodecVersion()  # type: ignore[attr-defined]
    return version


def hardware_share(data: DataConfig, num_threads: int) -> float:
    """Return the fraction of JPEGs for a GPU's hardware decoder: data.hw_decoder_load, or a default by `num_threads`.

    Hardware and threads decode at the same time and should finish together, so each gets a share in proportion to its
    speed. NVIDIA's MLPerf configuration for 70 threads per GPU has 0.12, this formula gives 0.14.
    """
    if data.hw_decoder_load is not None:
        return data.hw_decoder_load
    return 1 / (1 + _THREAD_OVER_HARDWARE * num_threads)


def decoder_options(data: DataConfig, pixels: PixelFormat, split: Split | None = None) -> dict[str, Any]:
    """Return the arguments of DALI's image decoders.

    `split` (for training) sizes the hardware decoder's memory: DALI preallocates it for a micro-batch of images of one
    size. That size is the 99th percentile of the split's heights and widths; for larger images the decoder allocates
    more. Preallocating for the largest image, some tens of megapixels in ImageNet, would take tens of gigabytes.
    """
    if pixels.device_id is None:
        return {"device": "cpu", **COMMON_OPTIONS}
    options = {"device": "mixed", **COMMON_OPTIONS, "hw_decoder_load": hardware_share(data, pixels.num_threads)}
    if split is not None:
        for side in ("height", "width"):
            options[f"preallocate_{side}_hint"] = int(np.percentile(split.rows[side], 99))
    return options


def decode_boxes(encoded: Any, anchor: Any, shape: Any, *, boxes: bool, **options: Any) -> Any:
    """Return a node of each image's box, (height, width, 3) uint8: only the box is decoded (`boxes`), or the whole
    image, which is then sliced.

    Args:
        anchor, shape: nodes with (2,) int32 for each image: y, x in pixels.
        options: from `decoder_options`.
    """
    absolute: dict[str, Any] = {"axis_names": "HW", "normalized_anchor": False, "normalized_shape": False}
    if boxes:
        return fn.decoders.image_slice(encoded, anchor, shape, **absolute, **options)
    images: Any = fn.decoders.image(encoded, **options)
    return fn.slice(images, anchor, shape, **absolute)


def describe_decoder(data: DataConfig, pixels: PixelFormat) -> dict[str, Any]:
    """Describe the decoder for environment.json and reports: versions and settings, plain values by name."""
    version = _nvimagecodec_version()
    described: dict[str, Any] = {
        "dali": dali.__version__,
        "nvimagecodec": f"{version // 1000}.{version // 100 % 10}.{version % 100}",
        "device": "cpu" if pixels.device_id is None else f"cuda:{pixels.device_id}",
        "threads": pixels.num_threads,
        "decodes": "boxes" if decodes_boxes(pixels) else "complete images, then slices",
    }
    if pixels.device_id is not None:
        described["hw_decoder_load"] = hardware_share(data, pixels.num_threads)
    return described


def decoder_in_log(log: str) -> dict[str, str | int]:
    """Parse nvImageCodec's log (`LOG_VARIABLE`) for a GPU's "nvJPEG" (version) and "hardware engines".

    Empty if the CPU decodes.
    """
    found: dict[str, str | int] = {}
    if version := re.search(r"nvJPEG version:? *(\d[\d.]*)", log):
        found["nvJPEG"] = version[1]
    if engines := re.search(r"num_hw_engines *= *(\d+)", log):
        found["hardware engines"] = int(engines[1])
    return found
