"""Batches on the model's device: of real images, or synthetic ones of the same shape.

A loader knows the data-parallel coordinate and size, not the global rank, because with model parallelism several ranks
share one coordinate. Coordinate r of W gets the micro-batches r, r + W, r + 2 W, ... of every step.
"""

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dali_train.config import Config
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import Storage, open_storage
from dali_train.data.loading.cache import Node
from dali_train.data.loading.dali_reader import DaliReaderPipeline
from dali_train.data.loading.decoder import PixelFormat
from dali_train.data.loading.pipelines import Batch, CpuPipeline, DaliPipeline, TrainingPipeline
from dali_train.data.loading.read_ahead import ReadAhead
from dali_train.data.sampling.micro_batch import MicroBatch, MicroBatches

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Loader:
    """One coordinate's micro-batches on the model's device, with a new pipeline for each size of training images.

    Args:
        pipeline_from: (step, config) -> the pipeline for micro-batches from that step on.
        config_at: step -> the config at that step, see `Config.by_step`.
        places: (step, k) of the micro-batches.
    """

    def __init__(
        self,
        pipeline_from: Callable[[int, Config], TrainingPipeline],
        config_at: Callable[[int], Config],
        places: Iterator[tuple[int, int]],
        device: torch.device,
    ) -> None:
        self._pipeline_from, self._config_at, self._device = pipeline_from, config_at, device
        step, _ = first = next(places)
        self._places = itertools.chain([first], places)
        self._config = config_at(step)
        self._pipeline = pipeline_from(step, self._config)
        self.warnings = self._pipeline.warnings

    def next(self) -> Batch:
        """Return this coordinate's next micro-batch; there is always one more, step after step."""
        step, _ = next(self._places)
        config = self._config_at(step)
        if config is not self._config:
            # Free its memory for the next pipeline; it is in reference cycles with its graph and threads.
            del self._pipeline
            gc.collect()
            self._config, self._pipeline = config, self._pipeline_from(step, config)
        return self._pipeline.run().to(self._device)


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

    def pipeline_from(step: int, config: Config) -> TrainingPipeline:
        place: dict[str, Any] = {"start_step": step, "dp_rank": dp_rank, "dp_size": dp_size}
        size = config.batch.micro_batch
        if config.data.reader == "dali":
            micro_batches = assigned_micro_batches(split, None, config, **place)
            return DaliReaderPipeline(
                split,
                micro_batches,
                config.data,
                pixels,
                size=size,
                num_per_step=config.batch.num_micro_batches,
                start_step=step,
                shard=(dp_rank, dp_size),
            )
        storage = (
            open_storage(split, config.data, node.cache(split) if node is not None else None)
            if decodes and config.data.reader == "index"
            else None
        )
        micro_batches = assigned_micro_batches(split, storage, config, **place, node=node)
        if storage is None:
            blank = blank_images(config, pixels, device)
            return SyntheticPipeline(micro_batches, blank.normal_() if decodes else blank[:0])
        kind = CpuPipeline if pixels.device_id is None else DaliPipeline
        return kind(split, storage, lambda: next(micro_batches), config.data, pixels, size=size)

    places = assigned_places(config.batch.num_micro_batches, start_step, dp_rank, dp_size)
    return Loader(pipeline_from, config.by_step(len(split)), places, device)


def assigned_micro_batches(
    split: Split,
    storage: Storage | None,
    config: Config,
    *,
    start_step: int,
    dp_rank: int,
    dp_size: int,
    node: Node | None = None,
) -> Iterator[MicroBatch]:
    """Iterate over the micro-batches of one data-parallel coordinate, step after step, without end.

    Their bytes are read ahead from `storage`, if there is one, and the cache of `node` is kept within its limit.
    """
    micro_batches = MicroBatches(split.rows, config)

    def places() -> Iterator[tuple[int, int]]:
        return assigned_places(micro_batches.num_per_step, start_step, dp_rank, dp_size)

    chosen: Iterator[MicroBatch] = (micro_batches(step, k) for step, k in places())
    num_bytes = sum(shard.num_bytes for shard in split.shards)
    # Never more than an epoch ahead, which covers every image once.
    images = min(config.data.read_ahead_mb * 1_000_000 * len(split) // num_bytes, len(split) // dp_size)
    num_ahead = max(1, images // config.batch.micro_batch)
    if storage is not None and node is not None:
        eviction = node.eviction(split, config, start_step=start_step, num_ahead=num_ahead)
        chosen = chosen if eviction is None else eviction.follow(chosen)
    if storage is None or config.data.read_ahead_mb == 0:
        return chosen
    # Look the same number of steps ahead if this coordinate has one micro-batch per step less than others.
    num_own = len(range(dp_rank, micro_batches.num_per_step, dp_size))
    num_ahead = max(1, num_ahead * num_own // config.batch.grad_accum_steps(dp_size))
    return ReadAhead(split, storage, micro_batches, chosen, places(), num_ahead)


def assigned_places(num_per_step: int, start_step: int, dp_rank: int, dp_size: int) -> Iterator[tuple[int, int]]:
    """Yield (step, k) of each micro-batch of one data-parallel coordinate."""
    for step in itertools.count(start_step):
        for k in range(dp_rank, num_per_step, dp_size):
            yield step, k
