"""How long large photographs are decoded in each epoch, and what storing them smaller once would save."""

import time
from collections.abc import Sequence

import numpy as np

from dali_train.data.convert.image import EncodingOptions, MemoryBudget, prepare
from dali_train.data.dataset.image_file import decode_rgb
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import open_shards, stored_image
from dali_train.runtime.process import num_cores
from dali_train.text import duration, plural

SHORT_SIDE = 400
"""Pixels. Of a photograph of 4 x 3, a sixth of the random crops then have less than 224 x 224."""
_NUM_MEASURED = 6
_UNLIMITED = 1 << 40  # bytes


def saving(split: Split) -> str | None:
    """Return how long this machine's processors decode an epoch, judged by a few images; how long if their short sides
    had `SHORT_SIDE` pixels; and how long storing them so takes. None if most are not twice as large.

    Training decodes little more than the crop of an image, so its epochs take less, in both cases.

    Raises:
        BadImageError: one of the few is damaged.
    """
    heights, widths = split.rows["height"], split.rows["width"]
    if np.median(np.minimum(heights, widths)) < 2 * SHORT_SIDE or split.manifest.encoding != "image":
        return None
    storage = open_shards(split)
    numbers = np.linspace(0, len(split) - 1, _NUM_MEASURED).astype(int)
    images = [stored_image(storage, int(number)).tobytes() for number in numbers]
    encoding, budget = EncodingOptions(short_side=SHORT_SIDE), MemoryBudget(_UNLIMITED)
    prepare(images[0], encoding, budget)  # the first one takes imports
    begin = time.perf_counter()
    smaller = [prepare(image, encoding, budget).content for image in images]
    storing_s = time.perf_counter() - begin
    cores = num_cores()
    now, then, once = (
        duration(seconds / _NUM_MEASURED * len(split) / cores)
        for seconds in (_decoding_s(images), _decoding_s(smaller), storing_s)
    )
    return (
        f"decoding: about {now} an epoch on {plural(cores, 'core')}; {then} if the images are stored with a short side "
        f"of {SHORT_SIDE} pixels, which takes {once} once"
    )


def _decoding_s(images: Sequence[bytes]) -> float:
    begin = time.perf_counter()
    for image in images:
        decode_rgb(image)
    return time.perf_counter() - begin
