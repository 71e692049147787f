"""Which image goes to which place of which shard: pure functions of the counts, the seed and the bad images."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from dali_train.data.dataset.manifest import SplitName
from dali_train.data.sampling.rng import shuffled

DEFAULT_SHARDS: dict[SplitName, int] = {"train": 1024, "validation": 128}
_FEWEST_SHARDS: dict[SplitName, int] = {"train": 4, "validation": 1}
_BYTES_PER_SHARD = 16 << 20  # below this, more shards only mean more files
# Apart from the streams that training draws from with the same seed, whose keys are small numbers.
_SHARDS_STREAM, _HELD_OUT_STREAM = 0x5348_4152_4453, 0x4845_4C44_4F55_54

Layout = list[NDArray[np.uint32]]  # a shard each: numbers of source images in the order of its records


def default_num_shards(split: SplitName, *, num_images: int, num_bytes: int) -> int:
    """Return the usual 1,024 and 128 for ImageNet, fewer for a set too small for them."""
    enough = max(_FEWEST_SHARDS[split], -(-num_bytes // _BYTES_PER_SHARD))
    return min(DEFAULT_SHARDS[split], enough, num_images)


def shuffled_layout(num_images: int, num_shards: int, *, seed: int) -> Layout:
    """Return all images in random order, cut into shards that differ by at most one image."""
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


def layout_without(layout: Layout, bad: Collection[int]) -> Layout:
    """Return `layout` without the `bad` images, level again: shards that lost none keep what they have if possible.

    Shards that are too long give their last images to those that are too short, in order, so that few shards change.
    """
    if not bad:
        return layout
    kept = [images[~np.isin(images, list(bad))] for images in layout]
    targets = _level_sizes([len(images) for images in kept])
    spare = np.concatenate([images[target:] for images, target in zip(kept, targets, strict=True)])
    levelled, used = [], 0
    for images, target in zip(kept, targets, strict=True):
        short = max(0, target - len(images))
        levelled.append(np.concatenate([images[:target], spare[used : used + short]]))
        used += short
    return levelled


def _level_sizes(sizes: Sequence[int]) -> list[int]:
    """Return sizes with the same sum that differ by at most one; the longest keep the extra image."""
    smaller, extra = divmod(sum(sizes), len(sizes))
    longest = sorted(range(len(sizes)), key=lambda shard: (-sizes[shard], shard))[:extra]
    targets = [smaller] * len(sizes)
    for shard in longest:
        targets[shard] += 1
    return targets
