"""Batches on the model's device: of real images, or synthetic ones with the same face.

A loader knows the data-parallel coordinate and size, never the global rank: with other kinds of parallelism several
ranks share one coordinate. Coordinate r of W gets the micro-batches r, r + W, r + 2 W, ... of every step.
"""

import base64
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dali_train.config import Config, ConfigError
from dali_train.data.index import Split
from dali_train.data.micro_batch import MicroBatch, MicroBatchDraws, MicroBatches
from dali_train.data.pipeline import training_pipeline
from dali_train.data.pixels import PixelFormat
from dali_train.data.read_ahead import ReadAhead
from dali_train.data.stream import StreamPipeline, position_basis


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device, already mixed."""

    images: torch.Tensor  # (n, 3, size, size) float32 or float16
    targets: torch.Tensor  # (n, 2) int64: class of the image, class of its Mixup partner
    lambdas: torch.Tensor  # (n,) float32: weight of the first class
    micro_batch: MicroBatchDraws  # a MicroBatch, which knows its images, unless data.reader is stream


class Loader(Protocol):
    warnings: Sequence[str]
    """What a person should be told when the run starts."""

    def next(self) -> Batch:
        """The next micro-batch of this coordinate, across steps without end."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of this coordinate, besides the step, to go on behind the last micro-batch: plain values."""


def pixel_format(config: Config, device: torch.device, num_threads: int) -> PixelFormat:
    """How images are decoded for a model on `device`."""
    on_gpu = config.data.device == "gpu" or (config.data.device == "auto" and device.type == "cuda")
    return PixelFormat(
        device_id=(device.index or 0) if on_gpu else None,
        num_threads=num_threads,
        # Autocast would make float16 of it in the first layer: half the memory traffic, the same numbers.
        half=config.precision.dtype == "fp16",
        channels_last=config.model.channels_last,
        pinned=not on_gpu and device.type == "cuda",
    )


class DaliLoader:
    """Real images."""

    warnings: Sequence[str] = ()

    def __init__(
        self, split: Split, micro_batches: Iterator[MicroBatch], config: Config, pixels: PixelFormat, device: torch.device
    ) -> None:
        self._pipeline = training_pipeline(
            split, lambda: next(micro_batches), config.data, pixels, size=config.batch.micro_batch, mix=config.mixup.alpha > 0
        )
        self._device = device

    def next(self) -> Batch:
        return _on_device(self._device, *self._pipeline.run())

    def state(self) -> dict[str, Any]:
        return {}


class StreamLoader:
    """Real images in the order of storage.

    Args:
        saved_states: what ``state()`` gave on each coordinate of the run that is gone on with; empty begins a pass.

    Raises:
        ConfigError, DatasetError: see `check_shards`; or `saved_states` do not fit and run.accept_changed_recipe is not set.
    """

    def __init__(
        self, split: Split, config: Config, pixels: PixelFormat, device: torch.device, *,
        start_step: int, dp_rank: int, dp_size: int, saved_states: Sequence[dict[str, Any]],
    ) -> None:  # fmt: skip
        warnings = [
            f"data.reader is stream: every rank reads a part of the shards in the order of storage, so the samples depend on the "
            f"number of ranks, {dp_size}, and the run can go on only with the same number"
        ]
        self._basis = position_basis(split, config, pixels, dp_size)
        position = None
        if start_step:
            differences = _differences(saved_states[0]["basis"] if saved_states else {}, self._basis)
            if not differences:
                position = base64.b64decode(saved_states[dp_rank]["position"])
            elif config.run.accept_changed_recipe:
                warnings.append(
                    f"the place in the data cannot be kept ({differences}): a new pass begins at step {start_step}, so images "
                    "of the last one may come twice and others not at all"
                )
            else:
                raise ConfigError(
                    f"data.reader is stream, and the checkpoint of step {start_step} cannot be gone on with: {differences}. "
                    "Set it back; or set run.accept_changed_recipe true to begin a new pass over the data at this step. "
                    "data.reader index goes on on any number of ranks"
                )
        self.warnings: Sequence[str] = warnings
        num_per_step = config.batch.global_batch // config.batch.micro_batch
        places = assigned_places(num_per_step, start_step, dp_rank, dp_size)
        draws = (MicroBatchDraws.at(config, step, k) for step, k in places)
        self._pipeline = StreamPipeline(split, draws, config, pixels, rank=dp_rank, num_ranks=dp_size, position=position)
        self._device = device

    def next(self) -> Batch:
        return _on_device(self._device, *self._pipeline.run())

    def state(self) -> dict[str, Any]:
        return {"basis": self._basis, "position": base64.b64encode(self._pipeline.position()).decode()}


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> str:
    if not saved:
        return "it holds no place in a stream"
    return "; ".join(f"{name} {saved.get(name)} -> {value}" for name, value in current.items() if saved.get(name) != value)


def _on_device(
    device: torch.device, images: torch.Tensor, targets: torch.Tensor, lambdas: torch.Tensor, micro_batch: MicroBatchDraws
) -> Batch:
    """Copies only what is not there yet: no images where DALI decoded on the model's device."""
    images, targets, lambdas = (t.to(device, non_blocking=True) for t in (images, targets, lambdas))
    return Batch(images, targets, lambdas, micro_batch)


class SyntheticLoader:
    """The same micro-batches with noise instead of their images: what the trainer does when data costs nothing."""

    warnings: Sequence[str] = ()

    def __init__(self, micro_batches: Iterator[MicroBatch], config: Config, pixels: PixelFormat, device: torch.device) -> None:
        self._micro_batches = micro_batches
        self._device = device
        self._images = blank_images(config, pixels, device).normal_()

    def next(self) -> Batch:
        micro_batch = next(self._micro_batches)
        targets, lambdas = torch.from_numpy(micro_batch.targets), torch.from_numpy(micro_batch.lambdas)
        return _on_device(self._device, self._images, targets, lambdas, micro_batch)

    def state(self) -> dict[str, Any]:
        return {}


def blank_images(config: Config, pixels: PixelFormat, device: torch.device) -> torch.Tensor:
    """A micro-batch's images as a loader gives them, (n, 3, size, size), all zero."""
    size = config.data.train_size
    return torch.zeros(
        config.batch.micro_batch, 3, size, size, device=device, dtype=torch.float16 if pixels.half else torch.float32
    ).to(memory_format=torch.channels_last if pixels.channels_last else torch.preserve_format)


def make_loader(
    split: Split, config: Config, device: torch.device, *,
    start_step: int, dp_rank: int, dp_size: int, num_threads: int, saved_states: Sequence[dict[str, Any]] = (),
) -> Loader:  # fmt: skip
    """The loader that data.reader names, from `start_step` on, where `saved_states` are each coordinate's ``state()``."""
    pixels = pixel_format(config, device, num_threads)
    if config.data.reader == "stream":
        return StreamLoader(
            split, config, pixels, device, start_step=start_step, dp_rank=dp_rank, dp_size=dp_size, saved_states=saved_states
        )  # fmt: skip
    micro_batches = assigned_micro_batches(split, config, start_step=start_step, dp_rank=dp_rank, dp_size=dp_size)
    if config.data.reader == "synthetic":
        return SyntheticLoader(micro_batches, config, pixels, device)
    return DaliLoader(split, micro_batches, config, pixels, device)


def assigned_micro_batches(split: Split, config: Config, *, start_step: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
    """The micro-batches of one data-parallel coordinate, across steps without end."""
    micro_batches = MicroBatches(split.rows, config)

    def places() -> Iterator[tuple[int, int]]:
        return assigned_places(micro_batches.num_per_step, start_step, dp_rank, dp_size)

    chosen = (micro_batches(step, k) for step, k in places())
    if config.data.reader == "synthetic" or config.data.read_ahead_mb == 0:
        return chosen
    num_bytes = sum(shard.num_bytes for shard in split.shards)
    # More than an epoch ahead there is nothing that has not been read.
    images = min(config.data.read_ahead_mb * 1_000_000 * len(split) // num_bytes, len(split) // dp_size)
    return ReadAhead(split, micro_batches, chosen, places(), num_ahead=max(1, images // config.batch.micro_batch))


def assigned_places(num_per_step: int, start_step: int, dp_rank: int, dp_size: int) -> Iterator[tuple[int, int]]:
    """(step, k) of each of those micro-batches."""
    for step in itertools.count(start_step):
        for k in range(dp_rank, num_per_step, dp_size):
            yield step, k
