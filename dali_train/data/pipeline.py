"""From micro-batches to tensors: the DALI graphs for training and evaluation; stream.py has one more.

The graphs draw no random number and decide nothing: boxes, flips, Mixup partners and lambdas are computed before,
so that what comes out is a pure function of them. Everything that happens to pixels happens here: decode (only the
box that is needed; raw records skip it), resize, mirror, normalise, mix, cast. On a GPU all of it is one graph; on
the CPU DALI decodes training images and `CpuTransform` does the rest.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline, pipeline_def
from torch.autograd.profiler import record_function

from dali_train.config import DataConfig
from dali_train.data.index import Split
from dali_train.data.manifest import DatasetError
from dali_train.data.micro_batch import MicroBatch
from dali_train.data.pixels import CpuTransform, PixelFormat

Produced = tuple[torch.Tensor, torch.Tensor, torch.Tensor, MicroBatch]


class TrainingPipeline(Protocol):
    """Turns micro-batches into tensors."""

    def run(self) -> Produced:
        """(images, targets, lambdas, micro_batch) of the next micro-batch.

        images: (n, 3, size, size) float32 or float16; targets: (n, 2) int64, the class of each image and of its
        partner; lambdas: (n,) float32, the weight of the image itself. On the decoding device, in the order of
        torch's current stream: the host does not wait for the device.

        Raises:
            DatasetError: an image cannot be decoded; the message says which and where it lies.
        """


def training_pipeline(
    split: Split, next_micro_batch: Callable[[], MicroBatch], data: DataConfig, pixels: PixelFormat, *, size: int, mix: bool
) -> TrainingPipeline:
    """The pipeline for the micro-batches of `size` images that `next_micro_batch` names. It is called ahead of ``run()``."""
    kind = CpuTrainingPipeline if pixels.device_id is None else GpuTrainingPipeline
    return kind(split, next_micro_batch, data, pixels, size=size, mix=mix)


class _Feed:
    """What both pipelines keep about the micro-batches that DALI was fed."""

    def __init__(self, split: Split, next_micro_batch: Callable[[], MicroBatch], *, mix: bool) -> None:
        self._split = split
        self._next = next_micro_batch
        self._mix = mix
        # Fed to DALI and not given back yet, oldest first.
        self._in_flight: deque[MicroBatch] = deque()

    def _take(self) -> MicroBatch:
        batch = self._next()
        self._in_flight.append(batch)
        return batch

    def _explain(self, error: RuntimeError) -> Exception:
        return _find_undecodable(self._split, np.concatenate([batch.images for batch in self._in_flight]), error)


class GpuTrainingPipeline(_Feed):
    """One graph does everything, `data.prefetch` micro-batches ahead."""

    def __init__(
        self,
        split: Split,
        next_micro_batch: Callable[[], MicroBatch],
        data: DataConfig,
        pixels: PixelFormat,
        *,
        size: int,
        mix: bool,
    ) -> None:
        super().__init__(split, next_micro_batch, mix=mix)
        self._pipe = _training_graph(
            self._feed, data, pixels, split, mix,
            batch_size=size, num_threads=pixels.num_threads, device_id=pixels.device_id, prefetch_queue_depth=data.prefetch,
        )  # fmt: skip
        self._pipe.build()

    def run(self) -> Produced:
        images, targets, lambdas = run_graph(self._pipe, self._explain)
        return images, targets, lambdas, self._in_flight.popleft()

    def _feed(self) -> tuple[Any, ...]:
        with record_function("data: choose and read"):
            batch = self._take()
            fed = (_stored(self._split, batch.images), *batch.corners, batch.flips, batch.targets, batch.lambdas)
            return (*fed, batch.partners) if self._mix else fed


class CpuTrainingPipeline(_Feed):
    """DALI decodes, `CpuTransform` does the rest, in a thread that keeps `data.prefetch` micro-batches ready."""

    def __init__(
        self,
        split: Split,
        next_micro_batch: Callable[[], MicroBatch],
        data: DataConfig,
        pixels: PixelFormat,
        *,
        size: int,
        mix: bool,
    ) -> None:
        super().__init__(split, next_micro_batch, mix=mix)
        self._transform = CpuTransform(data, pixels, size=size)
        self._pipe: Pipeline | None = None
        if split.manifest.encoding == "image":
            self._pipe = crop_graph(self._feed, size=size, num_threads=pixels.num_threads)
        self._producer = ThreadPoolExecutor(1, "data")
        self._ready: deque[Future[Produced]] = deque(self._producer.submit(self._produce) for _ in range(data.prefetch))

    def run(self) -> Produced:
        with record_function("data: wait"):
            produced = self._ready.popleft().result()
        self._ready.append(self._producer.submit(self._produce))
        return produced

    def _produce(self) -> Produced:
        crops, batch = self._cut() if self._pipe is None else self._decode(self._pipe)
        images = self._transform(crops, batch.flips, (batch.partners, batch.lambdas) if self._mix else None)
        return images, torch.from_numpy(batch.targets), torch.from_numpy(batch.lambdas), batch

    def _cut(self) -> tuple[list[NDArray[np.uint8]], MicroBatch]:
        batch = self._next()
        boxes = zip(_stored(self._split, batch.images), batch.boxes.tolist(), strict=True)
        return [image[y : y + height, x : x + width] for image, (y, x, height, width) in boxes], batch

    def _decode(self, pipe: Pipeline) -> tuple[list[NDArray[np.uint8]], MicroBatch]:
        try:
            (crops,) = pipe.run()
        except RuntimeError as error:
            raise self._explain(error) from error
        return [np.asarray(crop) for crop in crops], self._in_flight.popleft()

    def _feed(self) -> tuple[Any, ...]:
        batch = self._take()
        return _stored(self._split, batch.images), *batch.corners


class EvaluationPipeline:
    """Evaluates the batches of image numbers that it was made with, over and over: after the last comes the first.

    So the start of the next evaluation is already prepared when one ends, and nothing marks an end.
    """

    def __init__(self, split: Split, batches: list[NDArray[np.int64]], data: DataConfig, pixels: PixelFormat) -> None:
        self._split = split
        self._batches = batches
        self._resize_to = data.eval_resize_to
        self._size = data.eval_size
        self._squash = data.eval_resize == "squash"
        self._position = 0
        self._pipe = _evaluation_graph(
            self._feed, data, pixels, split.manifest.encoding == "raw",
            batch_size=max(len(batch) for batch in batches), num_threads=pixels.num_threads,
            device_id=pixels.device_id, prefetch_queue_depth=data.prefetch,
        )  # fmt: skip
        self._pipe.build()

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(images, labels): (n, 3, eval_size, eval_size) float32 or float16, and (n,) int64.

        Raises:
            DatasetError: an image cannot be decoded; the message says which and where it lies.
        """
        images, labels = run_graph(self._pipe, self._explain)
        return images, labels

    def _feed(self) -> tuple[Any, ...]:
        images = self._batches[self._position % len(self._batches)]
        self._position += 1
        rows = self._split.rows[images]
        start, end = central_regions(
            rows["height"].astype(np.float64), rows["width"].astype(np.float64), self._resize_to, self._size, squash=self._squash
        )
        return _stored(self._split, images), start, end, rows["label"].astype(np.int64)

    def _explain(self, error: RuntimeError) -> Exception:
        return _find_undecodable(self._split, np.concatenate(self._batches), error)


def central_regions(
    heights: NDArray[np.float64], widths: NDArray[np.float64], resize_to: int, size: int, *, squash: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The region of each image that becomes the evaluated square: (start, end), each (n, 2) as y, x in pixels.

    Resizing to `resize_to` and cutting the central `size` out is one resize of this region. The sizes and offsets
    are rounded as torchvision's Resize and CenterCrop round them, so that the pixels are the same.
    """
    short = np.minimum(heights, widths)
    starts, ends = [], []
    for length in (heights, widths):
        resized = np.full_like(length, resize_to) if squash else np.floor(resize_to * length / short)
        offset = np.rint((resized - size) / 2)
        starts.append(offset * length / resized)
        ends.append((offset + size) * length / resized)
    return np.stack(starts, axis=-1).astype(np.float32), np.stack(ends, axis=-1).astype(np.float32)


def _stored(split: Split, images: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
    """What is on disk of each image: a file's bytes, (size,), or with raw records its pixels, (height, width, 3)."""
    contents = [split.encoded(image) for image in images]
    if split.manifest.encoding == "image":
        return contents
    rows = split.rows[images]
    return [pixels.reshape(h, w, 3) for pixels, h, w in zip(contents, rows["height"], rows["width"], strict=True)]


_CROP = {
    "axis_names": "HW", "normalized_anchor": False, "normalized_shape": False,
    "output_type": types.RGB, "adjust_orientation": False,
}  # fmt: skip


def crop_graph(feed: Callable[[], tuple[Any, ...]], *, size: int, num_threads: int) -> Pipeline:
    """Built; ``run()`` decodes on the CPU the boxes of `size` images that `feed` gives as (encoded, anchors, shapes).

    The older executor writes into the same memory again and again, which is a tenth faster: what ``run()`` gave is gone
    with the next one.
    """
    pipe: Pipeline = _crop_graph(feed, batch_size=size, num_threads=num_threads, device_id=None, exec_dynamic=False)
    pipe.build()
    return pipe


@pipeline_def
def _crop_graph(feed: Callable[[], tuple[Any, ...]]) -> Any:
    encoded, anchor, shape = fn.external_source(
        source=feed, num_outputs=3, batch=True, no_copy=True, dtype=[types.UINT8, types.INT32, types.INT32], ndim=[1, 1, 1]
    )
    return fn.decoders.image_slice(encoded, anchor, shape, device="cpu", **_CROP)


@pipeline_def
def _training_graph(feed: Callable[[], tuple[Any, ...]], data: DataConfig, pixels: PixelFormat, split: Split, mix: bool) -> Any:
    raw = split.manifest.encoding == "raw"
    dtypes = [types.UINT8, types.INT32, types.INT32, types.INT32, types.INT64, types.FLOAT, types.INT32]
    num_dims = [3 if raw else 1, 1, 1, 0, 1, 0, 0]
    layouts = ["HWC" if raw else "", *[""] * 6]
    fed = 7 if mix else 6
    stored, anchor, shape, mirror, targets, weight, *partner = fn.external_source(
        source=feed, num_outputs=fed, batch=True, no_copy=True, dtype=dtypes[:fed], ndim=num_dims[:fed], layout=layouts[:fed]
    )
    if raw:
        images = fn.slice(stored, anchor, shape, axis_names="HW").gpu()  # on the host: less to copy
    else:
        images = fn.decoders.image_slice(stored, anchor, shape, **mixed_decoder(data, split), **_CROP)
    return augmented(images, mirror, targets, weight, partner[0] if mix else None, data, pixels)


def augmented(
    images: Any, mirror: Any, targets: Any, weight: Any, partner: Any | None, data: DataConfig, pixels: PixelFormat
) -> tuple[Any, Any, Any]:
    """The outputs of a training graph from its crops: resized, mirrored, normalised, mixed if there is a `partner`, cast."""
    images = fn.resize(images, size=[data.train_size] * 2, interp_type=types.INTERP_LINEAR, antialias=data.antialias)
    images = fn.crop_mirror_normalize(
        images, mirror=mirror, mean=data.mean, std=data.std, dtype=types.FLOAT, output_layout=_layout(pixels)
    )
    weight = _to_device(weight, pixels)
    if partner is not None:
        # In float32: DALI's arithmetic on the CPU refuses float16.
        images = weight * images + (1.0 - weight) * fn.permute_batch(images, indices=partner)
    return _cast(images, pixels), _to_device(targets, pixels), weight


@pipeline_def
def _evaluation_graph(feed: Callable[[], tuple[Any, ...]], data: DataConfig, pixels: PixelFormat, raw: bool) -> Any:
    stored, start, end, labels = fn.external_source(
        source=feed, num_outputs=4, batch=True, no_copy=True,
        dtype=[types.UINT8, types.FLOAT, types.FLOAT, types.INT64], ndim=[3 if raw else 1, 1, 1, 0],
        layout=["HWC" if raw else "", "", "", ""],
    )  # fmt: skip
    if raw:
        images = _to_device(stored, pixels)
    else:
        images = fn.decoders.image(stored, device=_decoder(pixels), output_type=types.RGB, adjust_orientation=False)
    images = fn.resize(
        images, size=[data.eval_size] * 2, roi_start=start, roi_end=end, interp_type=types.INTERP_LINEAR, antialias=data.antialias
    )
    images = fn.crop_mirror_normalize(images, mean=data.mean, std=data.std, dtype=types.FLOAT, output_layout=_layout(pixels))
    return _cast(images, pixels), _to_device(labels, pixels)


def mixed_decoder(data: DataConfig, split: Split) -> dict[str, Any]:
    """Arguments of a decoder for training on a GPU, with room for the sizes that one image in a hundred exceeds. DALI has the
    hardware decoder make it for a whole micro-batch: for the largest image, some tens of megapixels in ImageNet, that would
    be tens of gigabytes."""
    height, width = (int(np.percentile(split.rows[side], 99)) for side in ("height", "width"))
    return {
        "device": "mixed", "hw_decoder_load": data.hw_decoder_load,
        "preallocate_height_hint": height, "preallocate_width_hint": width,
    }  # fmt: skip


def _to_device(node: Any, pixels: PixelFormat) -> Any:
    return node if pixels.device_id is None else node.gpu()


def _decoder(pixels: PixelFormat) -> str:
    return "cpu" if pixels.device_id is None else "mixed"


def _layout(pixels: PixelFormat) -> str:
    return "HWC" if pixels.channels_last else "CHW"


def _cast(images: Any, pixels: PixelFormat) -> Any:
    return fn.cast(images, dtype=types.FLOAT16) if pixels.half else images


def run_graph(pipe: Pipeline, explain: Callable[[RuntimeError], Exception]) -> list[torch.Tensor]:
    try:
        # On a GPU the outputs are ordered into torch's stream; without one there is none to name.
        with record_function("data: wait for DALI"):
            outputs = pipe.run(torch.cuda.current_stream(pipe.device_id)) if pipe.device_id is not None else pipe.run()
    except RuntimeError as error:
        raise explain(error) from error
    images, *others = (torch.from_dlpack(output.as_tensor()) for output in outputs)
    if images.shape[1] != 3:
        images = images.permute(0, 3, 1, 2)  # (n, h, w, 3) in memory: channels-last without a copy
    return [images, *others]


def _find_undecodable(split: Split, images: NDArray[np.int64], error: RuntimeError) -> Exception:
    """DALI names only a position in a batch that has already run ahead: try the images one by one."""
    if split.manifest.encoding == "raw":  # nothing was decoded
        return error
    for image in images:
        try:
            decode(split.encoded(image), device_id=None)
        except RuntimeError as fault:
            reason = str(fault).strip().splitlines()[-1]
            return DatasetError(
                f"{split.describe(int(image))} cannot be decoded: {reason}. "
                f"Run `python tools/verify_dataset.py {split.root}` for all such images, and convert again without them"
            )
    return error


def decode(encoded: NDArray[np.uint8], device_id: int | None) -> NDArray[np.uint8]:
    """The pixels of one image, (h, w, 3), decoded alone on the CPU (None) or a GPU: to see whether that works at all."""
    pipe = _decoding_graph(encoded, batch_size=1, num_threads=1, device_id=device_id)
    pipe.build()
    (images,) = pipe.run()
    return np.array((images if device_id is None else images.as_cpu()).at(0))


@pipeline_def
def _decoding_graph(encoded: NDArray[np.uint8]) -> Any:
    # A constant would be on the CPU or the GPU; a mixed decoder wants the file on the CPU.
    file = fn.external_source(source=lambda: [encoded], batch=True, dtype=types.UINT8, ndim=1)
    device = "cpu" if Pipeline.current().device_id is None else "mixed"
    return fn.decoders.image(file, device=device, output_type=types.RGB, adjust_orientation=False)
