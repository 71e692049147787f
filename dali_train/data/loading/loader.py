"""Batches on the model's device: of real images, or synthetic ones of the same shape.

The way of the data is one line per stage in `make_loader`: order, read, decode, augment and mix, device. A loader knows
the data-parallel coordinate and size, not the global rank, because with model parallelism several ranks share one
coordinate. Coordinate r of W gets the micro-batches r, r + W, r + 2 W, ... of every step.
"""

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dali_train.config import Config
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import Storage, open_storage
from dali_train.data.loading.cache import Node
from dali_train.data.loading.dali import PixelFormat
from dali_train.data.loading.dali_reader import DaliReaderPipeline
from dali_train.data.loading.pipelines import Batch, CpuPipeline, DaliPipeline, TrainingPipeline
from dali_train.data.loading.read_ahead import ReadAhead
from dali_train.data.sampling.micro_batch import MicroBatch, MicroBatches

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The micro-batches of one coordinate while training images have one size: from `start_step` to before `end_step`.

    Iterating yields (step, k) of each, and does not stop at `end_step`: what prepares micro-batches looks ahead.
    """

    config: Config  # with that size
    start_step: int
    end_step: float = math.inf
    dp_rank: int
    dp_size: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for step in itertools.count(self.start_step):
            for k in self._numbers():
                yield step, k

    @property
    def num_per_step(self) -> int:
        """How many micro-batches of a step this coordinate has; others may have one more."""
        return len(self._numbers())

    @property
    def num_micro_batches(self) -> float:
        return (self.end_step - self.start_step) * self.num_per_step

    def _numbers(self) -> range:
        return range(self.dp_rank, self.config.batch.num_micro_batches, self.dp_size)


def segments(config: Config, num_images: int, *, start_step: int, dp_rank: int, dp_size: int) -> Iterator[Segment]:
    """Yield the segments from `start_step` on: one, unless data.progressive changes the size of training images."""
    sizes = config.sizes_by_step(num_images)
    ends = [*(start for start, _ in sizes[1:]), math.inf]
    for (start, sized), end in zip(sizes, ends, strict=True):
        first = max(start, start_step)
        if first < end:
            yield Segment(config=sized, start_step=first, end_step=end, dp_rank=dp_rank, dp_size=dp_size)


class Loader:
    """One coordinate's micro-batches on the model's device, with a new pipeline for each segment."""

    def __init__(
        self, segments: Iterator[Segment], open_pipeline: Callable[[Segment], TrainingPipeline], device: torch.device
    ) -> None:
        self._segments, self._open_pipeline, self._device = segments, open_pipeline, device
        self._begin_segment()
        self.warnings = self._pipeline.warnings

    def next(self) -> Batch:
        """Return this coordinate's next micro-batch; there is always one more, step after step."""
        if self._num_left == 0:
            # Free its memory for the next pipeline; it is in reference cycles with its graph and threads.
            del self._pipeline
            gc.collect()
            self._begin_segment()
        self._num_left -= 1
        return self._pipeline.run().to(self._device)

    def _begin_segment(self) -> None:
        segment = next(self._segments)
        self._num_left = segment.num_micro_batches
        self._pipeline = self._open_pipeline(segment)


def pixel_format(config: Config, device: torch.device, num_threads: int) -> PixelFormat:
    """Return how images are decoded for a model on `device`."""
    on_gpu = config.data.device == "gpu" or (config.data.device == "auto" and device.type == "cuda")
    return PixelFormat(
        device_id=(device.index or 0) if on_gpu else None,
        num_threads=num_threads,
        # Autocast would cast to this dtype in the first layer anyway; casting here halves the memory traffic.
        dtype=_DTYPES.get(config.precision.dtype, torch.float32),
        channels_last=config.model.channels_last,
        pinned=not on_gpu and device.type == "cuda",
    )


class SyntheticPipeline(TrainingPipeline):
    """The same micro-batches with noise instead of their images, to measure the trainer without the data path."""

    def __init__(self, micro_batches: Iterator[MicroBatch], images: torch.Tensor) -> None:
        self._micro_batches = micro_batches
        self._images = images

    def run(self) -> Batch:
        batch = next(self._micro_batches)
        return Batch(self._images, torch.from_numpy(batch.targets), torch.from_numpy(batch.lambdas), batch)


def blank_images(config: Config, pixels: PixelFormat, device: torch.device) -> torch.Tensor:
    """Return zeros in the shape and format of a loader's images, (n, 3, size, size)."""
    size = config.data.train_size
    return torch.zeros(config.batch.micro_batch, 3, size, size, device=device, dtype=pixels.dtype).to(
        memory_format=torch.channels_last if pixels.channels_last else torch.preserve_format
    )


def make_loader(
    split: Split,
    config: Config,
    device: torch.device,
    *,
    start_step: int,
    dp_rank: int,
    dp_size: int,
    num_threads: int,
    decodes: bool = True,
    node: Node | None = None,
) -> Loader:
    """Return the loader for data.reader, from `start_step` on.

    Args:
        decodes: False on later stages of a pipeline, which need labels and lambdas (from the index and the draws) but
            no images.
        node: this process's view of the cache of its node, if there is one.

    Raises:
        ConfigError, DatasetError: a setting cannot be satisfied; the message names it.
    """
    pixels = pixel_format(config, device, num_threads)

    def open_pipeline(segment: Segment) -> TrainingPipeline:
        data, size = segment.config.data, segment.config.batch.micro_batch
        if data.reader == "dali":
            return DaliReaderPipeline(
                split,
                ordered(split, segment),
                data,
                pixels,
                size=size,
                num_per_step=segment.config.batch.num_micro_batches,
                start_step=segment.start_step,
                shard=(dp_rank, dp_size),
            )
        if data.reader == "synthetic" or not decodes:
            blank = blank_images(segment.config, pixels, device)
            return SyntheticPipeline(ordered(split, segment), blank.normal_() if decodes else blank[:0])
        storage = open_storage(split, data, None if node is None else node.cache(split))
        micro_batches = read(split, segment, storage, node)
        decoded_on = CpuPipeline if pixels.device_id is None else DaliPipeline  # which also augments and mixes
        return decoded_on(split, storage, micro_batches.__next__, data, pixels, size=size)

    parts = segments(config, len(split), start_step=start_step, dp_rank=dp_rank, dp_size=dp_size)
    return Loader(parts, open_pipeline, device)


def ordered(split: Split, segment: Segment, micro_batches: MicroBatches | None = None) -> Iterator[MicroBatch]:
    """Iterate over the micro-batches of a segment, and beyond it, without end."""
    micro_batches = micro_batches or MicroBatches(split.rows, segment.config)
    return (micro_batches(step, k) for step, k in segment)


def read(split: Split, segment: Segment, storage: Storage, node: Node | None = None) -> Iterator[MicroBatch]:
    """Iterate over the same, while their bytes are read ahead and the cache of `node` is kept within its limit."""
    data, batch = segment.config.data, segment.config.batch
    micro_batches = MicroBatches(split.rows, segment.config)
    chosen = ordered(split, segment, micro_batches)
    # Never more than an epoch ahead, which covers every image once.
    images = min(data.read_ahead_mb * 1_000_000 * len(split) // split.num_bytes, len(split) // segment.dp_size)
    num_ahead = max(1, images // batch.micro_batch)
    if node is not None:
        eviction = node.eviction(split, segment.config, start_step=segment.start_step, num_ahead=num_ahead)
        chosen = chosen if eviction is None else eviction.follow(chosen)
    if data.read_ahead_mb == 0:
        return chosen
    # Look the same number of steps ahead if this coordinate has one micro-batch per step less than others.
    num_ahead = max(1, num_ahead * segment.num_per_step // batch.grad_accum_steps(segment.dp_size))
    return ReadAhead(split, storage, micro_batches, chosen, iter(segment), num_ahead)
