"""Which image stands at which position of the training stream.

The stream is continuous: position p is image ``p mod N`` of the shuffled epoch ``p div N``, so an epoch has every
image exactly once and nothing is dropped or padded where epochs meet, whatever the batch size.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dali_train.data.draws import Purpose, philox_generator, shuffled

Shuffle = Literal["full", "none"]


class SampleOrder:
    """Looks positions of the stream up: a pure function, which remembers the one or two epochs in use."""

    def __init__(self, num_images: int, *, seed: int, shuffle: Shuffle) -> None:
        self.num_images = num_images
        self.seed = seed
        self.shuffle = shuffle
        self._orders: dict[int, NDArray[np.uint32]] = {}

    def images_at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(images, epochs) at `positions`, each of the same shape."""
        epochs, within = np.divmod(positions, self.num_images)
        if self.shuffle == "none":
            return within, epochs
        images = np.empty_like(within)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            images[here] = self._order(int(epoch))[within[here]]
        return images, epochs

    def _order(self, epoch: int) -> NDArray[np.uint32]:
        order = self._orders.get(epoch)
        if order is None:
            order = shuffled(philox_generator(self.seed, Purpose.ORDER, low=0, high=epoch), self.num_images)
            neighbours = {e: o for e, o in self._orders.items() if abs(e - epoch) == 1}
            self._orders = neighbours | {epoch: order}
        return order
