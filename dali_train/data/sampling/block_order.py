"""One epoch's order for storage that needs long reads: shuffled blocks of adjacent images, shuffled again in windows.

It is the composition of two bijections, both closed-form except for one sort of the block numbers:

1. *Dealing.* Micro-batch k of every step reads its own contiguous stretch of the shuffled order, lane k. Otherwise
   every rank would touch every block, and nothing would be read sequentially. With any number of ranks, each block is
   read by one rank (by two if a lane ends inside its window), and a global batch comes from as many places of the
   dataset as the step has micro-batches.
2. *Shuffling.* The images in file order are cut into blocks of adjacent images, the blocks are permuted, and within
   windows of consecutive permuted blocks the images are permuted: a shuffle buffer without state. The first cut moves
   from epoch to epoch (blocks wrap around the end of the dataset), so that the same images do not always share a block.

The order does not depend on the number of ranks. It depends on the number of micro-batches in a step, as k does.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dali_train.data.sampling.rng import Purpose, philox_generator, shuffled


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The sizes that a block order depends on, besides the seed and the epoch."""

    num_images: int
    block_images: int  # a block's length in images, not bytes, so that a dataset with smaller images has the same order
    window_blocks: int
    global_batch: int
    micro_batch: int


class BlockOrder:
    """The order of `epoch`. Only the permuted block numbers and the most recent windows are kept in memory."""

    def __init__(self, blocks: Blocks, *, seed: int, epoch: int) -> None:
        self._blocks, self._seed, self._epoch = blocks, seed, epoch
        generator = philox_generator(seed, Purpose.BLOCKS, low=0, high=epoch)
        self._shift = int(generator.random_raw()) % blocks.num_images
        self._permuted = shuffled(generator, -(-blocks.num_images // blocks.block_images)).astype(np.int64)
        ends = np.cumsum(self._lengths(self._permuted))  # the block that was last in file order may be shorter
        self._window_starts = np.concatenate([[0], ends[blocks.window_blocks - 1 : -1 : blocks.window_blocks]])
        # For each lane: the number of images dealt to it before this epoch, and the number of this epoch's images dealt
        # to the lanes before it.
        lanes = np.arange(blocks.global_batch // blocks.micro_batch)
        self._start = epoch * blocks.num_images
        self._before = self._num_dealt(np.int64(self._start), lanes)
        in_epoch = self._num_dealt(np.int64(self._start + blocks.num_images), lanes) - self._before
        self._lane_starts = np.cumsum(in_epoch) - in_epoch
        # A rank alternates between its lanes.
        self._window = lru_cache(maxsize=2 * len(lanes))(self._shuffled_window)

    def images_at(self, within: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images at these positions of the epoch, each from 0 to under num_images."""
        places = self._deal(within)
        images = np.empty_like(places)
        windows = self._window_at(places)
        for window in np.unique(windows):
            here = windows == window
            images[here] = self._window(int(window))[places[here] - self._window_starts[window]]
        return images

    def windows_at(self, within: NDArray[np.int64]) -> list[int]:
        """Return the numbers of the windows that these positions' images come from."""
        return [int(window) for window in np.unique(self._window_at(self._deal(within)))]

    def images_in(self, window: int) -> NDArray[np.int64]:
        """Return the images of a window's blocks, block after block."""
        size = self._blocks.window_blocks
        numbers = self._permuted[window * size : (window + 1) * size]
        lengths = self._lengths(numbers)
        inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return (
            np.repeat(numbers * self._blocks.block_images, lengths) + inside + self._shift
        ) % self._blocks.num_images

    def _deal(self, within: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map positions to places in the shuffled order, which is lane after lane, each in order of position."""
        positions = self._start + within
        lanes = positions % self._blocks.global_batch // self._blocks.micro_batch
        return self._lane_starts[lanes] + self._num_dealt(positions, lanes) - self._before[lanes]

    def _num_dealt(self, positions: NDArray[np.int64] | np.int64, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of the first `positions` of the training sequence belong to each of `lanes`."""
        steps, rest = np.divmod(positions, self._blocks.global_batch)
        micro_batch = self._blocks.micro_batch
        return np.asarray(steps * micro_batch + np.clip(rest - lanes * micro_batch, 0, micro_batch))

    def _window_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._window_starts, places, side="right") - 1

    def _shuffled_window(self, window: int) -> NDArray[np.int64]:
        images = self.images_in(window)
        return images[shuffled(philox_generator(self._seed, Purpose.WINDOW, low=window, high=self._epoch), len(images))]

    def _lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of images in each of these blocks."""
        return np.minimum(self._blocks.num_images - numbers * self._blocks.block_images, self._blocks.block_images)
