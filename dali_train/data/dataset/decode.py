"""Checking by DALI itself whether images can be decoded, since decoders disagree about damaged files."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dali_train.data.dataset.image_file import BadImageError, image_size, open_image

BATCH_PIXELS = 8_000_000  # decoded together at most, but for a larger single image
_NOISE = re.compile(r"Current pipeline object|Critical error in pipeline|C\+\+ context|\[")


def _why_undecodable(encoded: bytes, error: RuntimeError) -> str:
    """Return why DALI failed on an image with `error`: PIL's message if PIL fails too, since DALI's says little."""
    try:
        image_size(encoded)
        open_image(encoded).load()
    except BadImageError as fault:
        return f"it {fault}"
    except Exception as fault:  # PIL's decoders raise nearly any kind on damaged files
        return str(fault)
    return f"DALI says: {dali_reason(error)}"


def dali_reason(error: RuntimeError) -> str:
    """Return DALI's own message in `error`, without its traceback of the graph."""
    lines = str(error).rpartition("encountered:")[2].splitlines()
    words = " ".join(line.strip() for line in lines if line.strip() and not _NOISE.match(line))
    return words.strip(" :")


class DecodeChecker:
    """Decodes images with DALI on one thread and says which of them fail.

    It decodes only luminance: all coefficients of all components are read and checked as for RGB, but colour is not
    computed, which is a quarter faster. On 3,000 JPEGs damaged at random both always gave the same result.
    """

    BATCH = 16

    def __init__(self) -> None:
        from nvidia.dali import Pipeline, fn, types  # takes half a second: imported only where something is decoded

        pipeline: Any = Pipeline(batch_size=self.BATCH, num_threads=1, device_id=None, prefetch_queue_depth=1)
        with pipeline:
            encoded = fn.external_source(name="encoded", no_copy=True)
            pipeline.set_outputs(
                fn.decoders.image(encoded, device="cpu", output_type=types.GRAY, adjust_orientation=False)
            )
        pipeline.build()
        self._pipeline = pipeline

    def failures(self, images: Sequence[bytes | NDArray[np.uint8]]) -> dict[int, str]:
        """Positions in `images` (at most ``BATCH``) of those that do not decode, with the reason."""
        if self._fault(images) is None:
            return {}
        # DALI names no sample of a failed batch, so each is tried alone. The pipeline works on after an error.
        faults = ((number, self._fault([image])) for number, image in enumerate(images))
        return {number: fault for number, fault in faults if fault is not None}

    def _fault(self, images: Sequence[bytes | NDArray[np.uint8]]) -> str | None:
        try:
            self._pipeline.feed_input("encoded", [np.frombuffer(image, np.uint8) for image in images])
            self._pipeline.run()
        except RuntimeError as error:
            return _why_undecodable(bytes(images[0]), error)
        return None
