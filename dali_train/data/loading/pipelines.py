"""From micro-batches to tensors: the pipelines of training and evaluation, on both devices.

A DALI graph decodes (unless records are raw), crops, resizes, mirrors, augments, normalises and casts; then torch
mixes. On the CPU DALI only decodes training images and `CpuTransform` does the rest.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali.pipeline import Pipeline
from torch.autograd.profiler import record_function

from dali_train.config import DataConfig
from dali_train.data.dataset.image_file import DecodeChecker
from dali_train.data.dataset.index import Split, sizes_of
from dali_train.data.dataset.storage import Storage, open_storage, read_stored
from dali_train.data.loading.augment import Augmentation
from dali_train.data.loading.cache import Node
from dali_train.data.loading.cpu import CpuTransform
from dali_train.data.loading.dali import (
    PREFETCH,
    Ahead,
    Feed,
    build_graph,
    crop_graph,
    crop_inputs,
    evaluation_graph,
    graph_options,
    in_format,
    run_graph,
    training_graph,
    training_inputs,
)
from dali_train.data.loading.decoders import PixelFormat
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.errors import DatasetError

_PREPARED = 2  # micro-batches whose draws and byte ranges are ready when DALI asks


@dataclass(frozen=True)
class Batch:
    """One micro-batch as tensors, already mixed."""

    images: torch.Tensor  # (n, 3, size, size) float32, float16 or bfloat16
    targets: torch.Tensor  # (n, 2) int64: class of the image, of its Mixup partner; or (n, 2, classes), see TrainLoader
    lambdas: torch.Tensor  # (n,) float32: weight of the first class
    micro_batch: MicroBatch
    views: tuple[torch.Tensor, ...] = ()  # all views of the images, the first of which is `images`; empty: there is one

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`. Only tensors on other devices are copied; images decoded on the GPU are not."""
        images, targets, lambdas = (without_waiting(one, device) for one in (self.images, self.targets, self.lambdas))
        views = tuple(without_waiting(view, device) for view in self.views)
        return Batch(views[0] if views else images, targets, lambdas, self.micro_batch, views)

    def soft_targets(self, num_classes: int) -> torch.Tensor:
        """Return the weight of each class in each image, (n, num_classes) float32."""
        has_rows = self.targets.ndim == 3  # of all classes, where an image may have any number
        classes = torch.arange(num_classes, device=self.targets.device)
        own, partners = (self.targets if has_rows else self.targets[..., None] == classes).unbind(1)
        return own * self.lambdas[:, None] + partners * (1 - self.lambdas[:, None])


class TrainingPipeline:
    """The source of a loader's micro-batches."""

    warnings: Sequence[str] = ()
    """What to report to the user when the run starts."""

    def run(self) -> Batch:
        """Return the next micro-batch on the decoding device, ordered into torch's current stream.

        The host does not wait for the device. The memory of the images may be reused by the second call after this.

        Raises:
            DatasetError: an image cannot be decoded; the message names it and its location.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End its threads. Its memory goes with the next garbage collection: DALI's graphs are in reference cycles."""


class IndexedPipeline(TrainingPipeline):
    """The base of the pipelines on both devices, which find images through the index.

    `next_micro_batch` is called ahead of ``run()``, for micro-batches of `size` images. `views` are the settings of
    each view of an image, if there are several: all of them are cut from one decoded box.
    """

    _feed: Feed

    def __init__(
        self,
        split: Split,
        storage: Storage,
        next_micro_batch: Callable[[], MicroBatch],
        data: DataConfig,
        pixels: PixelFormat,
        *,
        size: int,
        views: Sequence[DataConfig] = (),
    ) -> None:
        self._split, self._storage = split, storage
        self._data, self._pixels = data, pixels
        self._views = views or (data,)
        self._start(next_micro_batch, size)

    def _start(self, next_micro_batch: Callable[[], MicroBatch], size: int) -> None:
        raise NotImplementedError

    def _explain(self, error: RuntimeError) -> Exception:
        images = np.concatenate([batch.images for batch in self._feed.in_flight])
        return find_undecodable(self._split, self._storage, images, error)


class DaliPipeline(IndexedPipeline):
    """One graph does everything except mixing, `PREFETCH` micro-batches ahead. Meant for a GPU; also runs on a CPU."""

    def _start(self, next_micro_batch: Callable[[], MicroBatch], size: int) -> None:
        inputs = training_inputs(self._split, self._storage, self._views)
        self._feed = Feed(inputs, next_micro_batch, ahead=_PREPARED)
        options = graph_options(self._pixels, size=size)
        self._pipe = training_graph(self._feed, self._views, self._pixels, self._split, **options)
        build_graph(self._pipe)
        device = "cpu" if self._pixels.device_id is None else f"cuda:{self._pixels.device_id}"
        self._mean, self._std = (torch.tensor(values, device=device) for values in (self._data.mean, self._data.std))

    def run(self) -> Batch:
        *outputs, targets, lambdas, partners = run_graph(self._pipe, self._explain)
        batch = self._feed.in_flight.popleft()
        views = [self._with_noise(*one) for one in zip(outputs, batch.views or (batch,), strict=True)]
        mixed = finished(views[0], targets, lambdas, partners, batch, self._pixels)
        return replace(mixed, views=tuple(in_format(one, self._pixels) for one in views)) if batch.views else mixed

    def _with_noise(self, images: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        if batch.noise.size and batch.erased.any():
            noise = (to_device_of(images, batch.noise) - self._mean) / self._std
            images = show_noise(
                images,
                to_device_of(images, batch.erased),
                noise.to(images.dtype),
                channels_last=self._pixels.channels_last,
            )
        return images

    def close(self) -> None:
        self._feed.close()


class CpuPipeline(IndexedPipeline):
    """DALI decodes, `CpuTransform` does the rest, in a thread that keeps `PREFETCH` micro-batches ready."""

    def _start(self, next_micro_batch: Callable[[], MicroBatch], size: int) -> None:
        by_size = {data.train_size: data for data in self._views}
        self._augmentations = {side: Augmentation.of(data) for side, data in by_size.items()}
        self._transforms = {side: CpuTransform(data, self._pixels, size=size) for side, data in by_size.items()}
        self._next = next_micro_batch
        self._pipe: Pipeline | None = None
        if self._split.manifest.encoding == "image":
            self._feed = Feed(crop_inputs(self._split, self._storage), next_micro_batch)
            pipe = crop_graph(self._feed, batch_size=size, num_threads=self._pixels.num_threads)
            pipe.build()
            self._pipe = pipe
        self._ready = Ahead(self._produce, PREFETCH, "data")

    def run(self) -> Batch:
        with record_function("data: wait"):
            return self._ready.next()

    def close(self) -> None:
        self._ready.close()
        for transform in self._transforms.values():
            transform.close()

    def _produce(self) -> Batch:
        boxes, batch = self._cut() if self._pipe is None else self._decode(self._pipe)
        views = tuple(self._transformed(_crops(boxes, batch, view), view) for view in batch.views)
        images = views[0] if views else self._transformed(boxes, batch)
        return Batch(images, torch.from_numpy(batch.targets), torch.from_numpy(batch.lambdas), batch, views)

    def _transformed(self, crops: list[NDArray[np.uint8]], batch: MicroBatch) -> torch.Tensor:
        side = self._data.crop_side
        if side is not None:
            pad = reflected if self._data.crop_padding_mode == "reflect" else padded
            crops = [pad(crop, offset, side) for crop, offset in zip(crops, batch.offsets, strict=True)]
        augmentation = self._augmentations[batch.size]
        return self._transforms[batch.size](
            crops,
            batch.flips,
            (batch.partners, batch.lambdas, batch.cuts) if batch.is_mixed else None,
            None if augmentation is None else augmentation.operations(batch),
            batch.filters,
        )

    def _cut(self) -> tuple[list[NDArray[np.uint8]], MicroBatch]:
        batch = self._next()
        boxes = np.concatenate(batch.corners, axis=1).tolist()
        images = zip(read_stored(self._storage, self._split, batch.images), boxes, strict=True)
        return [image[y : y + height, x : x + width] for image, (y, x, height, width) in images], batch

    def _decode(self, pipe: Pipeline) -> tuple[list[NDArray[np.uint8]], MicroBatch]:
        try:
            (crops,) = pipe.run()
        except RuntimeError as error:
            raise self._explain(error) from error
        return [np.asarray(crop) for crop in crops], self._feed.in_flight.popleft()


def _crops(boxes: list[NDArray[np.uint8]], batch: MicroBatch, view: MicroBatch) -> list[NDArray[np.uint8]]:
    """Return one view's crops from the decoded `boxes` around all views, as arrays of their own."""
    corners = (view.boxes[:, :2] - batch.corners[0]).tolist()
    places = zip(boxes, corners, view.boxes[:, 2:].tolist(), strict=True)
    return [np.ascontiguousarray(box[y : y + height, x : x + width]) for box, (y, x), (height, width) in places]


class EvaluationPipeline:
    """Batches of validation images, given by number, in an endless cycle.

    So when one evaluation ends, the start of the next is already prepared.
    """

    def __init__(
        self,
        split: Split,
        batches: list[NDArray[np.int64]],
        data: DataConfig,
        pixels: PixelFormat,
        node: Node | None = None,
    ) -> None:
        self._split = split
        self._storage = open_storage(split, data, node.cache(split) if node is not None else None)
        self._batches, self._data, self._pixels = batches, data, pixels
        self._position = 0
        self._pipe = evaluation_graph(
            self._feed,
            data,
            pixels,
            split.manifest.encoding == "raw",
            **graph_options(pixels, size=max(len(batch) for batch in batches)),
        )
        build_graph(self._pipe)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (images, labels): (n, 3, eval_size, eval_size) of the pixel format's dtype, and (n,) int64.

        Raises:
            DatasetError: an image cannot be decoded; the message says which and where it lies.
        """
        images, labels = run_graph(self._pipe, self._explain)
        return in_format(images, self._pixels), labels

    def close(self) -> None:
        """See `TrainingPipeline.close`; it has no threads but DALI's."""

    def _feed(self) -> tuple[list[NDArray[np.uint8]], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        images = self._batches[self._position % len(self._batches)]
        self._position += 1
        rows = self._split.rows[images]
        sizes = sizes_of(rows)
        start, end = central_regions(
            sizes[:, 0].astype(np.float64),
            sizes[:, 1].astype(np.float64),
            self._data.eval_resized,
            self._data.eval_size,
            squash=self._data.eval_resize == "squash",
        )
        return read_stored(self._storage, self._split, images), sizes, start, end, rows["label"].astype(np.int64)

    def _explain(self, error: RuntimeError) -> Exception:
        return find_undecodable(self._split, self._storage, np.concatenate(self._batches), error)


def finished(
    images: torch.Tensor,
    targets: torch.Tensor,
    lambdas: torch.Tensor,
    partners: torch.Tensor,
    batch: MicroBatch,
    pixels: PixelFormat,
) -> Batch:
    """Return a training graph's outputs as a batch: mixed, in the pixel format."""
    if batch.is_mixed:
        cuts = to_device_of(images, batch.cuts) if batch.cuts.any() else None
        images = mix(images, partners, lambdas, cuts, channels_last=pixels.channels_last)
    return Batch(in_format(images, pixels), targets, lambdas, batch)


def to_device_of(images: torch.Tensor, array: NDArray[Any]) -> torch.Tensor:
    return without_waiting(torch.from_numpy(array), images.device)


def without_waiting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`, without making the host wait for what the device computes.

    From pageable memory CUDA copies more than 64 KB only when all that is queued before is done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # torch keeps it until the copy is done
    return tensor.to(device, non_blocking=True)


def padded(crop: NDArray[np.uint8], offset: NDArray[np.int32], side: int) -> NDArray[np.uint8]:
    """Return a black square with `crop`, (height, width, 3), at `offset` from the top and left: (side, side, 3)."""
    height, width = crop.shape[:2]
    if height == width == side:
        return crop
    square = np.zeros((side, side, 3), dtype=np.uint8)
    square[offset[0] : offset[0] + height, offset[1] : offset[1] + width] = crop
    return square


def reflected(crop: NDArray[np.uint8], offset: NDArray[np.int32], side: int) -> NDArray[np.uint8]:
    """Return a square of `crop`, (height, width, 3), at `offset` from the top and left, and of its reflection beyond
    its borders: (side, side, 3)."""
    if crop.shape[:2] == (side, side) and not offset.any():
        return crop
    rows, columns = (
        length - 1 - np.abs(length - 1 - np.abs(np.arange(side) - start))
        for length, start in zip(crop.shape[:2], offset.tolist(), strict=True)
    )
    return crop[rows[:, None], columns]


def central_regions(
    heights: NDArray[np.float64], widths: NDArray[np.float64], resize_to: int, size: int, *, squash: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the region of each image that is evaluated: (start, end), each (n, 2) as y, x in pixels.

    Resizing this region to `size` equals resizing the image to `resize_to` and cropping the center. Sizes and offsets
    are rounded as in torchvision's Resize and CenterCrop, so that the pixels are the same.
    """
    short = np.minimum(heights, widths)
    starts = []
    ends = []
    for length in (heights, widths):
        resized = np.full_like(length, resize_to) if squash else np.floor(resize_to * length / short)
        offset = np.rint((resized - size) / 2)
        starts.append(offset * length / resized)
        ends.append((offset + size) * length / resized)
    return np.stack(starts, axis=-1).astype(np.float32), np.stack(ends, axis=-1).astype(np.float32)


def find_undecodable(split: Split, storage: Storage, images: NDArray[np.int64], error: RuntimeError) -> Exception:
    """Return an error that names the first of `images` that cannot be decoded, or has not the size that the index
    says, or `error` if there is none.

    DALI names only a position in a batch that has already run ahead, so the images are decoded once more.
    """
    if split.manifest.encoding == "raw":  # nothing was decoded
        return error
    checker = DecodeChecker()
    for first in range(0, len(images), checker.BATCH):
        portion = images[first : first + checker.BATCH]
        for position, reason in checker.failures(
            read_stored(storage, split, portion), sizes_of(split.rows[portion])
        ).items():
            return DatasetError(
                f"{split.describe(int(portion[position]))} {reason}. Run `dali-train data verify "
                f"{shlex.quote(str(split.root))}` to list all such images, and convert or index again without them"
            )
    return error


def mix(
    images: torch.Tensor,
    partners: torch.Tensor,
    lambdas: torch.Tensor,
    cuts: torch.Tensor | None = None,
    *,
    channels_last: bool = False,
) -> torch.Tensor:
    """Return the mixed images in new memory, with the shape, dtype and memory layout of `images`.

    Image i becomes ``lambdas[i] * images[i] + (1 - lambdas[i]) * images[partners[i]]`` (Mixup: Zhang et al., arXiv
    1710.09412) or, if it has a box, itself with the partner's pixels in the box (CutMix: Yun et al., arXiv 1905.04899).
    This is the only definition for batches, on any device. `CpuTransform` instead fuses it with normalisation, while an
    image is in the core's cache; a test compares the two.

    Args:
        images: (n, 3, h, w), or (n, h, w, 3) with `channels_last`, contiguous, normalised; float32, float16 or
            bfloat16.
        partners: (n,) int32 or int64, on the device of `images`.
        lambdas: (n,) float32, on the device of `images`: weight of the image itself.
        cuts: (n, 4) int32, on the device of `images`: top, left, height, width in pixels. An image with a non-empty box
            gets the partner's pixels there, whatever its lambda. None: no CutMix.
    """
    weights = lambdas.view(-1, 1, 1)
    if cuts is not None:
        outside = ~inside(cuts, images, channels_last=channels_last)
        weights = torch.where(cuts[:, 2].view(-1, 1, 1) > 0, outside.to(weights.dtype), weights)  # (n, h, w)
    weights = weights.unsqueeze(-1 if channels_last else 1).to(images.dtype)
    return images.index_select(0, partners).lerp_(images, weights)


def inside(boxes: torch.Tensor, images: torch.Tensor, *, channels_last: bool) -> torch.Tensor:
    """Return which pixels of `images` are in their image's box, (n, 4): top, left, height, width; (n, h, w) bool."""
    height, width = images.shape[1:3] if channels_last else images.shape[2:4]
    top, left, rows, columns = (corner.view(-1, 1, 1) for corner in boxes.unbind(1))
    y = torch.arange(height, device=images.device).view(1, -1, 1)
    x = torch.arange(width, device=images.device).view(1, 1, -1)
    return (y >= top) & (y < top + rows) & (x >= left) & (x < left + columns)


def show_noise(
    images: torch.Tensor, boxes: torch.Tensor, noise: torch.Tensor, *, channels_last: bool = False
) -> torch.Tensor:
    """Return `images`, as for `mix`, with `noise`, (h, w, 3), normalised too, in their `boxes`, (n, 4) int32."""
    where = inside(boxes, images, channels_last=channels_last).unsqueeze(-1 if channels_last else 1)
    return torch.where(where, noise if channels_last else noise.permute(2, 0, 1), images)
