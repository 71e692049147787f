"""Batches on the model's device: of real images, or synthetic ones of the same form.

A loader knows the data-parallel coordinate and size, never the global rank: with other kinds of parallelism several
ranks share one coordinate. Coordinate r of W gets the micro-batches r, r + W, r + 2 W, ... of every step.
"""

import gc
import itertools
import sys
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dali_train.config import BatchConfig, Config
from dali_train.data.dataset.index import Split
from dali_train.data.loading.dali import Produced, Source, training_source
from dali_train.data.loading.pixels import PixelFormat
from dali_train.data.loading.read_ahead import ReadAhead
from dali_train.data.loading.storage import Storage, open_storage
from dali_train.data.loading.stream import StreamPipeline
from dali_train.data.sampling.micro_batch import MicroBatch, MicroBatchDraws, MicroBatches

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device, already mixed."""

    images: torch.Tensor  # (n, 3, size, size) float32, float16 or bfloat16
    targets: torch.Tensor  # (n, 2) int64: class of the image, class of its Mixup partner
    lambdas: torch.Tensor  # (n,) float32: weight of the first class
    micro_batch: MicroBatchDraws  # a MicroBatch, which knows its images, unless data.reader is stream


class Loader:
    """One coordinate's micro-batches, from any source, on the model's device."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self._source, self._device = source, device
        self.warnings: Sequence[str] = source.warnings

    def next(self) -> Batch:
        """The next micro-batch of this coordinate, across steps without end."""
        *tensors, micro_batch = self._source.run()
        # Copies only what is not there yet: no images where DALI decoded on the model's device.
        images, targets, lambdas = (tensor.to(self._device, non_blocking=True) for tensor in tensors)
        return Batch(images, targets, lambdas, micro_batch)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of this coordinate, besides the step, to resume after the last micro-batch: plain
        values."""
        return self._source.state()


def pixel_format(config: Config, device: torch.device, num_threads: int) -> PixelFormat:
    """How images are decoded for a model on `device`."""
    on_gpu = config.data.device == "gpu" or (config.data.device == "auto" and device.type == "cuda")
    return PixelFormat(
        device_id=(device.index or 0) if on_gpu else None,
        num_threads=num_threads,
        # Autocast would round to this dtype in the first layer: half the memory traffic.
        dtype=_DTYPES.get(config.precision.dtype, torch.float32),
        channels_last=config.model.channels_last,
        pinned=not on_gpu and device.type == "cuda",
    )


class SyntheticSource(Source):
    """The same micro-batches with noise instead of their images: what the trainer does when data costs nothing."""

    def __init__(self, micro_batches: Iterator[MicroBatch], images: torch.Tensor) -> None:
        self._micro_batches = micro_batches
        self._images = images

    def run(self) -> Produced:
        micro_batch = next(self._micro_batches)
        return self._images, torch.from_numpy(micro_batch.targets), torch.from_numpy(micro_batch.lambdas), micro_batch


class ProgressiveSource(Source):
    """A source for each size of training images, made when its first step comes.

    Args:
        source_from: (step, config) -> the source of the micro-batches from that step on.
        sizes: the first step and the config of each size, `Config.sizes_by_step`.
    """

    def __init__(
        self,
        source_from: Callable[[int, Config], Source],
        sizes: Sequence[tuple[int, Config]],
        start_step: int,
        batch: BatchConfig,
        dp_size: int,
    ) -> None:
        self._source_from, self._sizes, self._num_per_step = source_from, sizes, batch.grad_accum_steps(dp_size)
        self._begin(start_step)
        self.warnings = self._source.warnings

    def run(self) -> Produced:
        if self._left == 0:
            del self._source  # its memory is for the next; it is in reference cycles with its graph and threads
            gc.collect()
            self._begin(self._end)
        self._left -= 1
        return self._source.run()

    def _begin(self, step: int) -> None:
        starts = [start for start, _ in self._sizes]
        number = bisect(starts, step)
        self._source = self._source_from(step, self._sizes[number - 1][1])
        self._end = starts[number] if number < len(starts) else sys.maxsize
        self._left = (self._end - step) * self._num_per_step


def blank_images(config: Config, pixels: PixelFormat, device: torch.device) -> torch.Tensor:
    """A micro-batch's images as a loader gives them, (n, 3, size, size), all zero."""
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
    saved_states: Sequence[dict[str, Any]] = (),
    decodes: bool = True,
) -> Loader:
    """The loader that data.reader names, from `start_step` on, where `saved_states` are each coordinate's ``state()``.

    Without `decodes`, on later stages of a pipeline, it gives labels and lambdas, which the index and the draws know,
    without images.

    Raises:
        ConfigError, DatasetError: what the settings ask for cannot be had; the message names the setting.
    """
    pixels = pixel_format(config, device, num_threads)
    if config.data.reader == "stream":
        places = assigned_places(config.batch.global_batch // config.batch.micro_batch, start_step, dp_rank, dp_size)
        draws = (MicroBatchDraws.at(config, step, k) for step, k in places)
        return Loader(
            StreamPipeline(
                split,
                draws,
                config,
                pixels,
                rank=dp_rank,
                num_ranks=dp_size,
                start_step=start_step,
                saved_states=saved_states,
            ),
            device,
        )

    def source_from(step: int, config: Config) -> Source:
        storage = open_storage(split, config.data) if decodes and config.data.reader == "index" else None
        micro_batches = assigned_micro_batches(
            split, storage, config, start_step=step, dp_rank=dp_rank, dp_size=dp_size
        )
        if storage is None:
            blank = blank_images(config, pixels, device)
            return SyntheticSource(micro_batches, blank.normal_() if decodes else blank[:0])
        return training_source(
            split,
            storage,
            lambda: next(micro_batches),
            config.data,
            pixels,
            size=config.batch.micro_batch,
            mix=config.mixup.enabled,
        )

    if not config.data.progressive:
        return Loader(source_from(start_step, config), device)
    return Loader(
        ProgressiveSource(source_from, config.sizes_by_step(len(split)), start_step, config.batch, dp_size), device
    )


def assigned_micro_batches(
    split: Split, storage: Storage | None, config: Config, *, start_step: int, dp_rank: int, dp_size: int
) -> Iterator[MicroBatch]:
    """The micro-batches of one data-parallel coordinate, across steps without end; their bytes are read ahead from
    `storage`."""
    micro_batches = MicroBatches(split.rows, config)

    def places() -> Iterator[tuple[int, int]]:
        return assigned_places(micro_batches.num_per_step, start_step, dp_rank, dp_size)

    chosen = (micro_batches(step, k) for step, k in places())
    if storage is None or config.data.read_ahead_mb == 0:
        return chosen
    num_bytes = sum(shard.num_bytes for shard in split.shards)
    # More than an epoch ahead there is nothing that has not been read.
    images = min(config.data.read_ahead_mb * 1_000_000 * len(split) // num_bytes, len(split) // dp_size)
    num_ahead = max(1, images // config.batch.micro_batch)
    return ReadAhead(split, storage, micro_batches, chosen, places(), num_ahead)


def assigned_places(num_per_step: int, start_step: int, dp_rank: int, dp_size: int) -> Iterator[tuple[int, int]]:
    """(step, k) of each of those micro-batches."""
    for step in itertools.count(start_step):
        for k in range(dp_rank, num_per_step, dp_size):
            yield step, k
