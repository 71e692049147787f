"""The first thing to run on a GPU: does decoding survive? One operator, a few batches, in a process of its own.

    DALI_NVIMGCODEC_LOG_LEVEL=3 python -m tools.bench.smoke DATASET --decode box --load 0.65

nvImageCodec 0.9 is reported to fail or to end the process where it decodes a box of an ordinary JPEG on a data centre
GPU (NVIDIA/nvImageCodec issue 55); complete images decode. What comes out is compared with the same operator on the
CPU.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import backend_impl, fn, types
from nvidia.dali.pipeline import Pipeline, pipeline_def

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles
from dali_train.data.loading.decoder import COMMON_OPTIONS

BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="of encoded images; its training split is read")
    parser.add_argument("--decode", choices=["whole", "box"], default="whole", help="complete images, or a box of each")
    parser.add_argument(
        "--load", type=float, default=0.65, metavar="SHARE", help="hw_decoder_load (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="images per batch (default: %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    split = Split(options.dataset, "train")
    images = np.arange(options.batch) % len(split)
    shards = MappedFiles(split)
    files = [shards.image(image) for image in images]
    rows = split.rows[images]
    sides = np.stack([rows["height"], rows["width"]], axis=-1).astype(np.int32)
    boxes = (files, sides // 4, sides // 2)  # the middle quarter
    version = getattr(backend_impl, "GetNvimgcodecVersion", lambda: "unknown")()
    print(
        f"nvImageCodec {version}; {options.decode} images, batches of {options.batch}, hw_decoder_load "
        f"{options.load:g}",
        flush=True,
    )
    expected = decode(boxes, options, on_gpu=False)
    begin = time.perf_counter()
    found = decode(boxes, options, on_gpu=options.device == "cuda")
    seconds = time.perf_counter() - begin
    off = max(float(np.abs(a.astype(float) - b).mean()) for a, b in zip(found, expected, strict=True))
    print(
        f"{BATCHES} batches in {seconds:.2f} s with the first one's start; at most {off:.2f} grey levels from the "
        "CPU, per image"
    )
    if off > 2:
        raise SystemExit("more than 2 grey levels: what was decoded is wrong")


def decode(boxes: tuple[Any, ...], options: argparse.Namespace, *, on_gpu: bool) -> list[Any]:
    """The pixels of the last of several batches."""
    pipe: Pipeline = _graph(
        lambda: boxes,
        options.decode,
        options.load,
        on_gpu,
        batch_size=options.batch,
        num_threads=4,
        device_id=0 if on_gpu else None,
    )
    pipe.build()
    for _ in range(BATCHES):
        (pixels,) = pipe.run()
    on_host = pixels.as_cpu() if on_gpu else pixels
    return [np.array(on_host.at(number)) for number in range(options.batch)]


@pipeline_def
def _graph(source: Any, what: str, load: float, on_gpu: bool) -> Any:
    encoded, anchor, shape = fn.external_source(
        source=source, num_outputs=3, batch=True, dtype=[types.UINT8, types.INT32, types.INT32], ndim=[1, 1, 1]
    )
    settings: dict[str, Any] = {"device": "cpu", **COMMON_OPTIONS}
    if on_gpu:
        # As the CPU's decoder does; by default the GPU's repeats colour, 6 grey levels off on noise at 4:2:0.
        settings |= {"device": "mixed", "hw_decoder_load": load, "jpeg_fancy_upsampling": True}
    if what == "whole":
        return fn.decoders.image(encoded, **settings)
    return fn.decoders.image_slice(
        encoded, anchor, shape, axis_names="HW", normalized_anchor=False, normalized_shape=False, **settings
    )


if __name__ == "__main__":
    main()
