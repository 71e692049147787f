"""When a node needs each image next: known in advance, because the order of all epochs is a pure function of the seed.

A cache that always evicts the image needed furthest in the future (L. A. Belady, IBM Systems Journal 5(2), 1966) has
the highest possible hit rate. The prefetching of N. Dryden et al., "Clairvoyant prefetching for distributed machine
learning I/O" (SC 2021, arXiv:2101.08734) uses the same knowledge.
"""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from dali_train.config import Config
from dali_train.data.sampling.order import SampleOrder

_MOST_EVENTS_PER_IMAGE = 3
"""The look-ahead, in uses per image of the split, 12 bytes each. A node with 1 / W of the ranks needs a fraction c of
the dataset within W ln(1 / (1 - c)) epochs, so 3 uses per image are enough for a cache of c = 0.95."""


class NextUse:
    """When the data-parallel coordinates of one node use each image next.

    Time is counted in micro-batches of coordinate 0, which has at least as many per step as any other; all coordinates
    compute theirs at the same time.

    Args:
        labels: of all images of the split, (N,).
        dp_size: number of data-parallel coordinates.
        coordinates: those whose ranks are on this node.
        start_step: the first step whose uses are known.
    """

    def __init__(
        self, config: Config, labels: NDArray[np.integer], *, dp_size: int, coordinates: frozenset[int], start_step: int
    ) -> None:
        self._order = SampleOrder.of(config, labels)  # not shared with training, which is in other epochs
        batch = config.batch
        mine = np.array([k for k in range(batch.num_micro_batches) if k % dp_size in coordinates])
        self._within = (mine[:, None] * batch.micro_batch + np.arange(batch.micro_batch)).ravel()  # a step's positions
        self._turns = np.repeat(mine // dp_size, batch.micro_batch).astype(np.int32)
        self._per_step = batch.grad_accum_steps(dp_size)
        self._global_batch, self._dp_size = batch.global_batch, dp_size
        total = config.steps(config.run.epochs, len(labels))
        self.total_steps = min(total, config.run.max_steps or total)
        self._steps_per_chunk = max(1, len(labels) // batch.global_batch)
        self._end = start_step  # uses are known in steps before it
        self._images = np.empty(0, dtype=np.int32)  # uses in the order of time
        self._times = np.empty(0, dtype=np.int32)

    def uses(self, first_step: int, end_step: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return (images, times) of this node's uses in these steps, in order of time."""
        steps = np.arange(first_step, max(first_step, min(end_step, self.total_steps)), dtype=np.int64)
        positions = steps[:, None] * self._global_batch + self._within
        images, _ = self._order.images_at(positions.ravel())
        times = steps[:, None] * self._per_step + self._turns
        return images.astype(np.int32), times.astype(np.int32).ravel()

    def time(self, step: int, k: int) -> int:
        """Return when micro-batch `k` of `step` is computed."""
        return step * self._per_step + k // self._dp_size

    def forget(self, end: int) -> None:
        """Forget the uses before time `end`, which will not be asked for again."""
        keep = int(np.searchsorted(self._times, end))
        self._images, self._times = self._images[keep:], self._times[keep:]

    def between(self, first: int, end: int) -> NDArray[np.int32]:
        """Return the images used from time `first` to before `end`, none of which were forgotten."""
        while self._end * self._per_step < end and self._end < self.total_steps:
            self._look_further()
        begin, stop = np.searchsorted(self._times, [first, end])
        return self._images[begin:stop]

    def first_use(self, sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int32]:
        """Return the time of each image's first use that was not forgotten, (N,).

        It is the largest int32 for images that are never used again, or only after other images of `capacity` bytes.

        Args:
            sizes: of all images, bytes.
        """
        never = np.iinfo(np.int32).max
        while True:
            found = np.full(len(sizes), never, dtype=np.int32)
            found[self._images[::-1]] = self._times[::-1]  # the last assignment counts: the earliest use
            too_many = len(self._images) >= _MOST_EVENTS_PER_IMAGE * len(sizes)
            if sizes[found < never].sum() > capacity or too_many or self._end >= self.total_steps:
                return found
            self._look_further()

    def _look_further(self) -> None:
        images, times = self.uses(self._end, self._end + self._steps_per_chunk)
        self._end += self._steps_per_chunk
        self._images, self._times = np.concatenate([self._images, images]), np.concatenate([self._times, times])


def simulate_cache(uses: NDArray[np.int32], sizes: NDArray[np.int64], capacity: int) -> NDArray[np.bool_]:
    """Return which of a node's `uses`, image numbers in order of time, hit a cache of `capacity` bytes, (uses,).

    The cache starts empty and evicts the image used furthest in the future (Belady's MIN); an image that would be
    evicted at once is not stored.
    """
    last: dict[int, int] = {}
    next_use = np.empty(len(uses), dtype=np.int64)
    for place in range(len(uses) - 1, -1, -1):
        image = int(uses[place])
        next_use[place] = last.get(image, len(uses))
        last[image] = place
    served = np.zeros(len(uses), dtype=np.bool_)
    held: dict[int, int] = {}  # image -> place of its next use
    latest: list[tuple[int, int]] = []
    total = 0
    for place, (image, then) in enumerate(zip(uses.tolist(), next_use.tolist(), strict=True)):
        if image in held:
            served[place] = True
        else:
            total += int(sizes[image])
        held[image] = then
        heappush(latest, (-then, image))
        while total > capacity:
            then, victim = heappop(latest)
            if held.get(victim) == -then:  # else it has been used since
                del held[victim]
                total -= int(sizes[victim])
    return served
