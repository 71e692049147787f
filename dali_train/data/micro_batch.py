"""The invariant's core: micro-batch k of step s is a pure function of (dataset, seed, s, k).

The world size is not among the arguments. Whoever computes a micro-batch computes the same one, so a run can be
spread over any number of ranks, stopped, and gone on with on another number.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dali_train.config import Config
from dali_train.data.draws import Purpose, crop_boxes, flips, mixup, torch_seed
from dali_train.data.order import SampleOrder


@dataclass(frozen=True, kw_only=True)
class MicroBatchDraws:
    """What (seed, step, k) decide whatever the images are: all that is known ahead of a stream. One row an image."""

    step: int
    k: int
    partners: NDArray[np.int32]  # place of the Mixup partner within the micro-batch
    lambdas: NDArray[np.float32]  # weight of the image itself, 1 - lambda goes to the partner
    dropout_seed: int

    @classmethod
    def at(cls, config: Config, step: int, k: int) -> "MicroBatchDraws":
        seed = config.data.seed
        partners, lambdas = mixup(
            seed, step=step, k=k, size=config.batch.micro_batch, alpha=config.mixup.alpha, per_image=config.mixup.per_image
        )
        dropout_seed = torch_seed(seed, Purpose.DROPOUT, step=step, k=k)
        return cls(step=step, k=k, partners=partners, lambdas=lambdas, dropout_seed=dropout_seed)


@dataclass(frozen=True, kw_only=True)
class MicroBatch(MicroBatchDraws):
    """Everything about one micro-batch but the pixels. Arrays have one row an image, in the batch's order."""

    positions: NDArray[np.int64]  # in the training stream
    images: NDArray[np.int64]  # numbers in the split's index
    labels: NDArray[np.int64]  # from 0
    boxes: NDArray[np.int32]  # (n, 4): top, left, height, width in pixels of the stored image
    flips: NDArray[np.int32]  # 1: mirrored

    @property
    def corners(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(anchors, shapes) of the boxes, each (n, 2), as a decoder takes them."""
        return np.ascontiguousarray(self.boxes[:, :2]), np.ascontiguousarray(self.boxes[:, 2:])

    @property
    def targets(self) -> NDArray[np.int64]:
        """(n, 2): the class of each image and of its Mixup partner."""
        return np.stack([self.labels, self.labels[self.partners]], axis=-1)


class MicroBatches:
    """``micro_batches(step, k)`` for one dataset and config.

    Args:
        rows: the training split's index (``INDEX_DTYPE``).
    """

    def __init__(self, rows: NDArray[np.void], config: Config) -> None:
        self.num_per_step = config.batch.global_batch // config.batch.micro_batch
        self._rows = rows
        self._config = config
        self.order = SampleOrder.of(config, len(rows))

    def positions(self, step: int, k: int) -> NDArray[np.int64]:
        """Where its images stand in the training stream."""
        batch = self._config.batch
        start = step * batch.global_batch + k * batch.micro_batch
        return np.arange(start, start + batch.micro_batch, dtype=np.int64)

    def __call__(self, step: int, k: int) -> MicroBatch:
        data = self._config.data
        positions = self.positions(step, k)
        images, epochs = self.order.images_at(positions)
        rows = self._rows[images]
        return MicroBatch(
            **vars(MicroBatchDraws.at(self._config, step, k)),
            positions=positions,
            images=images,
            labels=rows["label"].astype(np.int64),
            boxes=crop_boxes(
                data.seed, epochs=epochs, images=images,
                heights=rows["height"].astype(np.int64), widths=rows["width"].astype(np.int64),
                area=data.crop_area, aspect=data.crop_aspect,
            ),
            flips=flips(data.seed, epochs=epochs, images=images, probability=data.horizontal_flip),
        )  # fmt: skip
