"""DALI's decoders: their options, with workarounds for versions of nvImageCodec, and the nodes that decode a box."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nvidia import dali
from nvidia.dali import backend_impl, fn, math, types

from dali_train.config import DataConfig
from dali_train.data.dataset.index import Split

# nvImageCodec 0.9.0 fails or crashes when it decodes a box of a JPEG on a GPU (its issue 55: an error on A100, SIGSEGV
# on H100 and B200; 0.8.0 works). No later version is known to be fixed, so from 0.9 on complete frames are decoded and
# sliced: the same pixels, and the hardware decoder decodes complete frames anyway. The CPU decoder has no such bug.
_FIRST_BAD_WITH_BOXES = 900  # 0.9.0 in DALI's spelling, major * 1,000 + minor * 100 + patch

# RGB, without EXIF rotation, as PIL and torchvision read images. affine=True would pin threads through NVML, which
# virtual machines and containers may not support, and override the CPU affinity that `configure_torch` has set.
COMMON_OPTIONS = {"output_type": types.RGB, "adjust_orientation": False, "affine": False}

# By default nvJPEG repeats the pixels of subsampled color; libjpeg-turbo, with which PIL decodes, interpolates them.
# Small 4:2:0 images differ by up to three grey levels in the mean (seen on an H200), and models that were trained on
# PIL's images lose accuracy by it (sgl-project/sglang#34163).
GPU_OPTIONS = {"device": "mixed", "jpeg_fancy_upsampling": True, **COMMON_OPTIONS}

# Speed of a decoding thread relative to the hardware decoder, in ImageNet photographs/s, seen on an H200: a thread,
# which does nvJPEG's Huffman decoding, 540; the seven engines, beside 13 threads, at least 12,000. By the share of
# the images for the engines, in all 7,000 (0), 10,400 (0.2), 14,700 (0.4), 19,900 (0.6) and 10,500 (0.85) were
# decoded. Why 0.85 is slow is not known (docs/measurements/gpu.md; tools/bench/gpu_data.py measures it).
_THREAD_OVER_HARDWARE = 540 / 12_000


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


def nvimagecodec_version() -> str:
    version = _nvimagecodec_version()
    return f"{version // 1000}.{version // 100 % 10}.{version % 100}"


def hardware_share(data: DataConfig, num_threads: int) -> float:
    """Return the fraction of JPEGs for a GPU's hardware decoder: data.hw_decoder_load, or a default by `num_threads`.

    Hardware and threads decode at the same time and should finish together, so each gets a share in proportion to its
    speed: 0.63 with 13 threads. NVIDIA's MLPerf configuration for 70 threads per GPU has 0.12, this formula gives 0.24.
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
    options = {**GPU_OPTIONS, "hw_decoder_load": hardware_share(data, pixels.num_threads)}
    if split is not None:
        for side in ("height", "width"):
            options[f"preallocate_{side}_hint"] = int(np.percentile(split.rows[side], 99))
    return options


def decode_boxes(encoded: Any, anchor: Any, shape: Any, *, size: Any = None, boxes: bool, **options: Any) -> Any:
    """Return a node of each image's box, (height, width, 3) uint8: only the box is decoded (`boxes`), or the whole
    image, which is then sliced.

    Args:
        anchor, shape: nodes with (2,) int32 for each image: y, x in pixels.
        size: the node of the images' sizes by the index, see `if_of_size`; None: the box was made of the image itself.
        options: from `decoder_options`.
    """
    absolute: dict[str, Any] = {"axis_names": "HW", "normalized_anchor": False, "normalized_shape": False}
    images: Any = None if boxes else fn.decoders.image(encoded, **options)
    if size is not None:
        # The shape by which the decoder allocates the image; it reads the header for that, too.
        whole = fn.peek_image_shape(encoded, adjust_orientation=False) if boxes else images.shape()
        anchor = if_of_size(anchor, whole, size)
    if boxes:
        return fn.decoders.image_slice(encoded, anchor, shape, **absolute, **options)
    return fn.slice(images, anchor, shape, **absolute)


def if_of_size(start: Any, shape: Any, size: Any) -> Any:
    """Return the node of `start`, (2,), which is where a region of an image begins; the graph fails if one of the
    images has not the size that its region was made for.

    So no region of another image is taken for it, or read beside one: `fn.resize` does not look whether a region is
    within its image. It all happens on the host, before the region is used on either device, and nothing waits for a
    GPU: of an image that is decoded there, DALI hands on the shape without the pixels (its operator's input is declared
    as metadata).

    Args:
        shape: node with the decoded image's, (height, width, channels).
        size: node with (2,) int32 for each image, its height and width by the index.
    """
    difference = fn.reductions.max(math.abs(fn.cast(shape[:2], dtype=types.INT32) - size), axes=0)
    # `start` from its element number `difference` on: an error of fn.slice unless that is 0.
    return fn.slice(start, difference, 2, axes=0, normalized_anchor=False, normalized_shape=False)


def describe_decoder(data: DataConfig, pixels: PixelFormat) -> dict[str, Any]:
    """Describe the decoder for environment.json and reports: versions and settings, plain values by name."""
    described: dict[str, Any] = {
        "dali": dali.__version__,
        "nvimagecodec": nvimagecodec_version(),
        "device": "cpu" if pixels.device_id is None else f"cuda:{pixels.device_id}",
        "threads": pixels.num_threads,
        "decodes": "boxes" if decodes_boxes(pixels) else "complete images, then slices",
    }
    if pixels.device_id is not None:
        described["hw_decoder_load"] = hardware_share(data, pixels.num_threads)
    return described
