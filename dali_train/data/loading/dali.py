"""DALI's graphs, for training and for evaluation, and what feeds and runs them. `decoders` has the nodes that decode.

The graphs draw no random numbers: boxes, flips, augmentations, Mixup partners and lambdas are inputs, and the outputs
are pure functions of them. `training_inputs` collects the inputs of a training graph, those of an image (`INPUTS`) and
those of each view of it (`_view_inputs`); `training_graph` and `_transformed` use them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline, pipeline_def
from nvidia.dali.plugin.pytorch import feed_ndarray, to_torch_type
from nvidia.dali.tensors import TensorCPU, TensorListCPU
from torch.autograd.profiler import record_function

from dali_train.config import DataConfig
from dali_train.data.dataset.index import Split, sizes_of
from dali_train.data.dataset.storage import Storage, read_stored
from dali_train.data.loading.augment import Augmentation
from dali_train.data.loading.decoders import (
    COMMON_OPTIONS,
    GPU_OPTIONS,
    PixelFormat,
    decode_boxes,
    decoder_options,
    decodes_boxes,
    if_of_size,
)
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.errors import RunError

Item = TypeVar("Item")
Explain = Callable[[RuntimeError], Exception]

PREFETCH = 2
"""Micro-batches prepared ahead of the one in use. Two are enough for the worst case: of 5,000 micro-batches with 256
ImageNet photographs the largest has 1.3 times the mean number of pixels, with 32 photographs 2.3 times."""
_INTERPOLATION = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
_FILTERS = np.array([int(types.INTERP_LINEAR), int(types.INTERP_CUBIC)], dtype=np.int32)  # of `MicroBatch.filters`


@dataclass(frozen=True)
class Input:
    """One input of a graph: dtype and number of dimensions of a sample, and the function that takes it from a
    micro-batch."""

    dtype: types.DALIDataType
    ndim: int
    take: Callable[[MicroBatch], Any]
    layout: str = ""


INPUTS: dict[str, Input] = {
    "anchor": Input(types.INT32, 1, lambda batch: batch.corners[0]),
    "shape": Input(types.INT32, 1, lambda batch: batch.corners[1]),
    "targets": Input(types.INT64, 1, lambda batch: batch.targets),
    "lambdas": Input(types.FLOAT, 0, lambda batch: batch.lambdas),
    "partners": Input(types.INT32, 0, lambda batch: batch.partners),
}
"""The inputs of a training graph; `training_inputs` adds those that depend on dataset and settings."""

VIEW_INPUTS: dict[str, Input] = {
    "start": Input(types.INT32, 1, lambda batch: -batch.offsets),  # of the data.crop_side square, relative to the box
    "filter": Input(types.INT32, 0, lambda batch: _FILTERS[batch.filters]),
    "mirror": Input(types.INT32, 0, lambda batch: batch.flips & 1),
    "upside down": Input(types.INT32, 0, lambda batch: batch.flips >> 1),
}
"""What a training graph does to a decoded box, in one view or in each of several."""


def training_inputs(split: Split, storage: Storage, views: Sequence[DataConfig]) -> dict[str, Input]:
    """Return all inputs of the training graph by name: the stored images and their sizes, `INPUTS`, and those of the
    view. With several `views` the name of an input of a view has its number: "mirror 3"."""
    inputs = {"stored": stored_input(split, storage), "size": size_input(split), **INPUTS}
    if split.manifest.encoding == "raw":
        del inputs["size"]
    if len(views) == 1:
        return inputs | _view_inputs(views[0])
    for number, data in enumerate(views):
        own = {
            "anchor": Input(types.INT32, 1, lambda view: view.boxes[:, :2]),
            "shape": Input(types.INT32, 1, lambda view: view.boxes[:, 2:]),
            **_view_inputs(data),
        }
        for name, one in own.items():
            inputs[f"{name} {number}"] = replace(one, take=partial(_of_view, number, one.take))
    return inputs


def _of_view(number: int, take: Callable[[MicroBatch], Any], batch: MicroBatch) -> Any:
    return np.ascontiguousarray(take(batch.views[number]))


def _view_inputs(data: DataConfig) -> dict[str, Input]:
    """Return the inputs of `_transformed`."""
    needed = {
        "start": data.crop_side is not None,
        "filter": data.interpolation == "random",
        "upside down": data.vertical_flip > 0,
    }
    inputs = {"mirror": VIEW_INPUTS["mirror"], **{name: VIEW_INPUTS[name] for name in needed if needed[name]}}
    augmentation = Augmentation.of(data)
    if augmentation is not None:
        for step in range(augmentation.num_steps):
            inputs[f"operator {step}"] = Input(types.INT32, 0, partial(_operators, step))
            inputs[f"argument {step}"] = Input(types.FLOAT, 0, partial(augmentation.arguments, step))
        if augmentation.erases:  # fn.erase takes only float32
            inputs["erased anchor"] = Input(types.FLOAT, 1, lambda b: b.erased[:, :2].astype(np.float32))
            inputs["erased shape"] = Input(types.FLOAT, 1, lambda b: b.erased[:, 2:].astype(np.float32))
    return inputs


def crop_inputs(split: Split, storage: Storage) -> dict[str, Input]:
    boxes = {name: INPUTS[name] for name in ("anchor", "shape")}
    return {"stored": stored_input(split, storage), "size": size_input(split), **boxes}


def stored_input(split: Split, storage: Storage) -> Input:
    """Return the input of the images as stored: encoded bytes, or raw pixels."""
    raw = split.manifest.encoding == "raw"
    return Input(
        types.UINT8, 3 if raw else 1, lambda b: read_stored(storage, split, b.images), layout="HWC" if raw else ""
    )


def size_input(split: Split) -> Input:
    """Return the input of the images' sizes by the index, see `if_of_size`."""
    return Input(types.INT32, 1, lambda b: sizes_of(split.rows[b.images]))


def _operators(step: int, batch: MicroBatch) -> NDArray[np.int32]:
    return np.ascontiguousarray(batch.operators[:, step])


class Ahead(Generic[Item]):
    """Calls `produce` in a thread that keeps `depth` results ready; ``next()`` returns them in order.

    An exception in `produce` is raised by the ``next()`` that would have returned its result.
    """

    def __init__(self, produce: Callable[[], Item], depth: int, name: str) -> None:
        self._produce = produce
        self._thread = ThreadPoolExecutor(1, name)
        self._ready: deque[Future[Item]] = deque(self._thread.submit(produce) for _ in range(depth))

    def next(self) -> Item:
        item = self._ready.popleft().result()
        self._ready.append(self._thread.submit(self._produce))
        return item

    def close(self) -> None:
        """Wait for the result that is being made, and end the thread; `produce` is not referred to any more."""
        self._thread.shutdown(cancel_futures=True)
        self._ready.clear()
        del self._produce


class Feed:
    """Feeds a graph with the `inputs` of one micro-batch after the other, and keeps a queue of those in flight.

    Args:
        next_micro_batch: called ahead of the graph's ``run()``.
        ahead: micro-batches whose inputs a thread prepares before DALI asks for them; 0: no such thread.
    """

    def __init__(
        self, inputs: Mapping[str, Input], next_micro_batch: Callable[[], MicroBatch], *, ahead: int = 0
    ) -> None:
        self._inputs, self._next_micro_batch = inputs, next_micro_batch
        self._ahead = Ahead(self._take, ahead, "feed") if ahead else None
        self._next = self._ahead.next if self._ahead is not None else self._take
        self.in_flight: deque[MicroBatch] = deque()
        """Micro-batches fed to DALI and not returned yet, oldest first."""

    def __call__(self) -> tuple[Any, ...]:
        batch, taken = self._next()
        self.in_flight.append(batch)
        return taken

    def _take(self) -> tuple[MicroBatch, tuple[Any, ...]]:
        with record_function("data: choose and read"):
            batch = self._next_micro_batch()
            return batch, tuple(as_tensor_list(one.take(batch), one.layout) for one in self._inputs.values())

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def nodes(self) -> dict[str, Any]:
        """Return the nodes of the inputs by name, for the graph that is being defined."""
        inputs = self._inputs.values()
        nodes = fn.external_source(
            source=self,
            num_outputs=len(inputs),
            batch=True,
            no_copy=True,
            dtype=[one.dtype for one in inputs],
            ndim=[one.ndim for one in inputs],
        )
        return {name: nodes[number] for number, name in enumerate(self._inputs)}


def as_tensor_list(samples: Any, layout: str) -> TensorListCPU:
    """Return an array, or a list of arrays, one a sample, as DALI's own batch, without a copy.

    DALI would make it itself, in a loop over the samples in the thread that calls the graph, which on a GPU is the one
    that launches the model's kernels: 2.3 ms of 3.0 for 256 images (measured).
    """
    if isinstance(samples, np.ndarray):
        return TensorListCPU(samples, layout)
    tensors = [TensorCPU(sample, layout) for sample in samples]
    return TensorListCPU(tensors, contiguous=False)  # type: ignore[call-overload]


def graph_options(pixels: PixelFormat, *, size: int) -> dict[str, Any]:
    """Return DALI's Pipeline arguments for batches of `size` images, prepared `PREFETCH` batches ahead."""
    return {
        "batch_size": size,
        "num_threads": pixels.num_threads,
        "device_id": pixels.device_id,
        "prefetch_queue_depth": PREFETCH + 1,  # a queue of n feeds n - 1 ahead (measured)
    }


@pipeline_def(enable_conditionals=True)
def training_graph(feed: Feed, views: Sequence[DataConfig], pixels: PixelFormat, split: Split) -> Any:
    """Define the graph that does everything except mixing: images of each view, targets, lambdas, partners.

    Args:
        views: the settings of each view of an image, at least one.
        pixels: the format of the images, and where they are decoded.
    """
    nodes = feed.nodes()
    stored, anchor, shape = nodes["stored"], nodes["anchor"], nodes["shape"]
    if split.manifest.encoding == "raw":
        images = to_device(fn.slice(stored, anchor, shape, axis_names="HW"), pixels)  # on the host: less to copy
    else:
        options = decoder_options(views[0], pixels, split)
        images = decode_boxes(stored, anchor, shape, size=nodes["size"], boxes=decodes_boxes(pixels), **options)
    outputs = [to_device(nodes[name], pixels) for name in ("targets", "lambdas", "partners")]
    if len(views) == 1:
        return _transformed(images, views[0], pixels, nodes), *outputs
    transformed = []
    for number, data in enumerate(views):  # what is decoded is a box around the crops of all views
        own = {name.removesuffix(f" {number}"): node for name, node in nodes.items() if name.endswith(f" {number}")}
        crops = fn.slice(images, own["anchor"] - anchor, own["shape"], axis_names="HW")
        transformed.append(_transformed(crops, data, pixels, own))
    return *transformed, *outputs


def _transformed(images: Any, data: DataConfig, pixels: PixelFormat, nodes: dict[str, Any]) -> Any:
    """Return the node of decoded boxes, or of crops from them, as `data` says: resized, augmented, normalised."""
    if data.crop_side is not None:
        start = nodes["start"]
        if data.crop_padding_mode == "reflect":
            images = reflected_on_all_sides(images, data.crop_padding)
            start = start + data.crop_padding
        images = fn.slice(
            images,
            start=start,
            shape=[data.crop_side] * 2,
            axis_names="HW",
            out_of_bounds_policy="pad",
            fill_values=0,
        )
    images = resized(images, data, nodes.get("filter"))
    mirror = nodes["mirror"]
    augmentation = Augmentation.of(data)
    if augmentation is not None or data.vertical_flip > 0:
        vertical = {"vertical": nodes["upside down"]} if data.vertical_flip > 0 else {}
        images = fn.flip(images, horizontal=mirror, **vertical)
        mirror = None
    if augmentation is not None:
        steps = [(nodes[f"operator {s}"], nodes[f"argument {s}"]) for s in range(augmentation.num_steps)]
        box = (nodes["erased anchor"], nodes["erased shape"]) if augmentation.erases else None
        images = augmentation.nodes(images, steps, box)
    return normalised(images, mirror, data, pixels)


@pipeline_def(device_id=None)
def crop_graph(feed: Feed) -> Any:
    """Define the graph that decodes the boxes of the images from `feed` on the CPU."""
    nodes = feed.nodes()
    stored, anchor, shape = nodes["stored"], nodes["anchor"], nodes["shape"]
    return decode_boxes(stored, anchor, shape, size=nodes["size"], boxes=True, device="cpu", **COMMON_OPTIONS)


@pipeline_def
def evaluation_graph(feed: Callable[[], tuple[Any, ...]], data: DataConfig, pixels: PixelFormat, raw: bool) -> Any:
    """Define the evaluation graph: images and labels, from stored images, their sizes, the corners of their regions,
    and labels."""
    stored, size, start, end, labels = fn.external_source(
        source=feed,
        num_outputs=5,
        batch=True,
        no_copy=True,
        dtype=[types.UINT8, types.INT32, types.FLOAT, types.FLOAT, types.INT64],
        ndim=[3 if raw else 1, 1, 1, 1, 0],
        layout=["HWC" if raw else "", "", "", "", ""],
    )
    images: Any = to_device(stored, pixels) if raw else fn.decoders.image(stored, **decoder_options(data, pixels))
    images = fn.resize(
        images,
        size=[data.eval_size] * 2,
        roi_start=if_of_size(start, images.shape(), size),
        roi_end=end,
        interp_type=_INTERPOLATION[data.eval_filter],
        antialias=data.antialias,
    )
    return normalised(images, None, data, pixels), to_device(labels, pixels)


def reflected_on_all_sides(images: Any, padding: int) -> Any:
    """Return the node of images, (height, width, 3), with `padding` pixels of their reflection on each side."""
    above = images[1 : padding + 1]
    below = images[-padding - 1 : -1]
    rows = fn.cat(*(fn.flip(above, horizontal=0, vertical=1), images, fn.flip(below, horizontal=0, vertical=1)), axis=0)
    left = rows[:, 1 : padding + 1]
    right = rows[:, -padding - 1 : -1]
    return fn.cat(*(fn.flip(left, horizontal=1), rows, fn.flip(right, horizontal=1)), axis=1)


def resized(images: Any, data: DataConfig, drawn: Any | None = None) -> Any:
    """Return the node of crops resized to data.train_size.

    Args:
        drawn: the node of each image's filter, int32, with data.interpolation random.
    """
    how = _INTERPOLATION[data.interpolation] if drawn is None else fn.reinterpret(drawn, dtype=types.INTERP_TYPE)
    return fn.resize(images, size=[data.train_size] * 2, interp_type=how, antialias=data.antialias)


def normalised(images: Any, mirror: Any | None, data: DataConfig, pixels: PixelFormat) -> Any:
    """Return a graph's last node: mirrored where `mirror` is 1, (x - mean) / std, in the pixel format's layout."""
    mirrored = {} if mirror is None else {"mirror": mirror}
    layout = "HWC" if pixels.channels_last else "CHW"
    return fn.crop_mirror_normalize(
        images, mean=data.mean, std=data.std, dtype=pixels.dali_dtype, output_layout=layout, **mirrored
    )


def to_device(node: Any, pixels: PixelFormat) -> Any:
    """Return `node` on the decoding device."""
    return node if pixels.device_id is None else node.gpu()


def build_graph(pipe: Pipeline) -> None:
    """Prepare a graph to be run.

    Raises:
        RunError: DALI cannot use the GPU, most often because the driver is older than the CUDA it is built for.
    """
    try:
        pipe.build()
    except RuntimeError as error:
        if pipe.device_id is None or "CUDA" not in str(error):
            raise
        reason = str(error).strip().splitlines()[-1]
        raise RunError(
            f"DALI cannot use GPU {pipe.device_id}: {reason}. Update the driver or install the nvidia-dali-cuda "
            "package that suits it (`dali-train doctor` compares them), or set data.device cpu"
        ) from error


def run_graph(pipe: Pipeline, explain: Explain) -> list[torch.Tensor]:
    """Return a graph's next outputs, in their memory layout, on the graph's device.

    Raises:
        Exception: the result of `explain` for DALI's error.
    """
    try:
        # On a GPU the outputs are ordered into torch's current stream.
        with record_function("data: wait for DALI"):
            outputs = pipe.run(torch.cuda.current_stream(pipe.device_id)) if pipe.device_id is not None else pipe.run()
    except RuntimeError as error:
        raise explain(error) from error
    tensors = [output.as_tensor() for output in outputs]
    if pipe.device_id is None:
        return [torch.from_dlpack(tensor) for tensor in tensors]
    # Copy into torch's own memory. A tensor shared with DALI is freed by a DALI thread that waits for the device, which
    # crashes the process while another thread captures a CUDA graph, and keeps a core busy at other times.
    stream = torch.cuda.current_stream(pipe.device_id)
    return [
        feed_ndarray(
            tensor, torch.empty(tensor.shape(), dtype=to_torch_type[tensor.dtype], device=stream.device), stream
        )
        for tensor in tensors
    ]


def in_format(images: torch.Tensor, pixels: PixelFormat) -> torch.Tensor:
    """Return a graph's images, (n, 3, h, w) or (n, h, w, 3), as (n, 3, h, w) of the pixel format's dtype."""
    images = images.to(pixels.dtype)
    return images.permute(0, 3, 1, 2) if pixels.channels_last else images  # (n, h, w, 3) in memory is channels-last


def decode_repeatedly(
    encoded: Sequence[NDArray[np.uint8]], device_id: int | None, *, rounds: int, hw_decoder_load: float = 0.0
) -> Iterator[list[NDArray[np.uint8]]]:
    """Decode whole images as one batch, `rounds` times, and yield their pixels, (h, w, 3) each.

    Args:
        device_id: a GPU; None: the CPU.
        hw_decoder_load: the fraction for the GPU's hardware decoder, if it has one.

    Raises:
        RuntimeError: DALI cannot decode them.
    """
    pipe = _decoding_graph(encoded, hw_decoder_load, batch_size=len(encoded), num_threads=1, device_id=device_id)
    pipe.build()
    for _ in range(rounds):
        (images,) = pipe.run()
        on_host = images if device_id is None else images.as_cpu()
        yield [np.array(on_host.at(number)) for number in range(len(encoded))]


@pipeline_def
def _decoding_graph(encoded: Sequence[NDArray[np.uint8]], hw_decoder_load: float) -> Any:
    # Not constants, which could be on the GPU: a mixed decoder needs the files on the CPU.
    files = fn.external_source(source=lambda: list(encoded), batch=True, dtype=types.UINT8, ndim=1)
    on_gpu = {**GPU_OPTIONS, "hw_decoder_load": hw_decoder_load}
    options = {"device": "cpu", **COMMON_OPTIONS} if Pipeline.current().device_id is None else on_gpu
    return fn.decoders.image(files, **options)
