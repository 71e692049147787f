"""Batches on the model's device, for this trainer and for any other training loop: `TrainLoader` and `EvalLoader`.

The way of the data is in `TrainLoader._pipeline_of`: `read_ahead` draws the micro-batches and has their bytes read, and
the pipeline decodes, augments and mixes; `TrainLoader._run` brings the batch to the device. A loader knows the
data-parallel coordinate and size, not the global rank, because with model parallelism several ranks share one
coordinate. Its position is a step; everything else follows from the settings and the seed. So its state is a step, and
what decides the samples, by which another loader is refused; any number of coordinates can load it.
"""

import gc
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dali_train.config import BatchConfig, Config, DataConfig, MixupConfig, SampleConfig, View
from dali_train.config.check import Extra, require
from dali_train.data.dataset.index import Split, open_split
from dali_train.data.dataset.manifest import SplitName
from dali_train.data.dataset.sample_recipe import changes_between, dataset_fields, sample_settings
from dali_train.data.dataset.storage import open_storage
from dali_train.data.loading.cache import Node
from dali_train.data.loading.decoders import PixelFormat
from dali_train.data.loading.loader_arguments import (
    Place,
    blank_images,
    checked_views,
    data_config,
    dtype_of,
    in_keywords,
    pixel_format,
    pixels_for,
    refuse_copy,
)
from dali_train.data.loading.pipelines import (
    Batch,
    CpuPipeline,
    DaliPipeline,
    EvaluationPipeline,
    TrainingPipeline,
    without_waiting,
)
from dali_train.data.loading.read_ahead import read_ahead
from dali_train.data.sampling.micro_batch import MicroBatch, Segment, segment_at, view_configs
from dali_train.errors import RunError

DALI_READER = Extra[Callable[..., TrainingPipeline]](
    "dali_train.extras.dali_reader:DaliReaderPipeline", "data.reader dali"
)
AnyPipeline = TypeVar("AnyPipeline", TrainingPipeline, EvaluationPipeline)
Targets = Literal["classes", "pairs"]


def uninterrupted(build: Callable[[], AnyPipeline]) -> AnyPipeline:
    """Return the pipeline that `build` returns, which a thread of its own calls.

    An interrupt (Ctrl-C, a notebook's stop) is raised in the main thread, that is here, once the pipeline is complete
    and closed again. In the middle of `build` it would leave the threads of half a pipeline behind, or the lock of an
    import that was going on, for which all threads would wait from then on (Python 3.11).
    """
    with ThreadPoolExecutor(1, "open") as thread:
        future = thread.submit(build)
        try:
            return future.result()
        except BaseException:
            if future.exception() is None:
                future.result().close()
            raise


class SyntheticPipeline(TrainingPipeline):
    """The same micro-batches with noise instead of their images, to measure the trainer without the data path."""

    def __init__(self, micro_batches: Iterator[MicroBatch], images: torch.Tensor) -> None:
        self._micro_batches = micro_batches
        self._images = images

    def run(self) -> Batch:
        batch = next(self._micro_batches)
        return Batch(self._images, torch.from_numpy(batch.targets), torch.from_numpy(batch.lambdas), batch)


class _Loader(Generic[AnyPipeline]):
    """What both loaders have: a pipeline that is opened when it is needed, in the process that made them."""

    def __init__(
        self,
        split: Split,
        pixels: PixelFormat,
        place: Place,
        node: Node | None,
        *,
        decodes: bool,
        data: DataConfig | None = None,
    ) -> None:
        """
        Args:
            data: the settings of a loader for training, which must fit the labels; None: it is for evaluation.
        """
        self._split = split
        self._pixels = pixels
        self._place = place
        self._node = node
        self._decodes = decodes
        if data is not None:
            split.label_kind.check_data(data, str(split.root))
        self._multi_hot = split.label_kind.multi_hot(split.num_classes, place.device)
        self._process = os.getpid()
        self._pipeline: AnyPipeline | None = None

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise RunError(
                f"this loader was made in process {self._process} and is used in process {os.getpid()}, a fork of it "
                "without its threads: make the loader in the process that uses it, without workers of a DataLoader, "
                "which it does not need"
            )

    def close(self) -> None:
        """End the threads, close the files and free the memory, as dropping the loader does. It can be used again."""
        pipeline = self._pipeline
        self._pipeline = None
        if pipeline is not None:
            pipeline.close()
            del pipeline
            gc.collect()  # it is in reference cycles with its graph

    def __del__(self) -> None:
        if getattr(self, "_process", None) == os.getpid() and not sys.is_finalizing():
            self.close()


class TrainLoader(_Loader[TrainingPipeline]):
    """One coordinate's training micro-batches on its device: the trainer's, and those of any other loop.

    Iterating yields (images, targets) to the end of the epoch, which is its rest after a resume:

    - images: (n, 3, size, size), normalised, on `device`.
    - targets: (n,) int64, or with mixup (n, classes) float32. With ``targets="pairs"`` instead (images, pairs, lambdas)
      is yielded: (n, 2) int64, the classes of an image and of its partner, and (n,) float32, the weight of the first.

    Where an image may have any number of classes, each class number is instead a row of all classes, 1 for those of the
    image and 0 for the others: targets are (n, classes) float32, mixed with mixup, and pairs (n, 2, classes) float32.

    With `views` images is a list of tensors instead, one for each view, with draws of its own.

    The sequence of images goes on over epochs without a gap, so epochs may differ in length by one step. It is the same
    for any number of coordinates. A step takes `global_batch` images; if that is more than one micro-batch on each
    coordinate, `ends_step` is True after the last one, when the optimizer's step is due.

    Args:
        dataset: the directory of a dataset or of an index in place, or a URL; or several with their weights, as
            ``{"photos": 3, "art": 1}``: a mixture, see data.mix, whose first is data.root.
        batch_size: images of a micro-batch.
        global_batch: images of a step on all coordinates; None: of a state that is loaded, else batch_size x dp_size.
        image_size: side of the images, in pixels (data.train_size).
        mixup: the settings of mixup, as ``dict(alpha=0.2)``.
        views: how many of each image; or `View` for each group of views with a size, such as
            ``(View(size=224, n=2, area=(0.32, 1)), View(size=96, n=8, area=(0.05, 0.32)))``.
        targets: "pairs" for the two classes and their weight, see above.
        dtype: fp32, bf16 or fp16, of the images.
        channels_last: the memory format of the images.
        device: where the images are needed; None: this process's GPU, or the CPU without one.
        decode_device: cpu or gpu (data.device); auto: the same.
        dp_rank, dp_size: the data-parallel coordinate; None: in `group`, in torch's default process group, or in the
            launcher's environment; a single process without any.
        num_threads: for decoding; None: this process's share of the cores.
        settings: every other setting of the config's section data, under its name there: seed, augment, crop_area, ...

    Raises:
        ConfigError: a value cannot be used; the message names it and the remedy.
        DatasetError: the dataset does not exist, or is damaged.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Mapping[str, float],
        *,
        batch_size: int,
        global_batch: int | None = None,
        split: SplitName = "train",
        image_size: int = 224,
        mixup: MixupConfig | Mapping[str, Any] | None = None,
        views: int | Sequence[View] = (),
        targets: Targets = "classes",
        dtype: str | torch.dtype = "fp32",
        channels_last: bool = False,
        device: torch.device | str | None = None,
        decode_device: str = "auto",
        dp_rank: int | None = None,
        dp_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        num_threads: int | None = None,
        **settings: Any,
    ) -> None:
        with in_keywords():
            data = data_config(dataset, "train_size", image_size, decode_device, settings)
            place = Place.find(dp_rank, dp_size, group, device, num_threads)
            size = batch_size * place.dp_size if global_batch is None else global_batch
            config = SampleConfig(
                data=data,
                batch=BatchConfig(global_batch=size, micro_batch=batch_size),
                mixup=mixup if isinstance(mixup, MixupConfig) else MixupConfig(**(mixup or {})),
            )
            require(targets in ("classes", "pairs"), f"targets is {targets!r}: use classes or pairs")
            pixels = pixels_for(data, place.device, place.num_threads, dtype_of(dtype), channels_last=channels_last)
            require(
                split == "train" or not data.sources, f"split is {split}: several datasets have no other, use train"
            )
            self._begin(
                open_split(data, split) if split == "train" else Split(data.root, split, exclude=data.exclude),
                config,
                pixels,
                place,
                place.node(data),
                targets=targets,
                views=checked_views(views, config),
                fixed_global_batch=global_batch is not None,
            )

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        targets: Targets = "classes",
        device: torch.device | str | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> "TrainLoader":
        """Return the loader of the micro-batches that the trainer has with `config`. See the class for the others."""
        place = Place.find(dp_rank, dp_size, group, device, config.data.num_threads)
        refuse_copy(config.data)
        split = open_split(config.data, "train")
        return cls.of_split(split, config, place, node=place.node(config.data), targets=targets)

    @classmethod
    def of_split(
        cls,
        split: Split,
        config: Config,
        place: Place,
        *,
        targets: Targets = "classes",
        node: Node | None = None,
        start_step: int = 0,
        decodes: bool = True,
    ) -> "TrainLoader":
        """Return the loader of a rank of a run.

        Args:
            node: this process's view of the cache of its node, if there is one.
            start_step: of the first micro-batch.
            decodes: False on later stages of pipeline parallelism, which need labels and lambdas (from the index and
                the draws) but no images.

        Raises:
            ConfigError: there are more coordinates than micro-batches.
        """
        loader = cls.__new__(cls)
        pixels = pixel_format(config, place.device, place.num_threads)
        loader._begin(split, config, pixels, place, node, targets=targets, decodes=decodes, step=start_step)
        return loader

    def _begin(
        self,
        split: Split,
        config: SampleConfig,
        pixels: PixelFormat,
        place: Place,
        node: Node | None,
        *,
        targets: Targets,
        decodes: bool = True,
        step: int = 0,
        views: tuple[View, ...] = (),
        fixed_global_batch: bool = True,
    ) -> None:
        super().__init__(split, pixels, place, node, decodes=decodes, data=config.data)
        self.config = config
        self._fixed_global_batch = fixed_global_batch
        self._targets = targets
        self._views = views
        self._taking = threading.RLock()
        self.micro_batch: MicroBatch | None = None
        """Of what was last returned: indices, boxes, flips, partners, ...; None before the first."""
        self._samples = self._what_decides_samples()
        self._go_to(step)
        config.batch.grad_accum_steps(place.dp_size)  # raises ConfigError if there are more coordinates than that

    def _go_to(self, step: int) -> None:
        self._step = step
        self._num_done = 0  # of this coordinate's micro-batches of the step

    # Iteration

    def __iter__(self) -> Iterator[Any]:
        end = self.steps(self.epoch + 1)
        num_images = self._split.num_images
        require(
            self.config.batch.global_batch <= num_images,
            f"global_batch is {self.config.batch.global_batch}, more than an epoch's {num_images} images: use at most "
            "that, or take micro-batches by next()",
        )
        while self._step < end:
            yield self._as_asked(self.next())

    def __len__(self) -> int:
        """The micro-batches of the current epoch, also of what a resume has left out. Epochs differ by a step."""
        return (self.steps(self.epoch + 1) - self.steps(self.epoch)) * len(self._numbers)

    @property
    def epoch(self) -> int:
        """The epoch of the next micro-batch, from 0."""
        return self._step * self.config.batch.global_batch // self._split.num_images

    @property
    def step(self) -> int:
        """The optimizer step of the next micro-batch, from 0."""
        return self._step

    @property
    def ends_step(self) -> bool:
        """Whether what was last returned is the last micro-batch that this coordinate has of its step."""
        return self._num_done == 0

    @property
    def num_classes(self) -> int:
        return self._split.num_classes

    @property
    def warnings(self) -> Sequence[str]:
        """What to report to the user when training starts."""
        return () if self._pipeline is None else self._pipeline.warnings

    def steps(self, epochs: float) -> int:
        """Return the optimizer steps of so many epochs, for a schedule."""
        return self.config.steps(epochs, self._split.num_images)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`, unless the next micro-batch is in it, as after a resume in its middle.

        Raises:
            ConfigError: it is below 0.
        """
        require(epoch >= 0, f"set_epoch({epoch}): use a number from 0 on")
        if epoch != self.epoch:
            self.close()
            self._go_to(self.steps(epoch))

    def next(self) -> Batch:
        """Return this coordinate's next micro-batch; there is always one more, step after step.

        Raises:
            DatasetError: an image cannot be decoded, or its bytes are damaged.
            RunError: this process is a fork of the loader's, or another thread is waiting for a micro-batch.
        """
        self._require_own_process()
        # A lock that its thread may take again: an interrupt may come before the release.
        if not self._taking.acquire(blocking=False):
            raise RunError(
                "two threads take micro-batches from one loader at the same time, so neither would know which are its "
                "own: make a loader for each, or let one thread take them"
            )
        try:
            return self._next()
        finally:
            self._taking.release()

    def _next(self) -> Batch:
        expected = (self._step, self._numbers[self._num_done])
        try:
            if self._pipeline is None or self._step >= self._segment.end_step:
                self.prepare()
            batch = self._run()
            if (batch.micro_batch.step, batch.micro_batch.k) != expected:  # an interrupt took the one before
                self.prepare()
                batch = self._run()
        except BaseException:  # such as a notebook's interrupt: what the threads have handed over is not known any more
            self.close()
            raise
        self.micro_batch = batch.micro_batch
        ends_step = expected[1] == self._numbers[-1]
        position = (self._step + 1, 0) if ends_step else (self._step, self._num_done + 1)
        self._step, self._num_done = position  # at once: no interrupt comes between two assignments without a call
        return batch

    def prepare(self) -> None:
        """Begin at once to prepare micro-batches from the position on, which otherwise `next` does.

        Raises:
            ConfigError, DatasetError: a setting cannot be satisfied; the message names it.
        """
        self.close()
        self._segment = self._segment_at(self._step, self._num_done)
        self._pipeline = uninterrupted(lambda: self._pipeline_of(self._segment))

    def at(self, step: int, k: int | None = None) -> Any:
        """Return micro-batch `k` of `step`, as iterating does; None: this coordinate's first. The position stays."""
        self._require_own_process()
        k = self._place.dp_rank if k is None else k
        count = self.config.batch.num_micro_batches
        require(step >= 0 and 0 <= k < count, f"at({step}, {k}): use a step from 0 on, and k from 0 to {count - 1}")
        segment = self._segment_at(step)
        wanted = self._split.micro_batches(segment.config, segment.views)(step, k)
        pipeline = uninterrupted(lambda: self._pipeline_of(segment, itertools.repeat(wanted)))
        try:
            return self._as_asked(pipeline.run().to(self._place.device))
        finally:
            pipeline.close()

    def _as_asked(self, batch: Batch) -> Any:
        if self._multi_hot is not None:
            batch = replace(batch, targets=self._multi_hot(batch.targets))
        if batch.views:
            return list(batch.views), batch.targets[:, 0]
        if self._targets == "pairs":
            return batch.images, batch.targets, batch.lambdas
        if not self.config.mixup.enabled:
            return batch.images, batch.targets[:, 0]
        return batch.images, batch.soft_targets(self.num_classes)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind what was last returned, and what it is a position in, as plain JSON values.

        In the middle of an accumulated step it is the step's beginning, since no checkpoint has the gradients so far.
        """
        return {"step": self._step, "global_batch": self.config.batch.global_batch, "samples": dict(self._samples)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a `state_dict`, of any number of coordinates.

        Raises:
            ConfigError: its samples are others than this loader's; the message names the difference.
        """
        with in_keywords():
            for name, kind in {"step": int, "global_batch": int, "samples": dict}.items():
                value = state.get(name)
                require(type(value) is kind, f"the state to load has {name} {value!r}: use a state of this version")
            changes = changes_between(state["samples"], self._samples)
            require(
                not changes,
                f"the state to load is of other samples than this loader's: {'; '.join(changes)}. Make the loader with "
                "the dataset and settings of the one whose state it is; or, to go on from its step with these, load "
                "{**loader.state_dict(), 'step': state['step']}",
            )
            size = state["global_batch"]
            own_size = self.config.batch.global_batch
            require(
                size == own_size or not self._fixed_global_batch,
                f"the state to load has global_batch {size} and this loader {own_size}: use global_batch={size}",
            )
            batch = replace(self.config.batch, global_batch=size)
            batch.grad_accum_steps(self._place.dp_size)
            require(state["step"] >= 0, f"the state to load has step {state['step']}: use a number from 0 on")
        self.close()
        self.config = replace(self.config, batch=batch)
        self._go_to(state["step"])

    # Inside

    def _what_decides_samples(self) -> dict[str, Any]:
        """Return the settings and the content of the dataset, by which states are compared."""
        fields = {**sample_settings(self.config), **dataset_fields(self._split.manifest), "split": self._split.name}
        del fields["batch.global_batch"]  # which a state gives
        return fields | {"views": json.loads(json.dumps([asdict(view) for view in self._views]))}

    @property
    def _numbers(self) -> range:
        return range(self._place.dp_rank, self.config.batch.num_micro_batches, self._place.dp_size)

    def _segment_at(self, step: int, num_done: int = 0) -> Segment:
        coordinate = {"dp_rank": self._place.dp_rank, "dp_size": self._place.dp_size}
        segment = segment_at(self.config, self._split.num_images, start_step=step, num_done=num_done, **coordinate)
        return replace(segment, views=self._views)

    def _run(self) -> Batch:
        assert self._pipeline is not None
        return self._pipeline.run().to(self._place.device)

    def _following(self, segment: Segment) -> Iterator[MicroBatch]:
        return self._split.micro_batches(segment.config, segment.views).following(segment)

    def _pipeline_of(self, segment: Segment, chosen: Iterator[MicroBatch] | None = None) -> TrainingPipeline:
        """Return the pipeline of a segment's micro-batches, or of those `chosen`, whose bytes are not read ahead: here
        a dataset (`split`), the order of its images and a storage become batches."""
        split, pixels = self._split, self._pixels
        data = segment.config.data
        size = segment.config.batch.micro_batch
        if data.reader == "dali":
            return DALI_READER.load()(
                split,
                chosen or self._following(segment),
                data,
                pixels,
                size=size,
                num_per_step=segment.config.batch.num_micro_batches,
                start_step=segment.start_step,
                shard=(segment.dp_rank, segment.dp_size),
            )
        if data.reader == "synthetic" or not self._decodes:
            blank = blank_images(segment.config, pixels, self._place.device)
            images = blank.normal_() if self._decodes else blank[:0]
            return SyntheticPipeline(chosen or self._following(segment), images)
        storage = open_storage(split, data, None if self._node is None else self._node.cache(split))
        chosen = chosen or read_ahead(split, segment, storage, self._node)
        decoded_on = CpuPipeline if pixels.device_id is None else DaliPipeline  # which also augments and mixes
        views = [one.data for one in view_configs(segment.config, segment.views)]
        return decoded_on(split, storage, chosen.__next__, data, pixels, size=size, views=views)


class EvalLoader(_Loader[EvaluationPipeline]):
    """One coordinate's part of a split for evaluation: every image once, on any number of coordinates.

    Iterating yields (images, labels), (n, 3, image_size, image_size) and (n,) int64, on `device`; where an
    image may have any number of classes, (n, classes) float32, 1 for its classes and 0 for the others. The split is
    cut into batches of `batch_size`, the last of which may be smaller; coordinate r of W has the batches r,
    r + W, ... So a coordinate may have a batch less than another: add up sums over coordinates at the end, not batch by
    batch.

    Args:
        settings: data.eval_resize_to, eval_resize, interpolation, antialias, normalise, ... by these names. For the
            other arguments and the errors see `TrainLoader`.

    Iterating raises RunError where another iteration has begun since, as of ``zip(loader, loader)``.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        *,
        batch_size: int,
        split: SplitName = "validation",
        image_size: int = 224,
        dtype: str | torch.dtype = "fp32",
        channels_last: bool = False,
        device: torch.device | str | None = None,
        decode_device: str = "auto",
        dp_rank: int | None = None,
        dp_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        num_threads: int | None = None,
        **settings: Any,
    ) -> None:
        with in_keywords():
            require(
                settings.get("exclude") is None,
                f"exclude is {settings.get('exclude')}, a list of images for a TrainLoader: leave it out",
            )
            data = data_config(dataset, "eval_size", image_size, decode_device, settings)
            require(
                not data.sources,
                "an EvalLoader has one dataset: use its directory or URL. If several are trained on, the classes begin "
                "with those of the first, in their order",
            )
            place = Place.find(dp_rank, dp_size, group, device, num_threads)
            size = BatchConfig(global_batch=batch_size, micro_batch=batch_size).micro_batch
            pixels = pixels_for(data, place.device, place.num_threads, dtype_of(dtype), channels_last=channels_last)
            self._begin(Split(data.root, split), data, pixels, place, size, place.node(data))

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> "EvalLoader":
        """Return the loader of the images that an evaluation of the trainer with `config` has."""
        place = Place.find(dp_rank, dp_size, group, device, config.data.num_threads)
        refuse_copy(config.data)
        split = open_split(config.data, "validation")
        return cls.of_split(split, config, place, node=place.node(config.data))

    @classmethod
    def of_split(
        cls,
        split: Split,
        config: Config,
        place: Place,
        *,
        node: Node | None = None,
        images: NDArray[np.int64] | None = None,
        decodes: bool = True,
    ) -> "EvalLoader":
        """Return the loader of a rank of a run.

        Args:
            node, decodes: as in `TrainLoader.of_split`.
            images: (n,) rows of the split; None: all.
        """
        loader = cls.__new__(cls)
        pixels = pixel_format(config, place.device, place.num_threads)
        size = config.batch.micro_batch
        loader._begin(split, config.data, pixels, place, size, node, images=images, decodes=decodes)
        return loader

    def _begin(
        self,
        split: Split,
        data: DataConfig,
        pixels: PixelFormat,
        place: Place,
        size: int,
        node: Node | None,
        *,
        images: NDArray[np.int64] | None = None,
        decodes: bool = True,
    ) -> None:
        super().__init__(split, pixels, place, node, decodes=decodes)
        self._data = data
        images = np.arange(len(split)) if images is None else images
        starts = range(place.dp_rank * size, len(images), place.dp_size * size)
        self.batches = [images[at : at + size] for at in starts]
        """The rows of the split of each batch."""
        self.indices: NDArray[np.int64] = images[:0]
        """The rows of the split of the batch last returned, (n,)."""
        self._is_at_start = True
        self._num_begun = 0  # iterations

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def num_classes(self) -> int:
        return self._split.num_classes

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self._require_own_process()
        if not self._is_at_start:  # the last one was left in the middle
            self.close()
        self._is_at_start = True
        self._num_begun += 1
        own_number = self._num_begun
        for numbers in self.batches:
            self._require_only_iteration(own_number)
            self._is_at_start = False
            if self._pipeline is None:
                self.prepare()
            self.indices = numbers
            if self._pipeline is None:
                # For the last stage of pipeline parallelism, which gets what others make of the images.
                images = torch.empty(len(numbers), 3, 0, 0)
                labels = torch.from_numpy(self._split.rows["label"][numbers].astype(np.int64))
            else:
                images, labels = self._pipeline.run()
            labels = without_waiting(labels, self._place.device)
            labels = labels if self._multi_hot is None else self._multi_hot(labels)
            yield without_waiting(images, self._place.device), labels
        self._require_only_iteration(own_number)
        self._is_at_start = True

    def _require_only_iteration(self, number: int) -> None:
        if self._num_begun != number:
            raise RunError(
                "another iteration of this loader has begun, and took its images: iterate again when one has ended, or "
                "make a loader for each"
            )

    def prepare(self) -> None:
        """Open the pipeline now, which otherwise the first iteration does."""
        if self.batches and self._decodes:
            arguments = (self._split, self.batches, self._data, self._pixels, self._node)
            self._pipeline = uninterrupted(lambda: EvaluationPipeline(*arguments))
