"""Training images in the order of storage: DALI's own TFRecord reader, for storage that can only stream.

It trades the invariant for sequential reads. Each rank reads its own part of the shards and draws crops and flips with
generators that have a state, so which images meet in a micro-batch, and how they are cut, depends on the number of
ranks, and a checkpoint has to hold every rank's position. What stays a pure function of (seed, step, k) are Mixup's
partners and lambdas and the dropout seed.

A pass is exact: the ranks' parts are disjoint and together they are the split, each image once. Parts differ by at most
one image, and every rank reads on into its next part without an end, so all ranks make the same number of steps.
"""

import base64
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia import dali
from nvidia.dali import fn, tfrecord, types
from nvidia.dali.pipeline import pipeline_def
from torch.autograd.profiler import record_function

from dali_train.config import Config, DataConfig
from dali_train.data.dataset.build_index import Features, index_record
from dali_train.data.dataset.index import Split, map_file
from dali_train.data.dataset.manifest import Shard, text_index_path
from dali_train.data.dataset.tfrecord import TFRecordError, walk_records
from dali_train.data.loading.dali import (
    Produced,
    Source,
    in_format,
    normalised,
    queue_depth,
    resized,
    run_graph,
    to_device,
)
from dali_train.data.loading.decoder import decoder_options, decodes_boxes
from dali_train.data.loading.mixing import mix
from dali_train.data.loading.pixels import PixelFormat
from dali_train.data.sampling.micro_batch import MicroBatchDraws
from dali_train.data.sampling.rng import Purpose, philox_generator
from dali_train.errors import ConfigError, DatasetError, RunError

_IMAGE, _LABEL = "image/encoded", "image/class/label"
# What DALI's message about a fault in the data has in it, and what that means.
_FAULTS = {
    "`nvidia.dali.fn.decoders.image": "an image cannot be decoded",
    "`nvidia.dali.fn.peek_image_shape`": "an image cannot be decoded",
    "parsing TFRecord file": "a record is not what the index says",
    "same dimensionality": f"a record lacks {_IMAGE} or {_LABEL}",
    "`nvidia.dali.fn.cat`": f"no record has {_LABEL}",
    "`nvidia.dali.fn.reshape`": f"a record has more or less than one integer in {_LABEL}",
}
_NOISE = re.compile(r"Current pipeline object|Critical error in pipeline|C\+\+ context")


class StreamPipeline(Source):
    """Rank `rank` of `num_ranks`: ``run()`` gives the next images of its part, mixed as the next of `draws` says.

    Args:
        draws: read ahead of ``run()``, by as many micro-batches as are prefetched.
        start_step: 0 begins a pass.
        saved_states: what ``state()`` gave on each coordinate of the run that is resumed.

    Raises:
        ConfigError, DatasetError: see `check_shards`; or `saved_states` do not fit and run.accept_changed_recipe is not
            set.
        RunError: the storage does not give the first shard.
    """

    def __init__(
        self,
        split: Split,
        draws: Iterator[MicroBatchDraws],
        config: Config,
        pixels: PixelFormat,
        *,
        rank: int,
        num_ranks: int,
        start_step: int = 0,
        saved_states: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._basis = position_basis(split, config, pixels, num_ranks)
        position, warnings = find_position(self._basis, config, start_step, rank, saved_states)
        self.warnings = [
            "data.reader is stream: every rank reads a part of the shards in the order of storage, so the samples "
            f"depend on the number of ranks, {num_ranks}, and the run can be resumed only with the same number",
            *warnings,
        ]
        check_shards(split, config.data, num_ranks)
        self._split, self._data, self._pixels = split, config.data, pixels
        self._mix = config.mixup.alpha > 0
        self._draws = draws
        # Fed to DALI and not given back yet, oldest first.
        self._in_flight: deque[MicroBatchDraws] = deque()
        self._pipe = _stream_graph(
            self._feed,
            split,
            config.data,
            pixels,
            rank,
            num_ranks,
            boxes=decodes_boxes(pixels),
            batch_size=config.batch.micro_batch,
            num_threads=pixels.num_threads,
            device_id=pixels.device_id,
            prefetch_queue_depth=queue_depth(config.data),
            enable_checkpointing=True,
            checkpoint=position,
        )
        try:
            self._pipe.build()
        except RuntimeError as error:
            raise self._explain(error) from error

    def run(self) -> Produced:
        """As ``Source.run()``.

        Raises:
            DatasetError: an image or a record is not what it should be.
            RunError: the storage gave out.
        """
        images, targets, lambdas, partners = run_graph(self._pipe, self._explain)
        if self._mix:
            images = mix(images, partners, lambdas)
        return in_format(images, self._pixels), targets, lambdas, self._in_flight.popleft()

    def state(self) -> dict[str, Any]:
        """Where the reader and the generators stand after the last ``run()``, whatever was prefetched since."""
        return {"basis": self._basis, "position": base64.b64encode(self._pipe.checkpoint()).decode()}

    def _feed(self, _: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """DALI's own count of the batches goes unused: it would restart with a new pass, and warns where there is
        none."""
        with record_function("data: choose"):
            draws = next(self._draws)
            self._in_flight.append(draws)
            return draws.partners, draws.lambdas

    def _explain(self, error: RuntimeError) -> Exception:
        """DALI's message without its traceback of the graph, and what to do."""
        text = str(error)
        reason = " ".join(
            line for line in text.rpartition("encountered:")[2].split("\n") if line and not _NOISE.match(line)
        )
        for sign, fault in _FAULTS.items():
            if sign in text:
                return DatasetError(
                    f"{fault} ({reason}). Run `dali-train data verify {self._split.root}` where its shards are for all "
                    "such records, and convert again without them"
                )
        if "`nvidia.dali.fn.readers.tfrecord`" in text:
            place = shard_urls(self._split, self._data)[0]
            return RunError(f"data.reader stream cannot read what lies beside {place}: {reason}")
        return error


def shard_urls(split: Split, data: DataConfig) -> list[str]:
    """Where DALI opens the shards: URLs or paths, in the manifest's order."""
    place = (data.stream_url or data.root).rstrip("/")
    return [f"{place}/{split.name}/{shard.name}" for shard in split.shards]


def position_basis(split: Split, config: Config, pixels: PixelFormat, num_ranks: int) -> dict[str, Any]:
    """What a position holds for, as plain values by name. DALI takes one from another place, too, and reads wrong
    data."""
    shards = json.dumps([(shard.name, shard.num_records) for shard in split.shards])
    return {
        "version of the graph": 2,  # DALI takes a position only for the same operators
        "ranks": num_ranks,
        "batch.micro_batch": config.batch.micro_batch,
        "data.seed": config.data.seed,
        "data.shuffle": config.data.shuffle,
        "data.shuffle_buffer": config.data.shuffle_buffer,
        "shards": hashlib.sha256(shards.encode()).hexdigest()[:16],
        # Operators that differ with it:
        "decoder": ("CPU" if pixels.device_id is None else "GPU")
        + ("" if decodes_boxes(pixels) else ", complete images"),
        "DALI": dali.__version__,
    }


def find_position(
    basis: dict[str, Any], config: Config, start_step: int, rank: int, saved_states: Sequence[dict[str, Any]]
) -> tuple[bytes | None, list[str]]:
    """(DALI's checkpoint, None to begin a pass; warnings).

    Raises:
        ConfigError: `saved_states` are of another basis and run.accept_changed_recipe is not set.
    """
    if start_step == 0:
        return None, []
    differences = _differences(saved_states[0]["basis"] if saved_states else {}, basis)
    if not differences:
        return base64.b64decode(saved_states[rank]["position"]), []
    if not config.run.accept_changed_recipe:
        raise ConfigError(
            f"data.reader is stream, and the checkpoint of step {start_step} cannot be resumed: {differences}. "
            "Set it back; or set run.accept_changed_recipe true to begin a new pass over the data at this step. "
            "data.reader index resumes on any number of ranks"
        )
    return None, [
        f"the place in the data cannot be kept ({differences}): a new pass begins at step {start_step}, so images "
        "of the last one may come twice and others not at all"
    ]


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> str:
    if not saved:
        return "it holds no place in a stream"
    return "; ".join(
        f"{name} {saved.get(name)} -> {value}" for name, value in current.items() if saved.get(name) != value
    )


def check_shards(split: Split, data: DataConfig, num_ranks: int) -> None:
    """Look before DALI does, which checks neither its index nor the records' features.

    Shards behind a URL are taken at the index's word: they must be copies of those that were indexed.

    Raises:
        ConfigError: raw records, or fewer records than ranks.
        DatasetError: a text index that does not cover its shard, or a first record that is not the index's.
    """
    if split.manifest.encoding == "raw":
        raise ConfigError(
            f"data.reader is stream, but {split.root} holds raw pixels: only encoded images can be streamed; set "
            "data.reader index"
        )
    if len(split) < num_ranks:
        raise ConfigError(
            f"data.reader is stream, but {split.root} has {len(split)} {split.name} images for {num_ranks} ranks: "
            f"each needs at least one of its own; use at most {len(split)} ranks, or data.reader index"
        )
    for shard in split.shards:
        _check_text_index(text_index_path(split.root, split.name, shard.name), shard, split.root)
    first = shard_urls(split, data)[0]
    if "://" not in first:
        _check_first_record(split, Path(first))


def _check_text_index(path: Path, shard: Shard, root: Path) -> None:
    remedy = f"run `dali-train data index {root}` again, with the shards in place"
    try:
        numbers = np.array(path.read_text().split(), dtype=np.int64)
    except FileNotFoundError:
        raise DatasetError(f"{path} is missing, the stream reader needs it: {remedy}") from None
    except (ValueError, OverflowError) as error:  # DALI would stop there without a word
        raise DatasetError(f"{path} is not a list of offsets and sizes ({error}): {remedy}") from error
    if len(numbers) != 2 * shard.num_records:
        raise DatasetError(f"{path} has {len(numbers) / 2:g} records, dataset.json says {shard.num_records}: {remedy}")
    starts, sizes = numbers[::2], numbers[1::2]
    if starts[0] != 0 or (starts[1:] != (starts + sizes)[:-1]).any() or starts[-1] + sizes[-1] != shard.num_bytes:
        raise DatasetError(
            f"{path} goes from byte {starts[0]} to {starts[-1] + sizes[-1]} with or without gaps, its shard has "
            f"{shard.num_bytes} bytes without any: {remedy}"
        )


def _check_first_record(split: Split, path: Path) -> None:
    try:
        content = memoryview(map_file(path))
        record = index_record(
            content, next(walk_records(content, path, check_payload=True)), path, Features.of(split.manifest)
        )
    except (FileNotFoundError, StopIteration):
        raise DatasetError(
            f"{path} is missing or empty, dataset.json names it: data.stream_url is where train/ lies"
        ) from None
    except TFRecordError as error:
        raise DatasetError(
            f"{error}. Index the shards as they are (dali-train data index), or convert the images again"
        ) from error
    label = int(split.rows["label"][0]) + split.manifest.label_base
    if record.label != label:
        raise DatasetError(
            f"{path}: the first record has the label {record.label}, the index of {split.root} {label}: "
            "data.stream_url must hold copies of the shards that were indexed"
        )


@pipeline_def
def _stream_graph(
    feed: Callable[[int], tuple[Any, Any]],
    split: Split,
    data: DataConfig,
    pixels: PixelFormat,
    rank: int,
    num_ranks: int,
    boxes: bool,
) -> Any:
    reader_seed, crop_seed, flip_seed = _seeds(data.seed, rank, num_ranks)
    shuffling: dict[str, Any] = {}
    if data.shuffle != "none":
        # Every pass has the shards in another order, the same on all ranks, and cuts it into parts anew. Without it the
        # ranks exchange their parts from pass to pass.
        shuffling = {
            "random_shuffle": True,
            "initial_fill": data.shuffle_buffer,
            "seed": reader_seed,
            "shuffle_after_epoch": True,
            "shuffle_after_epoch_seed": _seeds(data.seed, num_ranks, num_ranks)[0],
        }
    features: Any = fn.readers.tfrecord(
        name="reader",
        path=shard_urls(split, data),
        index_path=[str(text_index_path(split.root, split.name, shard.name)) for shard in split.shards],
        # Of variable length, so that a label that is missing or of another type has another shape. Of fixed length it
        # would be whatever the memory held.
        features={
            split.manifest.image_key: tfrecord.FixedLenFeature([], tfrecord.string, ""),
            split.manifest.label_key: tfrecord.VarLenFeature(tfrecord.int64, 0),
        },
        shard_id=rank,
        num_shards=num_ranks,
        # Plain reads: a map would fault in page by page, and a shard that is cut short under it would kill the process.
        dont_use_mmap=True,
        prefetch_queue_depth=data.prefetch,
        **shuffling,
    )
    draws: Any = fn.external_source(
        source=feed, num_outputs=2, batch=True, dtype=[types.INT32, types.FLOAT], ndim=[0, 0]
    )
    partner, weight = draws
    images = _random_crops(
        features[split.manifest.image_key],
        boxes=boxes,
        random_area=data.crop_area,
        random_aspect_ratio=data.crop_aspect,
        seed=crop_seed,
        **decoder_options(data, pixels, split),
    )
    mirror = fn.random.coin_flip(probability=data.horizontal_flip, seed=flip_seed, name="flip")
    labels = features[split.manifest.label_key] - split.manifest.label_base
    # (2,) int64; refuses labels that are not of shape (1,).
    targets = fn.cat(fn.reshape(labels, shape=[1]), fn.permute_batch(labels, indices=partner), axis=0)
    images = normalised(resized(images, data), mirror, data, pixels)
    return images, *(to_device(node, pixels) for node in (targets, weight, partner))


def _random_crops(
    encoded: Any,
    *,
    boxes: bool,
    random_area: tuple[float, float],
    random_aspect_ratio: tuple[float, float],
    seed: int,
    **decoder: Any,
) -> Any:
    """A node with random crops, (height, width, 3) uint8: the same whether only the boxes are decoded or the complete
    images."""
    drawn: dict[str, Any] = {
        "random_area": random_area,
        "random_aspect_ratio": random_aspect_ratio,
        "seed": seed,
        "name": "crop",
    }
    if boxes:
        return fn.decoders.image_random_crop(encoded, **drawn, **decoder)
    anchor, shape = fn.random_crop_generator(fn.peek_image_shape(encoded, adjust_orientation=False), **drawn)
    return fn.slice(fn.decoders.image(encoded, **decoder), anchor, shape, axis_names="HW")


def _seeds(seed: int, rank: int, num_ranks: int) -> list[int]:
    """Three seeds of 31 bits, DALI's least common type for them. Rank `num_ranks` stands for all ranks."""
    raw = philox_generator(seed, Purpose.STREAM, low=rank, high=num_ranks).random_raw(3)
    return [int(number) >> 33 for number in raw]
