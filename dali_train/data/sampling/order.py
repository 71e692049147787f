"""Which image is at which position of the training sequence.

The sequence is continuous: position p is image ``p mod N`` of the shuffled epoch ``p div N``. Every epoch has each
image exactly once (except in a balanced order), and nothing is dropped or padded between epochs, whatever the batch
size.
"""

import threading
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dali_train.config import Config
from dali_train.data.sampling.block_order import BlockOrder, Blocks
from dali_train.data.sampling.rng import Purpose, philox_generator, shuffled


class FullOrder:
    """A uniformly random order of one epoch, 4 bytes per image."""

    def __init__(self, num_images: int, *, seed: int, epoch: int) -> None:
        self._images = shuffled(philox_generator(seed, Purpose.ORDER, low=0, high=epoch), num_images)

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
        expected = balanced_share(labels)[images]
        offset = float(int(generator.random_raw()) >> 11) * 2.0**-53
        ends = np.floor(np.cumsum(expected) + offset).astype(np.int64)
        ends[-1] = len(labels)  # exact despite rounding
        times = np.diff(ends, prepend=0)
        places = shuffled(generator, len(labels))
        self._images = np.repeat(images, times)[places]
        self._nth = (np.arange(len(labels)) - np.repeat(ends - times, times))[places]

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
    """

    num_images: int
    _: KW_ONLY
    seed: int
    shuffle: Literal["full", "none"] | Blocks | NDArray[np.integer]
    repeats: int = 1
    # Of the newest epoch and its neighbours: reading ahead reaches into the next one.
    _orders: dict[int, FullOrder | BlockOrder | BalancedOrder] = field(default_factory=dict)
    _making: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def _most(self) -> int:
        """The largest number of positions that an image has in an epoch."""
        return int(np.ceil(balanced_share(self.shuffle).max())) if isinstance(self.shuffle, np.ndarray) else 1

    @classmethod
    def of(cls, config: Config, labels: NDArray[np.integer]) -> "SampleOrder":
        """Return the order of a dataset whose images have these classes, (N,)."""
        data, batch = config.data, config.batch
        blocks = Blocks(
            num_images=len(labels),
            block_images=data.block_images,
            window_blocks=data.window_blocks,
            global_batch=batch.global_batch // data.repeats,
            micro_batch=batch.micro_batch // data.repeats,
        )
        chosen = blocks if data.shuffle == "block" else labels if data.shuffle == "balanced" else data.shuffle
        return cls(len(labels), seed=data.seed, shuffle=chosen, repeats=data.repeats)

    def images_at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (images, epochs) at `positions`, each of the same shape.

        With repeats or in a balanced order, `epochs` also numbers the repeats, so that no two positions with the same
        image have the same number and each is augmented differently.
        """
        if self.repeats > 1:
            images, passes = self._images_at(positions // self.repeats)
            return images, passes * self.repeats + positions % self.repeats
        return self._images_at(positions)

    def _images_at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Do the same in the sequence without repeats: `positions` count images, and epochs count passes."""
        epochs, within = np.divmod(positions, self.num_images)
        if isinstance(self.shuffle, str) and self.shuffle == "none":
            return within, epochs
        images, passes = np.empty_like(within), epochs * self._most
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = self._order(int(epoch))
            images[here] = order.images_at(within[here])
            if isinstance(order, BalancedOrder):
                passes[here] += order.nth_at(within[here])
        return images, passes

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
        return self._block_order(epoch).images_in(window)

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
                    order = FullOrder(self.num_images, seed=self.seed, epoch=epoch)
                self._orders[epoch] = order
                for old in [e for e in self._orders if abs(e - epoch) > 1]:
                    del self._orders[old]
            return self._orders[epoch]
