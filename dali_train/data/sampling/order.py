"""Which image stands at which position of the training sequence.

The sequence is continuous: position p is image ``p mod N`` of the shuffled epoch ``p div N``, so an epoch has every
image exactly once and nothing is dropped or padded where epochs meet, whatever the batch size.
"""

import threading
from dataclasses import KW_ONLY, dataclass, field
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


@dataclass(frozen=True)
class SampleOrder:
    """The images at positions of the training sequence: a pure function, which remembers the epochs in use.

    Args:
        shuffle: Blocks for a block order, full for a uniformly random one, none for that on disk.
        repeats: so many neighbouring positions have the same image. Blocks are those of the order without repeats.
    """

    num_images: int
    _: KW_ONLY
    seed: int
    shuffle: Literal["full", "none"] | Blocks
    repeats: int = 1
    _orders: dict[int, FullOrder | BlockOrder] = field(default_factory=dict)
    # Reading ahead asks too, and makes the next epoch's order before it begins.
    _making: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, config: Config, num_images: int) -> "SampleOrder":
        data, batch = config.data, config.batch
        blocks = Blocks(
            num_images=num_images,
            block_images=data.block_images,
            window_blocks=data.window_blocks,
            global_batch=batch.global_batch // data.repeats,
            micro_batch=batch.micro_batch // data.repeats,
        )
        return cls(
            num_images,
            seed=data.seed,
            shuffle=blocks if data.shuffle == "block" else data.shuffle,
            repeats=data.repeats,
        )

    def images_at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (images, epochs) at `positions`, each of the same shape.

        With repeats, epochs count the times that an image has been seen: no two of the same image are equal, so that
        each is augmented differently.
        """
        if self.repeats > 1:
            images, passes = self._images_at(positions // self.repeats)
            return images, passes * self.repeats + positions % self.repeats
        return self._images_at(positions)

    def _images_at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the same in the sequence without repeats, where `positions` count images and epochs count passes."""
        epochs, within = np.divmod(positions, self.num_images)
        if self.shuffle == "none":
            return within, epochs
        images = np.empty_like(within)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            images[here] = self._order(int(epoch)).images_at(within[here])
        return images, epochs

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
        """Return all images of such a window, block after block."""
        return self._block_order(epoch).images_in(window)

    def _block_order(self, epoch: int) -> BlockOrder:
        order = self._order(epoch)
        assert isinstance(order, BlockOrder)
        return order

    def _order(self, epoch: int) -> FullOrder | BlockOrder:
        order = self._orders.get(epoch)
        if order is not None:
            return order
        with self._making:
            if epoch not in self._orders:
                if isinstance(self.shuffle, Blocks):
                    order = BlockOrder(self.shuffle, seed=self.seed, epoch=epoch)
                else:
                    order = FullOrder(self.num_images, seed=self.seed, epoch=epoch)
                self._orders[epoch] = order
                for old in [e for e in self._orders if abs(e - epoch) > 1]:
                    del self._orders[old]
            return self._orders[epoch]
