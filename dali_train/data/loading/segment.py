"""Which data-parallel coordinate computes which micro-batch, and their bytes, read ahead.

Coordinate r of W gets the micro-batches r, r + W, r + 2 W, ... of every step. A coordinate, not the global rank: with
model parallelism several ranks share one.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from dali_train.config import SampleConfig, View
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import Storage
from dali_train.data.loading.cache import Node
from dali_train.data.loading.read_ahead import ReadAhead
from dali_train.data.sampling.micro_batch import MicroBatch, MicroBatches


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The micro-batches of one coordinate while training images have one size: from `start_step` to before `end_step`.

    Iterating yields (step, k) of each, and does not stop at `end_step`: what prepares micro-batches looks ahead.
    """

    config: SampleConfig  # with that size
    start_step: int
    end_step: float = math.inf
    dp_rank: int
    dp_size: int
    num_done: int = 0  # of the coordinate's micro-batches of `start_step`, which are left out
    views: tuple[View, ...] = ()  # of every image

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for step in itertools.count(self.start_step):
            for k in self.numbers[self.num_done if step == self.start_step else 0 :]:
                yield step, k

    @property
    def numbers(self) -> range:
        """Which micro-batches of a step this coordinate has; others may have one more."""
        return range(self.dp_rank, self.config.batch.num_micro_batches, self.dp_size)


def segment_at(
    config: SampleConfig, num_images: int, *, start_step: int, dp_rank: int, dp_size: int, num_done: int = 0
) -> Segment:
    """Return the segment of `start_step` from there on; it ends where data.progressive changes the size of images."""
    sizes = config.sizes_by_step(num_images)
    ends = [*(start for start, _ in sizes[1:]), math.inf]
    sized, end = next((sized, end) for (_, sized), end in zip(sizes, ends, strict=True) if start_step < end)
    return Segment(
        config=sized, start_step=start_step, end_step=end, dp_rank=dp_rank, dp_size=dp_size, num_done=num_done
    )


def ordered(split: Split, segment: Segment, micro_batches: MicroBatches | None = None) -> Iterator[MicroBatch]:
    """Iterate over the micro-batches of a segment, and beyond it, without end."""
    micro_batches = micro_batches or MicroBatches(split.rows, segment.config, segment.views, split.kept)
    return (micro_batches(step, k) for step, k in segment)


def read(split: Split, segment: Segment, storage: Storage, node: Node | None = None) -> Iterator[MicroBatch]:
    """Iterate over the same, while their bytes are read ahead and the cache of `node` is kept within its limit."""
    data, batch = segment.config.data, segment.config.batch
    micro_batches = MicroBatches(split.rows, segment.config, segment.views, split.kept)
    chosen = ordered(split, segment, micro_batches)
    # Never more than an epoch ahead, which covers every image once.
    images = min(data.read_ahead_mb * 1_000_000 * len(split) // split.num_bytes, split.num_images // segment.dp_size)
    num_ahead = max(1, images // batch.micro_batch)
    if node is not None:
        eviction = node.eviction(split, segment.config, start_step=segment.start_step, num_ahead=num_ahead)
        chosen = chosen if eviction is None else eviction.follow(chosen)
    if data.read_ahead_mb == 0:
        return chosen
    # Look the same number of steps ahead if this coordinate has one micro-batch per step less than others.
    num_ahead = max(1, num_ahead * len(segment.numbers) // batch.grad_accum_steps(segment.dp_size))
    return ReadAhead(split, storage, micro_batches, chosen, iter(segment), num_ahead)
