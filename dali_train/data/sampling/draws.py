"""Crop boxes and flips as pure functions of (seed, image, draw number), and mixing of (seed, step, k)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dali_train.config import MixupConfig
from dali_train.data.sampling.rng import (
    Purpose,
    beta,
    exponential,
    logarithm,
    philox_generator,
    shuffled,
    uniform,
    uniforms,
)

Candidates = Callable[[NDArray[np.intp], NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.bool_]]]
"""Takes (rows, attempts), returns (boxes, whether they fit): of image ``rows[i]`` at ``attempts[i]``, from 1."""


@dataclass(frozen=True, kw_only=True)
class DrawInput:
    """What the draws of n images depend on besides the seed, each (n,)."""

    numbers: NDArray[np.int64]  # in the split of their dataset
    draw_numbers: NDArray[np.int64]  # see `SampleOrder.images_at`; each view has its own
    heights: NDArray[np.int64]  # pixels
    widths: NDArray[np.int64]


def crop_boxes(
    seed: int,
    images: DrawInput,
    *,
    area: tuple[float, float],
    aspect: tuple[float, float],
    purpose: Purpose = Purpose.CROP,
) -> NDArray[np.int32]:
    """Draw torchvision's RandomResizedCrop, one box per image: (top, left, height, width) in pixels, shape (n, 4).

    Up to ten attempts with an area uniform in `area` (fraction of the image) and an aspect ratio log-uniform in
    `aspect` (width / height), then the largest central box with an allowed ratio.
    """

    def candidates(rows: NDArray[np.intp], attempts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        draws = uniform(seed, purpose, attempts, low=images.numbers[rows], high=images.draw_numbers[rows])
        height, width = images.heights[rows], images.widths[rows]
        target = height * width * (area[0] + draws[:, 0] * (area[1] - area[0]))
        ratio = exponential(log_aspect[0] + draws[:, 1] * (log_aspect[1] - log_aspect[0]))
        box_width = np.rint(np.sqrt(target * ratio)).astype(np.int64)
        box_height = np.rint(np.sqrt(target / ratio)).astype(np.int64)
        top = (draws[:, 2] * (height - box_height + 1)).astype(np.int64)
        left = (draws[:, 3] * (width - box_width + 1)).astype(np.int64)
        fits = (box_width > 0) & (box_width <= width) & (box_height > 0) & (box_height <= height)
        return np.stack([top, left, box_height, box_width], axis=-1), fits

    def central(rows: NDArray[np.intp]) -> NDArray[np.int64]:
        height, width = images.heights[rows], images.widths[rows]
        box_width = np.clip(np.rint(height * aspect[1]).astype(np.int64), 1, width)
        box_height = np.clip(np.rint(width / aspect[0]).astype(np.int64), 1, height)
        return np.stack([(height - box_height) // 2, (width - box_width) // 2, box_height, box_width], axis=-1)

    log_aspect = logarithm(np.array(aspect, dtype=np.float64))
    return _first_that_fits(candidates, len(images.numbers), central)


def inception_boxes(
    seed: int, images: DrawInput, *, area: tuple[float, float], aspect: tuple[float, float]
) -> NDArray[np.int32]:
    """Draw TensorFlow's sample_distorted_bounding_box, the original Inception crop, in the form of `crop_boxes`.

    The aspect ratio is uniform in `aspect`. The height is uniform between that of the smallest `area` with that ratio
    and that of the largest one that fits into the image, so small crops are more frequent than with a uniform area. As
    in TensorFlow, a box that does not start at 0 never reaches the last row and column. After ten attempts the box is
    the whole image.
    """

    def candidates(rows: NDArray[np.intp], attempts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        draws = uniform(seed, Purpose.CROP, attempts, low=images.numbers[rows], high=images.draw_numbers[rows])
        height = images.heights[rows]
        width = images.widths[rows]
        least = area[0] * height * width
        most = area[1] * height * width
        ratio = aspect[0] + draws[:, 0] * (aspect[1] - aspect[0])  # of width to height

        def width_at(box_height: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.rint(box_height * ratio)

        # The largest height whose width, which is rounded, still fits: at ratio 1.5 into 400 x 300 (width x height) the
        # height of the whole area, 283, would have a width of 424, so it is 400.5 / 1.5 = 267.
        highest = np.minimum(np.rint(np.sqrt(most / ratio)), height)
        highest = np.where(width_at(highest) > width, np.floor((width + 0.5 - 1e-7) / ratio), highest)
        lowest = np.minimum(np.rint(np.sqrt(least / ratio)), highest)
        box_height = lowest + np.floor(draws[:, 1] * (highest - lowest + 1))
        # Both sides are rounded, so the area may be just outside of the range: one row more or less brings it back.
        is_too_small = width_at(box_height) * box_height < least
        box_height += is_too_small
        is_too_large = width_at(box_height) * box_height > most
        box_height -= is_too_large
        box_width = width_at(box_height)
        covered = box_width * box_height
        has_area = (covered >= least) & (covered <= most) & (covered > 0)
        fits = has_area & (box_width <= width) & (box_height <= height)
        top = np.floor(draws[:, 2] * (height - box_height))
        left = np.floor(draws[:, 3] * (width - box_width))
        return np.stack([top, left, box_height, box_width], axis=-1).astype(np.int64), fits

    def complete(rows: NDArray[np.intp]) -> NDArray[np.int64]:
        none = np.zeros_like(images.heights[rows])
        return np.stack([none, none, images.heights[rows], images.widths[rows]], axis=-1)

    return _first_that_fits(candidates, len(images.numbers), complete)


BOXES = {"random-resized": crop_boxes, "inception": inception_boxes}
"""The values of data.crop."""


def _first_that_fits(
    candidates: Candidates, count: int, otherwise: Callable[[NDArray[np.intp]], NDArray[np.int64]]
) -> NDArray[np.int32]:
    """Return the first of ten candidates that fits, for each of `count` images, or `otherwise` if none fits."""
    boxes, fits = candidates(np.arange(count), np.ones(count, dtype=np.int64))
    pending = np.flatnonzero(~fits)
    if len(pending):
        # All other attempts at once, because the overhead of a NumPy call exceeds the arithmetic here.
        later, fits = candidates(np.tile(pending, 9), np.repeat(np.arange(2, 11), len(pending)))
        later = later.reshape(9, -1, 4)
        fits = fits.reshape(9, -1)
        first = later[fits.argmax(axis=0), np.arange(len(pending))]
        boxes[pending] = np.where(np.logical_or.reduce(fits)[:, None], first, otherwise(pending))
    return boxes.astype(np.int32)


def flips(
    seed: int, images: DrawInput, *, probability: float, vertical: float = 0.0, alternating: bool = False
) -> NDArray[np.int32]:
    """Return 1 where the image is mirrored, 2 where it is upside down, 3 where it is both, else 0, shape (n,).

    Args:
        probability: of mirroring.
        vertical: the probability of turning upside down.
        alternating: mirroring is drawn for number 0 and inverted for every odd one.
    """
    block = np.ones_like(images.numbers)
    draw_numbers = np.zeros_like(images.draw_numbers) if alternating else images.draw_numbers
    draws = uniform(seed, Purpose.FLIP, block, low=images.numbers, high=draw_numbers)
    mirrored = draws[:, 0] < probability
    flipped = (mirrored ^ (images.draw_numbers % 2 == 1) if alternating else mirrored).astype(np.int32)
    if vertical > 0:  # by its own draw number, also if mirroring alternates
        draws = uniform(seed, Purpose.FLIP, 2 * block, low=images.numbers, high=images.draw_numbers)
        flipped += 2 * (draws[:, 0] < vertical).astype(np.int32)
    return flipped


def filters(seed: int, images: DrawInput, interpolation: str) -> NDArray[np.int32]:
    """Return 1 where the image is resized bicubically and 0 where bilinearly, each with half of the probability, shape
    (n,); shape (0,) unless data.interpolation is random."""
    if interpolation != "random":
        return np.zeros(0, dtype=np.int32)
    draws = uniform(seed, Purpose.FILTER, np.ones_like(images.numbers), low=images.numbers, high=images.draw_numbers)
    return (draws[:, 0] < 0.5).astype(np.int32)


def padded_crops(
    seed: int, images: DrawInput, *, side: int, padding: int, reflect: bool = False
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Draw squares of `side` pixels from images with `padding` pixels on each side, as torchvision's RandomCrop.

    The square must be larger than the padding, and not larger than the padded images.

    Returns:
        boxes, (n, 4): top, left, height, width in pixels of the stored image: the part of the square inside the image,
            and with `reflect` also the pixels that the padding in the square repeats.
        offsets, (n, 2): where the box begins in the square, from the top and from the left; with `reflect` it may begin
            before the square, at a negative offset.
    """
    draws = uniform(seed, Purpose.CROP, np.ones_like(images.numbers), low=images.numbers, high=images.draw_numbers)
    starts = []
    lengths = []
    offsets = []
    for axis, length in enumerate((images.heights, images.widths)):
        start = np.floor(draws[:, axis] * (length + 2 * padding - side + 1)).astype(np.int64) - padding
        first = np.maximum(start, 0)
        end = np.minimum(start + side, length)
        if reflect:  # pixel -i is a copy of i, and pixel length - 1 + i one of length - 1 - i
            first = np.minimum(first, np.maximum(2 * length - 1 - (start + side), 0))
            end = np.maximum(end, np.minimum(1 - start, length))
        starts.append(first)
        lengths.append(end - first)
        offsets.append(first - start)
    return np.stack([*starts, *lengths], axis=-1).astype(np.int32), np.stack(offsets, axis=-1).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """The mixing of one micro-batch, applied by `mix` in data/loading/pipelines.py. One row per image."""

    partners: NDArray[np.int32]  # index of the partner within the micro-batch
    lambdas: NDArray[np.float32]  # weight of the image itself, 1 - lambda goes to the partner
    cuts: NDArray[np.int32]  # (n, 4): CutMix's box: top, left, height, width in pixels; all zero: no CutMix


def draw_mixing(config: MixupConfig, seed: int, *, step: int, k: int, size: int, side: int) -> Mixing:
    """Draw the mixing of a micro-batch of `size` images with `side` pixels.

    Mixup (Zhang et al., arXiv 1710.09412) draws lambda from Beta(alpha, alpha). CutMix (Yun et al., arXiv 1905.04899)
    pastes a square of about 1 - lambda of the area around a uniformly random center. The square is clipped to the
    image, and lambda becomes the remaining fraction of the image. Rounded as in timm. With both alphas 0 nothing is
    mixed.
    """
    cuts = np.zeros((size, 4), dtype=np.int32)
    mixes = config.enabled
    if mixes and config.probability < 1:
        (draw,) = uniforms(philox_generator(seed, Purpose.MIXED, low=k, high=step), 1)
        mixes = draw < config.probability
    if not mixes:
        return Mixing(partners=np.arange(size, dtype=np.int32), lambdas=np.ones(size, dtype=np.float32), cuts=cuts)
    generator = philox_generator(seed, Purpose.MIXUP, low=k, high=step)
    partners = shuffled(generator, size).astype(np.int32)
    share = 1.0
    if config.alpha > 0:
        share = beta(generator, config.alpha)
    if config.cutmix_alpha > 0:
        more = philox_generator(seed, Purpose.CUTMIX, low=k, high=step)
        switch, y, x = uniforms(more, 3)
        if config.alpha == 0 or switch < config.switch_probability:
            box = _cut_box(beta(more, config.cutmix_alpha), y, x, side)
            share = 1 - box[2] * box[3] / side**2
            cuts[:] = box
    return Mixing(partners=partners, lambdas=np.full(size, share, dtype=np.float32), cuts=cuts)


def _cut_box(share: float, y: float, x: float, side: int) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a square of 1 - `share` of the image's area, clipped to the image.

    Its center is (y, x), in fractions of the image.
    """
    cut = int(side * np.sqrt(1 - share))
    (top, bottom), (left, right) = (
        (max(center - cut // 2, 0), min(center + (cut + 1) // 2, side)) for center in (int(y * side), int(x * side))
    )
    return top, left, bottom - top, right - left
