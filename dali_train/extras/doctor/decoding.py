"""Decoding the same images again and again, and what nvImageCodec says of itself."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline, pipeline_def

from dali_train.data.loading.decoders import COMMON_OPTIONS

LOG_VARIABLE = "DALI_NVIMGCODEC_LOG_LEVEL"
"""Set to 4 before the first decoder is created, it makes nvImageCodec print the lines that `decoder_in_log` reads."""


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


def decode_repeatedly(
    encoded: Sequence[NDArray[np.uint8]], device_id: int | None, *, rounds: int, hw_decoder_load: float = 0.0
) -> Iterator[list[NDArray[np.uint8]]]:
    """Decode whole images as one batch, `rounds` times, and yield their pixels, (h, w, 3) each.

    Args:
        device_id: a GPU; None: the CPU.
        hw_decoder_load: the fraction for the GPU's hardware decoder, if it has one.

    Raises:
        RuntimeError: DALI cannot decode them.
    """
    pipe = _decoding_graph(encoded, hw_decoder_load, batch_size=len(encoded), num_threads=1, device_id=device_id)
    pipe.build()
    for _ in range(rounds):
        (images,) = pipe.run()
        on_host = images if device_id is None else images.as_cpu()
        yield [np.array(on_host.at(number)) for number in range(len(encoded))]


@pipeline_def
def _decoding_graph(encoded: Sequence[NDArray[np.uint8]], hw_decoder_load: float) -> Any:
    # Not constants, which could be on the GPU: a mixed decoder needs the files on the CPU.
    files = fn.external_source(source=lambda: list(encoded), batch=True, dtype=types.UINT8, ndim=1)
    on_gpu = {"device": "mixed", "hw_decoder_load": hw_decoder_load}
    options = {"device": "cpu"} if Pipeline.current().device_id is None else on_gpu
    return fn.decoders.image(files, **options, **COMMON_OPTIONS)
