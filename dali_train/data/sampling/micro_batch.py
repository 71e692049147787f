"""The core of the invariant: micro-batch k of step s is a pure function of (dataset, seed, s, k).

The world size is not an argument. Every rank would compute the same micro-batch, so a run can be spread over any number
of ranks, stopped, and resumed on another number. A `Segment` says which of them one rank computes.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dali_train.config import MixupConfig, SampleConfig, View
from dali_train.config.check import require
from dali_train.data.sampling.draws import BOXES, DrawInput, Mixing, draw_mixing, filters, flips, padded_crops
from dali_train.data.sampling.order import SampleOrder
from dali_train.data.sampling.policy import draw_operators, erased_boxes, erasing_noise, policy_of
from dali_train.data.sampling.rng import Purpose, torch_seed

StepAndK = tuple[int, int]
"""Which micro-batch: its step, and its number in it."""

# Of micro-batches that are drawn together: the next ones must be ready before those in the queues are used up.
_IMAGES_AT_ONCE = 2048
_MOST_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Everything about one micro-batch except the pixels. Arrays have one row per image, in the batch's order."""

    step: int
    k: int
    positions: NDArray[np.int64]  # in the training sequence
    images: NDArray[np.int64]  # rows of the split's index; -1 with data.reader dali, where only DALI knows them
    labels: NDArray[np.int64]  # from 0; -1 with data.reader dali
    boxes: NDArray[np.int32]  # (n, 4): top, left, height, width in pixels of the stored image
    offsets: NDArray[np.int32]  # (n, 2): where the box begins, relative to the square of data.crop_side; else 0
    filters: NDArray[np.int32]  # with data.interpolation random, 0: resized bilinearly, 1: bicubically; else empty
    flips: NDArray[np.int32]  # 1: mirrored, 2: upside down, 3: both
    operators: NDArray[np.int32]  # (n, steps): indices into the policy's names, applied one after the other
    levels: NDArray[np.float32]  # (n, steps): signed strength of each operator
    erased: NDArray[np.int32]  # (n, 4): top, left, height, width in pixels of the training image; all zero: none
    noise: NDArray[np.uint8]  # (size, size, 3): an erased box shows its part of this image; empty: the mean color
    partners: NDArray[np.int32]  # index within the micro-batch of the image that this one is mixed with
    lambdas: NDArray[np.float32]  # weight of the image itself, 1 - lambda goes to the partner
    cuts: NDArray[np.int32]  # (n, 4): CutMix's box: top, left, height, width in pixels; all zero: no CutMix
    dropout_seed: int
    size: int  # side of the training images, in pixels
    # All views of the images, each with its own boxes, flips and other draws; this is the first. Empty: there is one.
    views: tuple["MicroBatch", ...] = ()

    @property
    def is_mixed(self) -> bool:
        """Whether any image is mixed with its partner."""
        return bool((self.lambdas < 1).any())

    @property
    def corners(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return (anchors, shapes) of the boxes to decode, each (n, 2), as a decoder takes them: around all views."""
        boxes = np.stack([view.boxes for view in self.views or (self,)])
        anchors = boxes[..., :2].min(axis=0)
        ends = (boxes[..., :2] + boxes[..., 2:]).max(axis=0)
        return np.ascontiguousarray(anchors), np.ascontiguousarray(ends - anchors)

    @property
    def targets(self) -> NDArray[np.int64]:
        """Return the class of each image and of its partner, (n, 2)."""
        return np.stack([self.labels, self.labels[self.partners]], axis=-1)


def view_configs(config: SampleConfig, views: Sequence[View]) -> list[SampleConfig]:
    """Return the settings of each single view."""
    single: list[SampleConfig] = []
    for view in views:
        data = replace(config.data, train_size=view.size, crop_area=view.area or config.data.crop_area)
        single += [replace(config, data=data)] * view.n
    return single


class MicroBatches:
    """``micro_batches(step, k)`` for one dataset and config.

    Args:
        rows: the training split's index (``INDEX_DTYPE``).
        views: of every image; none: one, as `config` says.
        order: of the images that take part, see `Split.order`; None: of all images.
    """

    def __init__(
        self,
        rows: NDArray[np.void],
        config: SampleConfig,
        views: Sequence[View] = (),
        order: SampleOrder | None = None,
    ) -> None:
        self.num_per_step = config.batch.num_micro_batches
        self._rows = rows
        self._config = config
        self.order = SampleOrder.of(config, rows["label"]) if order is None else order
        num_images = self.order.num_images
        self._config_at = config.by_step(num_images)  # in a `Segment` the same at each step; `prove` has whole runs
        self._views = view_configs(config, views)
        until = config.mixup.until_epoch
        self._mixing_ends = math.inf if until is None else config.steps(until, num_images)
        self._policy = policy_of(config.data)
        side, padding = config.data.crop_side, config.data.crop_padding
        if side is not None and len(rows):
            smallest = int(min(rows["height"].min(), rows["width"].min()))
            require(
                side <= smallest + 2 * padding,
                f"data.crop_side is {side}, but the dataset has an image with a side of {smallest} pixels: use at most "
                f"{smallest + 2 * padding}, or data.crop_padding {-(-(side - smallest) // 2)}",
            )
            require(
                config.data.crop_padding_mode == "black" or padding < smallest,
                f"data.crop_padding is {padding}, but the dataset has an image with a side of {smallest} pixels, which "
                f"has only {smallest - 1} to reflect: use at most {smallest - 1}, or data.crop_padding_mode black",
            )

    def positions(self, step: int, k: int) -> NDArray[np.int64]:
        """Return the positions of micro-batch `k` of `step` in the training sequence, (n,)."""
        batch = self._config.batch
        start = step * batch.global_batch + k * batch.micro_batch
        return np.arange(start, start + batch.micro_batch, dtype=np.int64)

    def mixing(self, step: int, k: int) -> Mixing:
        """Return only the mixing of micro-batch `k` of `step`, without the other draws."""
        config = self._config_at(step)
        mixup = config.mixup if step < self._mixing_ends else MixupConfig()
        size = config.batch.micro_batch
        return draw_mixing(mixup, config.data.seed, step=step, k=k, size=size, side=config.data.train_size)

    def __call__(self, step: int, k: int) -> MicroBatch:
        (micro_batch,) = self._drawn([(step, k)])
        return micro_batch

    def following(self, wanted: Iterable[StepAndK]) -> Iterator[MicroBatch]:
        """Yield the micro-batches `wanted`, which are drawn some at a time.

        A draw is hundreds of NumPy calls of a few microseconds. From 500 elements on each of them releases the GIL and
        waits for it again, and so does each operator of the model in the thread that launches kernels: drawn one by
        one, a micro-batch of 256 images delayed that thread by 3 to 5 ms, though it needed 1 ms (measured).
        """
        num_at_once = max(1, min(_MOST_AT_ONCE, _IMAGES_AT_ONCE // self._config.batch.micro_batch))
        wanted = iter(wanted)
        while some := list(itertools.islice(wanted, num_at_once)):
            for _, alike in itertools.groupby(some, key=lambda step_and_k: id(self._config_at(step_and_k[0]))):
                yield from self._drawn(list(alike))

    def _drawn(self, wanted: Sequence[StepAndK]) -> list[MicroBatch]:
        """Return the micro-batches `wanted`, whose steps have the same settings."""
        if not self._views:
            return self._drawn_as(self._config_at(wanted[0][0]), wanted)
        views = [self._drawn_as(config, wanted, number, len(self._views)) for number, config in enumerate(self._views)]
        return [replace(several[0], views=several) for several in zip(*views, strict=True)]

    def _drawn_as(
        self, config: SampleConfig, wanted: Sequence[StepAndK], view: int = 0, num_views: int = 1
    ) -> list[MicroBatch]:
        """Return the micro-batches `wanted`, or one view of them, with the settings of `config`.

        What is drawn for each image is drawn for all of them at once; the same numbers, whatever is drawn beside them.
        """
        data = config.data
        seed = config.data.seed
        positions = np.concatenate([self.positions(step, k) for step, k in wanted])
        images, draw_numbers = self.order.images_at(positions)
        rows = self._rows[images]
        heights, widths = rows["height"].astype(np.int64), rows["width"].astype(np.int64)
        # An image has three numbers: `images`, its row in this split; its row in its own dataset, which differs in a
        # mixture; and `draw_numbers`, how often it was there before, so that each time gets other draws.
        draw_input = DrawInput(
            numbers=self.order.numbers_in_source(images),
            draw_numbers=draw_numbers * num_views + view,  # as for repeats: no two views of an image have the same
            heights=heights,
            widths=widths,
        )
        if data.crop_side is None:
            offsets = np.zeros((len(images), 2), dtype=np.int32)
            boxes = BOXES[data.crop](seed, draw_input, area=data.crop_area, aspect=data.crop_aspect)
        else:
            reflect = data.crop_padding_mode == "reflect"
            boxes, offsets = padded_crops(
                seed, draw_input, side=data.crop_side, padding=data.crop_padding, reflect=reflect
            )
        operators, levels = draw_operators(seed, self._policy, draw_input)
        of_images: dict[str, Any] = {
            "positions": positions,
            "images": images,
            "labels": rows["label"].astype(np.int64),
            "boxes": boxes,
            "offsets": offsets,
            "filters": filters(seed, draw_input, data.interpolation),
            "flips": flips(
                seed,
                draw_input,
                probability=data.horizontal_flip,
                vertical=data.vertical_flip,
                alternating=data.alternating_flip,
            ),
            "operators": operators,
            "levels": levels,
            "erased": erased_boxes(seed, draw_input, probability=data.random_erasing, size=data.train_size),
        }
        size = config.batch.micro_batch
        return [
            MicroBatch(
                step=step,
                k=k,
                **{name: of_all[number * size : (number + 1) * size] for name, of_all in of_images.items()},
                noise=erasing_noise(data, step=step, k=k * num_views + view),
                **vars(self.mixing(step, k)),
                dropout_seed=torch_seed(seed, Purpose.DROPOUT, step=step, k=k),
                size=data.train_size,
            )
            for number, (step, k) in enumerate(wanted)
        ]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The micro-batches of one data-parallel coordinate from `start_step` to before `end_step`, while training images
    have one size.

    Coordinate r of W has the micro-batches r, r + W, r + 2 W, ... of every step. A coordinate, not the global rank:
    with model parallelism several ranks share one.

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
