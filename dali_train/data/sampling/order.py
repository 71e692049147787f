"""Which image is at which position of the training sequence.

The sequence is continuous: position p is image ``p mod N`` of the shuffled epoch ``p div N``. Every epoch has each
image exactly once (except in a balanced order), and nothing is dropped or padded between epochs, whatever the batch
size. A mixture of datasets merges the sequences of several (`extras/mixture/merge.py`).
"""

import threading
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dali_train.config import SampleConfig
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
    """An order of one epoch for storage that needs long reads: shuffled blocks of adjacent images, shuffled again in
    windows.

    It is the composition of two bijections, both closed-form except for one sort of the block numbers:

    1. *Dealing.* Micro-batch k of every step reads its own contiguous stretch of the shuffled order, lane k. Otherwise
       every rank would touch every block, and nothing would be read sequentially. With any number of ranks, each block
       is read by one rank (by two if a lane ends inside its window), and a global batch comes from as many places of
       the dataset as the step has micro-batches.
    2. *Shuffling.* The images in file order are cut into blocks of adjacent images, the blocks are permuted, and within
       windows of consecutive permuted blocks the images are permuted: a shuffle buffer without state. The first cut
       moves from epoch to epoch (blocks wrap around the end of the dataset), so that the same images do not always
       share a block.

    The order does not depend on the number of ranks. It depends on the number of micro-batches in a step, as k does.
    Only the permuted block numbers and the most recent windows are kept in memory.
    """

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


class FullOrder:
    """A uniformly random order of one epoch, 4 bytes per image.

    Args:
        kept: which images it has, (num_images,); None: all. Left out, an image changes no other one's place among the
            rest.
    """

    def __init__(self, num_images: int, *, seed: int, epoch: int, kept: NDArray[np.bool_] | None = None) -> None:
        images = shuffled(philox_generator(seed, Purpose.ORDER, low=0, high=epoch), num_images)
        self._images = images if kept is None else images[kept[images]]

    def images_at(self, within: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._images[within].astype(np.int64)


class BalancedOrder:
    """An order of one epoch of N images in which all classes are equally frequent.

    With C non-empty classes, each class gets N / C positions, and each image of a class with n images gets N / (C n),
    both rounded up or down: systematic sampling (Madow, "On the theory of systematic sampling, II", 1949) of the images
    in a random order, class after class.

    Args:
        labels: (N,) the images' classes.
    """

    def __init__(self, labels: NDArray[np.integer], *, seed: int, epoch: int) -> None:
        generator = philox_generator(seed, Purpose.ORDER, low=0, high=epoch)
        images = shuffled(generator, len(labels))
        images = images[np.argsort(labels[images], kind="stable")]
        # For example 6 images, a to d of one class, e and f of another: each class gets 3 positions, so a to d are
        # expected 0.75 times and e and f 1.5 times. The sums 0.75 1.5 2.25 3 4.5 6 with an offset of 0.4, rounded down,
        # are 1 1 2 3 4 6: a once, b not at all, c, d and e once, and f twice.
        expected = balanced_share(labels)[images]
        offset = float(int(generator.random_raw()) >> 11) * 2.0**-53
        ends = np.floor(np.cumsum(expected) + offset).astype(np.int64)
        ends[-1] = len(labels)  # exact despite rounding
        times = np.diff(ends, prepend=0)
        permutation = shuffled(generator, len(labels))
        self._images = np.repeat(images, times)[permutation]
        self._nth = (np.arange(len(labels)) - np.repeat(ends - times, times))[permutation]

    def images_at(self, within: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._images[within].astype(np.int64)

    def nth_at(self, within: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number the positions that have the same image from 0, in no particular order; return each one's number."""
        return self._nth[within]


def balanced_share(labels: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the expected count of each image in an epoch of a balanced order, (N,); the sum is N."""
    counts = np.bincount(labels)
    return len(labels) / (np.count_nonzero(counts) * counts[labels])


@dataclass(frozen=True)
class SampleOrder:
    """The images at positions of the training sequence: a pure function that caches the epochs in use.

    Args:
        shuffle: Blocks for a block order, full for a uniformly random order, none for the order on disk; the labels of
            all images for a balanced order.
        repeats: the number of adjacent positions with the same image. Blocks are those of the order without repeats.
        kept: which images of the split take part, (N,) with `num_images` times True; None: all. Without them, a full
            order and that on disk are as they were; blocks and a balanced order are made of the images that take part.
    """

    num_images: int
    _: KW_ONLY
    seed: int
    shuffle: Literal["full", "none"] | Blocks | NDArray[np.integer]
    repeats: int = 1
    kept: NDArray[np.bool_] | None = None
    # Of the newest epoch and its neighbours: reading ahead reaches into the next one.
    _orders: dict[int, FullOrder | BlockOrder | BalancedOrder] = field(default_factory=dict)
    _making: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def _numbers(self) -> NDArray[np.int64] | None:
        """The images that take part, in the order on disk; None: all."""
        return None if self.kept is None else np.flatnonzero(self.kept)

    @cached_property
    def _most(self) -> int:
        """The largest number of positions that an image has in an epoch."""
        return int(np.ceil(balanced_share(self.shuffle).max())) if isinstance(self.shuffle, np.ndarray) else 1

    @classmethod
    def of(
        cls, config: SampleConfig, labels: NDArray[np.integer], kept: NDArray[np.bool_] | None = None
    ) -> "SampleOrder":
        """Return the order of a dataset whose images have these classes, (N,), or of those `kept`."""
        data, batch = config.data, config.batch
        assert data.exclude is None or kept is not None, "the images to leave out must be known"
        labels = labels if kept is None else labels[kept]
        blocks = Blocks(
            num_images=len(labels),
            block_images=data.block_images,
            window_blocks=data.window_blocks,
            global_batch=batch.global_batch // data.repeats,
            micro_batch=batch.micro_batch // data.repeats,
        )
        chosen = blocks if data.shuffle == "block" else labels if data.shuffle == "balanced" else data.shuffle
        return cls(len(labels), seed=data.seed, shuffle=chosen, repeats=data.repeats, kept=kept)

    def images_at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (images, draw numbers) at `positions`, each of the same shape.

        The draw number is the epoch; with repeats or in a balanced order it also numbers the repeats, so that no two
        positions with the same image have the same number and each is augmented differently.
        """
        if self.repeats > 1:
            images, passes = self._images_at(positions // self.repeats)
            return images, passes * self.repeats + positions % self.repeats
        return self._images_at(positions)

    def numbers_in_source(self, images: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of `images` in their dataset, by which they are cropped, mirrored and augmented; a mixture
        has several."""
        return images

    def _images_at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Do the same in the sequence without repeats: `positions` count images, and epochs count passes."""
        epochs, within = np.divmod(positions, self.num_images)
        if isinstance(self.shuffle, str) and self.shuffle == "none":
            return self._in_split(within), epochs
        images = np.empty_like(within)
        passes = epochs * self._most
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = self._order(int(epoch))
            found = order.images_at(within[here])
            images[here] = found if isinstance(order, FullOrder) else self._in_split(found)
            if isinstance(order, BalancedOrder):
                passes[here] += order.nth_at(within[here])
        return images, passes

    def _in_split(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images with these numbers among those that take part."""
        return numbers if self._numbers is None else self._numbers[numbers]

    def windows_at(self, positions: NDArray[np.int64]) -> list[tuple[int, int]] | None:
        """Return (epoch, window) of each window with an image at one of `positions`; None: the order has no windows."""
        if not isinstance(self.shuffle, Blocks):
            return None
        epochs, within = np.divmod(positions // self.repeats, self.num_images)
        return [
            (int(epoch), window)
            for epoch in np.unique(epochs)
            for window in self._block_order(int(epoch)).windows_at(within[epochs == epoch])
        ]

    def images_in(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Return all images of a window, block after block."""
        return self._in_split(self._block_order(epoch).images_in(window))

    def _block_order(self, epoch: int) -> BlockOrder:
        order = self._order(epoch)
        assert isinstance(order, BlockOrder)
        return order

    def _order(self, epoch: int) -> FullOrder | BlockOrder | BalancedOrder:
        order = self._orders.get(epoch)
        if order is not None:
            return order
        with self._making:
            if epoch not in self._orders:
                if isinstance(self.shuffle, Blocks):
                    order = BlockOrder(self.shuffle, seed=self.seed, epoch=epoch)
                elif isinstance(self.shuffle, np.ndarray):
                    order = BalancedOrder(self.shuffle, seed=self.seed, epoch=epoch)
                else:
                    whole = self.num_images if self.kept is None else len(self.kept)
                    order = FullOrder(whole, seed=self.seed, epoch=epoch, kept=self.kept)
                self._orders[epoch] = order
                for old in [e for e in self._orders if abs(e - epoch) > 1]:
                    del self._orders[old]
            return self._orders[epoch]
