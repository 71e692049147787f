"""The shard and the place of each image, and the part that makes each shard: pure functions of counts and seed."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dali_train.data.dataset.manifest import SplitName
from dali_train.data.sampling.rng import shuffled
from dali_train.errors import DatasetError

DEFAULT_SHARDS: dict[SplitName, int] = {"train": 1024, "validation": 128}
_FEWEST_SHARDS: dict[SplitName, int] = {"train": 4, "validation": 1}
_BYTES_PER_SHARD = 16 << 20  # below this, more shards only mean more files
# Apart from the streams that training draws from with the same seed, whose keys are small numbers.
_SHARDS_STREAM, _HELD_OUT_STREAM = 0x5348_4152_4453, 0x4845_4C44_4F55_54


@dataclass(frozen=True)
class Part:
    """What one of `total` machines converts: shards `number` (from 1), `number` + `total`, ... of every split."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Return the part that "3/16" names. Raises DatasetError: it names none."""
        numbers = [int(number) for number in text.split("/") if number.isdecimal()]
        if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
            raise DatasetError(f"--part is {text}: use I/N with I from 1 to N, such as 3/16")
        return cls(*numbers)


def default_num_shards(split: SplitName, *, num_images: int, num_bytes: int) -> int:
    """Return the usual 1,024 and 128 for ImageNet, fewer for a set too small for them."""
    enough = max(_FEWEST_SHARDS[split], -(-num_bytes // _BYTES_PER_SHARD))
    return min(DEFAULT_SHARDS[split], enough, num_images)


def shuffled_layout(num_images: int, num_shards: int, *, seed: int) -> list[NDArray[np.uint32]]:
    """Return the numbers of all images in random order, cut into shards that differ by at most one image."""
    order = shuffled(np.random.Philox(key=[seed, _SHARDS_STREAM]), num_images)
    return np.array_split(order, num_shards)


def held_out(labels: NDArray[np.int32], fraction: float, *, seed: int) -> NDArray[np.bool_]:
    """Choose the images of a validation split: `fraction` of each class, rounded, but at least one where two are."""
    chosen = np.zeros(len(labels), dtype=np.bool_)
    order = shuffled(np.random.Philox(key=[seed, _HELD_OUT_STREAM]), len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        chosen[by_class[start : start + min(count - 1, max(1, round(count * fraction)))]] = True
    return chosen
