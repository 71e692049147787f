"""From micro-batches to tensors: the DALI graphs for training and evaluation; stream.py has one more.

The graphs draw no random number and decide nothing: boxes, flips, augmentations, Mixup partners and lambdas are
computed before, so that what comes out is a pure function of them. Everything that happens to pixels happens here:
decode (raw records skip it), crop, resize, mirror, augment, normalise and cast in the graph, then mix in torch. On the
CPU DALI decodes training images and `CpuTransform` does the rest.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline, pipeline_def
from nvidia.dali.plugin.pytorch import feed_ndarray, to_torch_type
from torch.autograd.profiler import record_function

from dali_train.config import DataConfig
from dali_train.data.dataset.decode import why_undecodable
from dali_train.data.dataset.index import Split
from dali_train.data.loading.ahead import Ahead
from dali_train.data.loading.augment import Augmentation, applied_by_dali
from dali_train.data.loading.cpu import CpuTransform
from dali_train.data.loading.decoder import COMMON_OPTIONS, decode_boxes, decoder_options, decodes_boxes
from dali_train.data.loading.mixing import mix, show_noise
from dali_train.data.loading.pixels import PixelFormat
from dali_train.data.loading.storage import Storage, open_storage, read_stored
from dali_train.data.sampling.micro_batch import MicroBatch, MicroBatchDraws
from dali_train.errors import DatasetError

Produced = tuple[torch.Tensor, torch.Tensor, torch.Tensor, MicroBatchDraws]

_INTERPOLATION = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
_PREPARED = 2  # micro-batches whose draws and byte ranges are ready when DALI asks


class Source:
    """Where a loader's micro-batches come from."""

    warnings: Sequence[str] = ()
    """What to report to the user when the run starts."""

    def run(self) -> Produced:
        """(images, targets, lambdas, draws) of the next micro-batch.

        images: (n, 3, size, size) of the pixel format's dtype, mixed; targets: (n, 2) int64, the class of each image
            and
        of its partner; lambdas: (n,) float32, the weight of the image itself. On the decoding device, in the order of
        torch's current stream: the host does not wait for the device.

        Raises:
            DatasetError: an image cannot be decoded; the message says which and where it lies.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of this coordinate besides the step, to resume after the last micro-batch: plain
        values."""
        return {}


class IndexedSource(Source):
    """Images found through the index: what the pipelines on both devices share.

    Args:
        next_micro_batch: called ahead of ``run()``.
        size: images in each micro-batch.
        mix: whether images are mixed with their partners.
    """

    def __init__(
        self,
        split: Split,
        storage: Storage,
        next_micro_batch: Callable[[], MicroBatch],
        data: DataConfig,
        pixels: PixelFormat,
        *,
        size: int,
        mix: bool,
    ) -> None:
        self._split, self._storage, self._next = split, storage, next_micro_batch
        self._mix = mix
        self._augmentation = Augmentation.of(data)
        # Fed to DALI and not given back yet, oldest first.
        self._in_flight: deque[MicroBatch] = deque()
        self._start(data, pixels, size)

    def _start(self, data: DataConfig, pixels: PixelFormat, size: int) -> None:
        raise NotImplementedError

    def _stored(self, batch: MicroBatch) -> list[NDArray[np.uint8]]:
        return read_stored(self._storage, self._split, batch.images)

    def _explain(self, error: RuntimeError) -> Exception:
        return _find_undecodable(
            self._split, self._storage, np.concatenate([batch.images for batch in self._in_flight]), error
        )


def training_source(
    split: Split,
    storage: Storage,
    next_micro_batch: Callable[[], MicroBatch],
    data: DataConfig,
    pixels: PixelFormat,
    *,
    size: int,
    mix: bool,
) -> Source:
    """The source of the micro-batches of `size` images that `next_micro_batch` names."""
    kind = CpuTrainingPipeline if pixels.device_id is None else DaliTrainingPipeline
    return kind(split, storage, next_micro_batch, data, pixels, size=size, mix=mix)


class DaliTrainingPipeline(IndexedSource):
    """One graph does everything but mixing, `data.prefetch` micro-batches ahead. Meant for a GPU; runs on a CPU,
    too."""

    def _start(self, data: DataConfig, pixels: PixelFormat, size: int) -> None:
        self._data, self._pixels = data, pixels
        self._noises: deque[NDArray[np.float64] | None] = (
            deque()
        )  # normalised, of each batch in flight; None: nothing shows it
        self._prepared = Ahead(self._prepare, _PREPARED, "feed")
        self._pipe = _training_graph(
            self._feed,
            data,
            pixels,
            self._split,
            self._augmentation,
            batch_size=size,
            num_threads=pixels.num_threads,
            device_id=pixels.device_id,
            prefetch_queue_depth=queue_depth(data),
        )
        self._pipe.build()

    def run(self) -> Produced:
        images, targets, lambdas, partners = run_graph(self._pipe, self._explain)
        batch, noise, channels_last = self._in_flight.popleft(), self._noises.popleft(), self._pixels.channels_last
        if noise is not None:
            images = show_noise(
                images,
                to_device_of(images, batch.erased),
                to_device_of(images, noise).to(images.dtype),
                channels_last=channels_last,
            )
        if self._mix:
            cuts = to_device_of(images, batch.cuts) if batch.cuts.any() else None
            images = mix(images, partners, lambdas, cuts, channels_last=channels_last)
        return in_format(images, self._pixels), targets, lambdas, batch

    def _prepare(self) -> tuple[MicroBatch, NDArray[np.float64] | None, tuple[Any, ...]]:
        with record_function("data: choose and read"):
            batch = self._next()
            fed = (self._stored(batch), *batch.corners, batch.flips, batch.targets, batch.lambdas, batch.partners)
            more = [] if self._augmentation is None else self._augmentation.fed(batch)
            noise = None
            if batch.noise.size and batch.erased.any():
                noise = (batch.noise - np.array(self._data.mean)) / np.array(self._data.std)
            return batch, noise, (*fed, *more, *([] if self._data.crop_side is None else [-batch.offsets]))

    def _feed(self) -> tuple[Any, ...]:
        batch, noise, fed = self._prepared.next()
        self._in_flight.append(batch)
        self._noises.append(noise)
        return fed


class CpuTrainingPipeline(IndexedSource):
    """DALI decodes, `CpuTransform` does the rest, in a thread that keeps `data.prefetch` micro-batches ready."""

    def _start(self, data: DataConfig, pixels: PixelFormat, size: int) -> None:
        self._transform = CpuTransform(data, pixels, size=size)
        self._crop_side = data.crop_side
        self._pipe: Pipeline | None = None
        if self._split.manifest.encoding == "image":
            self._pipe = crop_graph(self._feed, size=size, num_threads=pixels.num_threads)
        self._ready = Ahead(self._produce, data.prefetch, "data")

    def run(self) -> Produced:
        with record_function("data: wait"):
            return self._ready.next()

    def _produce(self) -> Produced:
        crops, batch = self._cut() if self._pipe is None else self._decode(self._pipe)
        if self._crop_side is not None:
            crops = [padded(crop, offset, self._crop_side) for crop, offset in zip(crops, batch.offsets, strict=True)]
        images = self._transform(
            crops,
            batch.flips,
            (batch.partners, batch.lambdas, batch.cuts) if self._mix else None,
            None if self._augmentation is None else self._augmentation.operations(batch),
        )
        return images, torch.from_numpy(batch.targets), torch.from_numpy(batch.lambdas), batch

    def _cut(self) -> tuple[list[NDArray[np.uint8]], MicroBatch]:
        batch = self._next()
        boxes = zip(self._stored(batch), batch.boxes.tolist(), strict=True)
        return [image[y : y + height, x : x + width] for image, (y, x, height, width) in boxes], batch

    def _decode(self, pipe: Pipeline) -> tuple[list[NDArray[np.uint8]], MicroBatch]:
        try:
            (crops,) = pipe.run()
        except RuntimeError as error:
            raise self._explain(error) from error
        return [np.asarray(crop) for crop in crops], self._in_flight.popleft()

    def _feed(self) -> tuple[Any, ...]:
        batch = self._next()
        self._in_flight.append(batch)
        return self._stored(batch), *batch.corners


class EvaluationPipeline:
    """Evaluates the batches of image numbers that it was made with, over and over: after the last comes the first.

    So the start of the next evaluation is already prepared when one ends, and nothing marks an end.
    """

    def __init__(self, split: Split, batches: list[NDArray[np.int64]], data: DataConfig, pixels: PixelFormat) -> None:
        self._split, self._storage = split, open_storage(split, data)
        self._batches = batches
        self._resize_to = data.eval_resize_to
        self._size = data.eval_size
        self._squash = data.eval_resize == "squash"
        self._pixels = pixels
        self._position = 0
        self._pipe = _evaluation_graph(
            self._feed,
            data,
            pixels,
            split.manifest.encoding == "raw",
            batch_size=max(len(batch) for batch in batches),
            num_threads=pixels.num_threads,
            device_id=pixels.device_id,
            prefetch_queue_depth=queue_depth(data),
        )
        self._pipe.build()

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(images, labels): (n, 3, eval_size, eval_size) of the pixel format's dtype, and (n,) int64.

        Raises:
            DatasetError: an image cannot be decoded; the message says which and where it lies.
        """
        images, labels = run_graph(self._pipe, self._explain)
        return in_format(images, self._pixels), labels

    def _feed(self) -> tuple[Any, ...]:
        images = self._batches[self._position % len(self._batches)]
        self._position += 1
        rows = self._split.rows[images]
        start, end = central_regions(
            rows["height"].astype(np.float64),
            rows["width"].astype(np.float64),
            self._resize_to,
            self._size,
            squash=self._squash,
        )
        return read_stored(self._storage, self._split, images), start, end, rows["label"].astype(np.int64)

    def _explain(self, error: RuntimeError) -> Exception:
        return _find_undecodable(self._split, self._storage, np.concatenate(self._batches), error)


def to_device_of(images: torch.Tensor, array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array).to(images.device, non_blocking=True)


def padded(crop: NDArray[np.uint8], offset: NDArray[np.int32], side: int) -> NDArray[np.uint8]:
    """A black square with `crop`, (height, width, 3), at `offset` from the top and left: (side, side, 3)."""
    height, width = crop.shape[:2]
    if height == width == side:
        return crop
    square = np.zeros((side, side, 3), dtype=np.uint8)
    square[offset[0] : offset[0] + height, offset[1] : offset[1] + width] = crop
    return square


def queue_depth(data: DataConfig) -> int:
    """DALI's queue for data.prefetch batches that are fed ahead of the one in use: a queue of n feeds n - 1 ahead
    (measured)."""
    return data.prefetch + 1


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
        source=feed,
        num_outputs=3,
        batch=True,
        no_copy=True,
        dtype=[types.UINT8, types.INT32, types.INT32],
        ndim=[1, 1, 1],
    )
    return decode_boxes(encoded, anchor, shape, boxes=True, device="cpu", **COMMON_OPTIONS)


@pipeline_def(enable_conditionals=True)
def _training_graph(
    feed: Callable[[], tuple[Any, ...]],
    data: DataConfig,
    pixels: PixelFormat,
    split: Split,
    augmentation: Augmentation | None,
) -> Any:
    raw = split.manifest.encoding == "raw"
    dtypes = [types.UINT8, types.INT32, types.INT32, types.INT32, types.INT64, types.FLOAT, types.INT32]
    num_dims = [3 if raw else 1, 1, 1, 0, 1, 0, 0]
    if augmentation is not None:
        more_dtypes, more_dims = augmentation.dali_inputs()
        dtypes, num_dims = dtypes + more_dtypes, num_dims + more_dims
    if data.crop_side is not None:
        dtypes, num_dims = [*dtypes, types.INT32], [*num_dims, 1]
    stored, anchor, shape, mirror, targets, weight, partner, *draws = fn.external_source(
        source=feed,
        num_outputs=len(dtypes),
        batch=True,
        no_copy=True,
        dtype=dtypes,
        ndim=num_dims,
        layout=["HWC" if raw else "", *[""] * (len(dtypes) - 1)],
    )
    if raw:
        images = to_device(fn.slice(stored, anchor, shape, axis_names="HW"), pixels)  # on the host: less to copy
    else:
        options = decoder_options(data, pixels, split)
        images = decode_boxes(stored, anchor, shape, boxes=decodes_boxes(pixels), **options)
    if data.crop_side is not None:
        *draws, start = draws
        images = fn.slice(
            images, start=start, shape=[data.crop_side] * 2, axis_names="HW", out_of_bounds_policy="pad", fill_values=0
        )
    images = resized(images, data)
    if augmentation is not None:
        images = applied_by_dali(augmentation, fn.flip(images, horizontal=mirror), draws)
        mirror = None
    return normalised(images, mirror, data, pixels), *(to_device(node, pixels) for node in (targets, weight, partner))


def resized(images: Any, data: DataConfig) -> Any:
    """Crops as the squares that are trained on."""
    return fn.resize(
        images, size=[data.train_size] * 2, interp_type=_INTERPOLATION[data.interpolation], antialias=data.antialias
    )


def normalised(images: Any, mirror: Any | None, data: DataConfig, pixels: PixelFormat) -> Any:
    """What a graph gives: mirrored where `mirror` says so, (x - mean) / std, in the pixel format's order and dtype."""
    mirrored = {} if mirror is None else {"mirror": mirror}
    layout = "HWC" if pixels.channels_last else "CHW"
    return fn.crop_mirror_normalize(
        images, mean=data.mean, std=data.std, dtype=pixels.dali_dtype, output_layout=layout, **mirrored
    )


@pipeline_def
def _evaluation_graph(feed: Callable[[], tuple[Any, ...]], data: DataConfig, pixels: PixelFormat, raw: bool) -> Any:
    stored, start, end, labels = fn.external_source(
        source=feed,
        num_outputs=4,
        batch=True,
        no_copy=True,
        dtype=[types.UINT8, types.FLOAT, types.FLOAT, types.INT64],
        ndim=[3 if raw else 1, 1, 1, 0],
        layout=["HWC" if raw else "", "", "", ""],
    )
    images = to_device(stored, pixels) if raw else fn.decoders.image(stored, **decoder_options(data, pixels))
    images = fn.resize(
        images,
        size=[data.eval_size] * 2,
        roi_start=start,
        roi_end=end,
        interp_type=_INTERPOLATION[data.interpolation],
        antialias=data.antialias,
    )
    return normalised(images, None, data, pixels), to_device(labels, pixels)


def to_device(node: Any, pixels: PixelFormat) -> Any:
    return node if pixels.device_id is None else node.gpu()


def run_graph(pipe: Pipeline, explain: Callable[[RuntimeError], Exception]) -> list[torch.Tensor]:
    """A graph's next outputs, as they lie in memory, on the graph's device."""
    try:
        # On a GPU the outputs are ordered into torch's stream; without one there is none to name.
        with record_function("data: wait for DALI"):
            outputs = pipe.run(torch.cuda.current_stream(pipe.device_id)) if pipe.device_id is not None else pipe.run()
    except RuntimeError as error:
        raise explain(error) from error
    tensors = [output.as_tensor() for output in outputs]
    if pipe.device_id is None:
        return [torch.from_dlpack(tensor) for tensor in tensors]
    # Into torch's own memory. A tensor that torch shares with DALI is freed by a thread of DALI's which waits for the
    # device: that ends the process while another thread records a CUDA graph, and keeps a core busy at other times.
    stream = torch.cuda.current_stream(pipe.device_id)
    return [
        feed_ndarray(
            tensor, torch.empty(tensor.shape(), dtype=to_torch_type[tensor.dtype], device=stream.device), stream
        )
        for tensor in tensors
    ]


def in_format(images: torch.Tensor, pixels: PixelFormat) -> torch.Tensor:
    """A graph's images, (n, 3, h, w) or (n, h, w, 3), as (n, 3, h, w) of the pixel format's dtype."""
    images = images.to(pixels.dtype)
    return images.permute(0, 3, 1, 2) if pixels.channels_last else images  # (n, h, w, 3) in memory is channels-last


def _find_undecodable(split: Split, storage: Storage, images: NDArray[np.int64], error: RuntimeError) -> Exception:
    """DALI names only a position in a batch that has already run ahead: try the images one by one."""
    if split.manifest.encoding == "raw":  # nothing was decoded
        return error
    for image, encoded in zip(images.tolist(), read_stored(storage, split, images), strict=True):
        try:
            decode(encoded, device_id=None)
        except RuntimeError as fault:
            reason = why_undecodable(split.encoded(image).tobytes(), fault)
            return DatasetError(
                f"{split.describe(image)} cannot be decoded: {reason}. "
                f"Run `dali-train data verify {split.root}` for all such images, and convert again without them"
            )
    return error


def decode(encoded: NDArray[np.uint8], device_id: int | None) -> NDArray[np.uint8]:
    """The pixels of one image, (h, w, 3), decoded alone on the CPU (None) or a GPU: to see whether that works at
    all."""
    pipe = _decoding_graph(encoded, batch_size=1, num_threads=1, device_id=device_id)
    pipe.build()
    (images,) = pipe.run()
    return np.array((images if device_id is None else images.as_cpu()).at(0))


@pipeline_def
def _decoding_graph(encoded: NDArray[np.uint8]) -> Any:
    # A constant would be on the CPU or the GPU; a mixed decoder wants the file on the CPU.
    file = fn.external_source(source=lambda: [encoded], batch=True, dtype=types.UINT8, ndim=1)
    device = "cpu" if Pipeline.current().device_id is None else "mixed"
    return fn.decoders.image(file, device=device, **COMMON_OPTIONS)
