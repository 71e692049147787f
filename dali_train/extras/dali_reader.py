"""DALI's own TFRecord reader in place of the index: local shards, read sequentially.

It gives up the invariant: each rank reads a part of the shards and DALI draws the crops, so the images of a micro-batch
and their crops depend on the number of ranks. Flips, mixing and dropout are drawn as usual. A pass is exact: the parts
are disjoint and together are the split. No position is saved: a resumed run begins a new pass.
"""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from nvidia.dali import fn, tfrecord
from nvidia.dali.pipeline import pipeline_def

from dali_train.config import DataConfig
from dali_train.data.dataset.image_file import dali_reason
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import text_index_path
from dali_train.data.loading.dali import (
    INPUTS,
    VIEW_INPUTS,
    Feed,
    graph_options,
    normalised,
    resized,
    run_graph,
    to_device,
)
from dali_train.data.loading.decoders import PixelFormat, decode_boxes, decoder_options, decodes_boxes
from dali_train.data.loading.pipelines import Batch, TrainingPipeline, finished
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.data.sampling.rng import Purpose, philox_generator
from dali_train.errors import ConfigError, DatasetError


class DaliReaderPipeline(TrainingPipeline):
    """The pipeline of coordinate r of W, its `shard`: the next images of its part, flipped and mixed by the draws of
    the next micro-batch.

    Args:
        micro_batches: iterated ahead of ``run()``.
        num_per_step: micro-batches of all coordinates.

    Raises:
        ConfigError, DatasetError: raw records, fewer records than ranks, or a text index that does not fit its shard.
    """

    def __init__(
        self,
        split: Split,
        micro_batches: Iterator[MicroBatch],
        data: DataConfig,
        pixels: PixelFormat,
        *,
        size: int,
        num_per_step: int,
        start_step: int,
        shard: tuple[int, int],
    ) -> None:
        dp_rank, dp_size = shard
        if split.files is not None:
            raise ConfigError(
                f"data.reader is dali, which reads shards of TFRecords, and {split.root} indexes {split.files.source} "
                "in place: set data.reader index"
            )
        if split.manifest.encoding == "raw" or len(split) < dp_size:
            raise ConfigError(
                f"data.reader is dali with {len(split)} records ({split.manifest.encoding}) in {split.root} for "
                f"{dp_size} ranks: it needs encoded images, at least one for each rank; set data.reader index"
            )
        for number in range(len(split.shards)):
            split.record_offsets(number)  # DALI silently stops where a text index is malformed
        self.warnings = []
        if start_step > 0:
            self.warnings.append(
                f"data.reader is dali, which keeps no position: a new pass over the data begins at step {start_step}, "
                "so some images of the interrupted pass are seen twice and others not at all"
            )
        if num_per_step % dp_size:
            self.warnings.append(
                f"data.reader is dali, and {dp_size} ranks do not divide the {num_per_step} micro-batches of a step: "
                "some ranks read more of their part of the data than others, so images are not seen equally often"
            )
        self._root, self._pixels = split.root, pixels
        known = INPUTS | VIEW_INPUTS
        inputs = {name: known[name] for name in ("mirror", "lambdas", "partners")}
        unknown = np.full(size, -1)
        self._feed = Feed(inputs, lambda: replace(next(micro_batches), images=unknown, labels=unknown))
        draws = [philox_generator(data.seed, Purpose.READER, low=rank, high=start_step) for rank in (dp_rank, dp_size)]
        seeds = [int(draw.random_raw()) >> 33 for draw in draws]  # 31 bits; the second one is the same on all ranks
        self._pipe = _graph(self._feed, split, data, pixels, shard, seeds, **graph_options(pixels, size=size))
        self._pipe.build()

    def run(self) -> Batch:
        images, targets, lambdas, partners = run_graph(self._pipe, self._explain)
        return finished(images, targets, lambdas, partners, self._feed.in_flight.popleft(), self._pixels)

    def _explain(self, error: RuntimeError) -> Exception:
        return DatasetError(
            f"data.reader dali cannot continue: {dali_reason(error)}. Run `dali-train data verify "
            f"{shlex.quote(str(self._root))}` to list all unusable records, and convert again without them"
        )


@pipeline_def
def _graph(
    feed: Feed, split: Split, data: DataConfig, pixels: PixelFormat, shard: tuple[int, int], seeds: list[int]
) -> Any:
    shuffling: dict[str, Any] = {}
    if data.shuffle != "none":  # each pass permutes and divides the shards anew, equally on all ranks
        shuffling = {
            "random_shuffle": True,
            "initial_fill": data.block_images * data.window_blocks,
            "seed": seeds[0],
            "shuffle_after_epoch": True,
            "shuffle_after_epoch_seed": seeds[1],
        }
    features: Any = fn.readers.tfrecord(
        path=[str(path) for path in split.paths],
        index_path=[str(text_index_path(split.root, split.name, shard.name)) for shard in split.shards],
        # Of variable length, so that a missing label has another shape: else it would be whatever the memory held.
        features={
            split.manifest.image_key: tfrecord.FixedLenFeature([], tfrecord.string, ""),
            split.manifest.label_key: tfrecord.VarLenFeature(tfrecord.int64, 0),
        },
        shard_id=shard[0],
        num_shards=shard[1],
        dont_use_mmap=True,  # a shard that is cut short under a map would kill the process
        **shuffling,
    )
    nodes = feed.nodes()
    encoded = features[split.manifest.image_key]
    anchor, shape = fn.random_crop_generator(
        fn.peek_image_shape(encoded, adjust_orientation=False),
        random_area=data.crop_area,
        random_aspect_ratio=data.crop_aspect,
        seed=seeds[0],
    )
    images = decode_boxes(encoded, anchor, shape, boxes=decodes_boxes(pixels), **decoder_options(data, pixels, split))
    label = fn.reshape(features[split.manifest.label_key] - split.manifest.label_base, shape=[1])
    targets = fn.cat(label, fn.permute_batch(label, indices=nodes["partners"]), axis=0)
    images = normalised(resized(images, data), nodes["mirror"], data, pixels)
    return images, *(to_device(node, pixels) for node in (targets, nodes["lambdas"], nodes["partners"]))
