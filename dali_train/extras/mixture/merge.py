"""The merge of the sample orders of several datasets into one: a pure function of datasets, weights, seed and position.

Micro-batch b of a run (of step s its number k, b = s K + k) has so many images of each source, see `Shares`, and so
many had the micro-batches before it: these numbers are positions in the source's own sequence, which is the one that it
has alone. So nothing is drawn, and nothing has state.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dali_train.config import SampleConfig
from dali_train.config.check import as_typed
from dali_train.data.sampling.order import SampleOrder
from dali_train.errors import ConfigError

_PORTION = 256  # micro-batches whose counts are computed and kept together


class Shares:
    """How many images of each source the micro-batches have, as nearly to their exact shares as whole images allow.

    With weights w of sum 1, micro-batches of n images and source i: every micro-batch has n w[i] of its images, and the
    first b together b n w[i], each rounded up or down. That is a table with given sums whose entries and sums from the
    top are rounded, which always exists (such flows are integral); "The chairman assignment problem" of R. Tijdeman
    (Discrete Mathematics 32, 1980) is the one with n = 1. Row by row, the images that are left after rounding down go
    to the sources that need theirs soonest. A test checks the counts.

    Weights are exact as they are written: 0.1 is a tenth. The counts repeat after as many micro-batches as the weights'
    common denominator says.

    Args:
        weights: of the sources, from 0 on, with a sum over 0.
        micro_batch: images of a micro-batch.
    """

    def __init__(self, weights: Sequence[float], micro_batch: int) -> None:
        exact = [Fraction(repr(weight)) for weight in weights]
        shares = [micro_batch * weight / sum(exact) for weight in exact]
        self.period = math.lcm(*(share.denominator for share in shares))
        self._whole = np.array([math.floor(share) for share in shares], dtype=np.int64)
        self._rest = [int(share % 1 * self.period) for share in shares]  # in units of 1 / period
        self._num_left = sum(self._rest) // self.period  # images of a micro-batch that are not in `_whole`
        self._starts = [(0,) * len(shares)]  # of each portion: how many of these each source got before
        self._portion = lru_cache(maxsize=8)(self._counted)
        self._counting = threading.Lock()

    def before(self, number: int) -> NDArray[np.int64]:
        """Return how many images of each source the first `number` micro-batches have, (sources,)."""
        periods, rest = divmod(number, self.period)
        with self._counting:
            while len(self._starts) <= rest // _PORTION:
                self._starts.append(self._counted(len(self._starts) - 1)[-1])
            left = self._portion(rest // _PORTION)[rest % _PORTION]
        given = [periods * rest + count for rest, count in zip(self._rest, left, strict=True)]
        return number * self._whole + np.array(given, dtype=np.int64)

    def _counted(self, portion: int) -> list[tuple[int, ...]]:
        """Return how many of the images left each source got before each micro-batch of a portion, and after it."""
        given = list(self._starts[portion])
        rows = [tuple(given)]
        for number in range(portion * _PORTION, (portion + 1) * _PORTION):
            due = [i for i, rest in enumerate(self._rest) if (number + 1) * rest > given[i] * self.period]
            due.sort(key=lambda i: self._urgency(i, given[i]))
            for i in due[: self._num_left]:
                given[i] += 1
            rows.append(tuple(given))
        return rows

    def _urgency(self, source: int, given: int) -> tuple[int, ...]:
        """Return what orders the sources that are due, the most urgent first.

        A source with rate r, in images a micro-batch, must have image j in one of the micro-batches floor((j - 1) / r)
        to ceil(j / r) - 1. That makes it a task of a fair schedule, and with the order of PD2 none is late, however
        many there are (proof: J. Anderson and A. Srinivasan, "Mixed Pfair/ERfair scheduling of asynchronous periodic
        tasks", Journal of Computer and System Sciences 68, 2004). First comes

        1. the earlier deadline;
        2. the source whose next two images may have the last micro-batch before the deadline in common: with the one
           there, the other has a micro-batch less;
        3. with r from one half on, where a row of such images can follow, the one whose row ends later. Its end is the
           first deadline from there on of the sequence with rate 1 - r, the micro-batches without an image.

        What is equal then may come in any order. The deadline after the next decides, as it did for mixtures of two
        before there was a third rule, without which weights 30 25 30 9 9 failed at micro-batch 11 of 34 images.
        """
        rest, period = self._rest[source], self.period
        levels = [(given + 1) * period, (given + 2) * period]
        first, second = [(_ceil(level, rest), level // rest + 1) for level in levels]
        end = 0
        if 2 * rest >= period:
            gaps = period - rest
            end = _ceil(_ceil(first[0] * gaps, period) * period, gaps)
        return (*first, -end, *second)


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True, kw_only=True)
class MixedOrder(SampleOrder):
    """The images at positions of a mixture: each micro-batch has the next images of every source's own sequence.

    A source's images are in the order, and in the epochs, that they have without the others. They are numbered behind
    those of the sources before it. Where the weights change, counting begins anew.
    """

    orders: list[SampleOrder]  # of each source
    firsts: NDArray[np.int64]  # the number of each source's first image, (sources,)
    micro_batch: int
    spans: list[tuple[float, float, Shares]]  # micro-batches of the run: first, end, and how they are shared

    def counts_before(self, number: int) -> NDArray[np.int64]:
        """Return how many images of each source the first `number` micro-batches of the run have, (sources,)."""
        spans = [(int(min(number, end) - start), shares) for start, end, shares in self.spans if start <= number]
        total: NDArray[np.int64] = np.sum([shares.before(length) for length, shares in spans], axis=0)
        return total

    def images_at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (images, draw numbers in their sources) at `positions`, each of the same shape; see `SampleOrder`."""
        sources, own = self._in_sources(positions)
        images = np.empty_like(positions)
        draw_numbers = np.empty_like(positions)
        for source, order in enumerate(self.orders):
            here = sources == source
            found, draw_numbers[here] = order.images_at(own[here])
            images[here] = found + self.firsts[source]
        return images, draw_numbers

    def windows_at(self, positions: NDArray[np.int64]) -> list[tuple[int, int]] | None:
        """Return (epoch, window) as `SampleOrder` does; of S sources, window w of source i has the number S w + i."""
        sources, own = self._in_sources(positions)
        windows = []
        for source, order in enumerate(self.orders):
            found = order.windows_at(own[sources == source])
            if found is None:
                return None
            windows += [(epoch, window * len(self.orders) + source) for epoch, window in found]
        return windows

    def images_in(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Return all images of a window, block after block."""
        number, source = divmod(window, len(self.orders))
        return self.orders[source].images_in(epoch, number) + self.firsts[source]

    def _in_sources(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each of `positions`, and the position in its own sequence, each of the same shape."""
        numbers, rows = np.unique(positions // self.micro_batch, return_inverse=True)
        before = np.stack([self.counts_before(number) for number in numbers.tolist()])
        ends = np.cumsum(np.stack([self.counts_before(number + 1) for number in numbers.tolist()]) - before, axis=1)
        # A micro-batch has the images of the first source, then those of the second, ...
        within = positions % self.micro_batch
        sources = (within[:, None] >= ends[rows]).sum(axis=1)
        begins = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
        return sources, before[rows, sources] + within - begins[rows, sources]

    def numbers_in_source(self, images: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of `images` in the dataset that they come from."""
        return images - self.firsts[np.searchsorted(self.firsts, images, side="right") - 1]


def mixed_order(
    config: SampleConfig, sources: Sequence[int], labels: NDArray[np.integer], kept: NDArray[np.bool_] | None
) -> MixedOrder:
    """Return the order of a mixture.

    Args:
        sources: the number of images of each source.
        labels, kept: of all images, see `SampleOrder.of`.
    """
    data, batch = config.data, config.batch
    ends = np.cumsum(np.array(sources, dtype=np.int64))
    parts = [slice(end - count, end) for end, count in zip(ends, sources, strict=True)]
    shares = [Shares(weights, batch.micro_batch) for _, weights in data.mix_weights]
    settings = _in_blocks(config, shares) if data.shuffle == "block" else [config] * len(parts)
    orders = [
        SampleOrder.of(alone, labels[part], None if kept is None else kept[part])
        for alone, part in zip(settings, parts, strict=True)
    ]
    num_images = data.epoch_images or sum(order.num_images for order in orders)
    starts = [config.steps(epoch, num_images) * batch.num_micro_batches for epoch, _ in data.mix_weights]
    return MixedOrder(
        num_images,
        seed=data.seed,
        shuffle="none",  # its own is the merge
        orders=orders,
        firsts=ends - np.array(sources, dtype=np.int64),
        micro_batch=batch.micro_batch,
        spans=list(zip(starts, [*starts[1:], math.inf], shares, strict=True)),
    )


def _in_blocks(config: SampleConfig, shares: Sequence[Shares]) -> list[SampleConfig]:
    """Return the settings by which each source deals its blocks, to as many micro-batches, each of its share's size.

    Raises:
        ConfigError: a share is no whole number of images, with all their repeats, or changes.
    """
    data, batch = config.data, config.batch
    sizes = shares[0].before(1).tolist()
    if len(shares) > 1 or shares[0].period > 1 or any(size % data.repeats for size in sizes):
        multiple = "whole" if data.repeats == 1 else f"a multiple of data.repeats {data.repeats}"
        raise ConfigError(
            f"data.shuffle is block with data.mix {as_typed(data.mix)}: blocks are dealt to micro-batches, so each "
            f"dataset's share of batch.micro_batch {batch.micro_batch} must be {multiple} and stay the same: use such "
            "weights without data.mix_until, or data.shuffle full"
        )
    settings = []
    for size in sizes:
        own = size or batch.micro_batch  # with a weight of 0 it is not asked for images
        dealt = replace(batch, micro_batch=own, global_batch=own * batch.num_micro_batches)
        settings.append(SampleConfig(data=data, batch=dealt))
    return settings
