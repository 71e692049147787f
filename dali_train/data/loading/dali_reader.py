"""DALI's own TFRecord reader in place of the index: local shards, read in sequence.

It gives up the invariant. Each rank reads a part of the shards, and DALI draws the crops from generators that have a
state, so which images meet in a micro-batch, and how they are cropped, depends on the number of ranks. What does not
depend on the image is drawn as ever: flips, Mixup and CutMix, dropout. A pass is exact: the parts are disjoint, differ
by at most one image, and are the split together. Each rank reads on into its next part, so all make the same number of
steps. No position is kept: a resumed run begins a new pass.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from nvidia.dali import fn, tfrecord
from nvidia.dali.pipeline import pipeline_def

from dali_train.config import DataConfig
from dali_train.data.dataset.decode import dali_reason
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import text_index_path
from dali_train.data.loading.dali import INPUTS, PREFETCH, QUEUE_DEPTH, Feed, normalised, resized, run_graph, to_device
from dali_train.data.loading.decoder import PixelFormat, decode_boxes, decoder_options, decodes_boxes
from dali_train.data.loading.pipelines import Batch, TrainingPipeline, finished
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.data.sampling.rng import Purpose, philox_generator
from dali_train.errors import ConfigError, DatasetError


class DaliReaderPipeline(TrainingPipeline):
    """Coordinate `dp_rank` of `dp_size`: the next images of its part, flipped and mixed as the next micro-batch says.

    Args:
        micro_batches: asked for ahead of ``run()``.

    Raises:
        ConfigError: raw records, or fewer records than ranks.
        DatasetError: a text index that does not fit its shard.
    """

    def __init__(
        self,
        split: Split,
        micro_batches: Iterator[MicroBatch],
        data: DataConfig,
        pixels: PixelFormat,
        *,
        size: int,
        start_step: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        if split.manifest.encoding == "raw" or len(split) < dp_size:
            raise ConfigError(
                f"data.reader is dali with {len(split)} records ({split.manifest.encoding}) in {split.root} for "
                f"{dp_size} ranks: it reads encoded images, at least one for each rank; set data.reader index"
            )
        for shard in range(len(split.shards)):
            split.record_offsets(shard)  # DALI reads a text index as far as it is one, without a word
        if start_step > 0:
            self.warnings = [
                f"data.reader is dali, which keeps no position: a new pass over the data begins at step {start_step}, "
                "so images of the last one may come twice and others not at all"
            ]
        self._root, self._pixels = split.root, pixels
        inputs = {name: INPUTS[name] for name in ("mirror", "lambdas", "partners")}
        self._feed = Feed(inputs, lambda: replace(next(micro_batches), images=unknown, labels=unknown))
        unknown = np.full(size, -1)
        self._pipe = _graph(
            self._feed,
            split,
            data,
            pixels,
            shard=(dp_rank, dp_size),
            seeds=[_seed(data, start_step, rank) for rank in (dp_rank, dp_size)],  # the second one is for all ranks
            batch_size=size,
            num_threads=pixels.num_threads,
            device_id=pixels.device_id,
            prefetch_queue_depth=QUEUE_DEPTH,
        )
        self._pipe.build()

    def run(self) -> Batch:
        images, targets, lambdas, partners = run_graph(self._pipe, self._explain)
        return finished(images, targets, lambdas, partners, self._feed.in_flight.popleft(), self._pixels)

    def _explain(self, error: RuntimeError) -> Exception:
        return DatasetError(
            f"data.reader dali cannot read on: {dali_reason(error)}. Run `dali-train data verify {self._root}` for all "
            "records that cannot be used, and convert again without them"
        )


def _seed(data: DataConfig, step: int, rank: int) -> int:
    """Return a seed of 31 bits, DALI's least common type for them."""
    return int(philox_generator(data.seed, Purpose.READER, low=rank, high=step).random_raw()) >> 33


@pipeline_def
def _graph(
    feed: Feed, split: Split, data: DataConfig, pixels: PixelFormat, shard: tuple[int, int], seeds: list[int]
) -> Any:
    shuffling: dict[str, Any] = {}
    if data.shuffle != "none":  # each pass has the shards in another order, the same on all ranks, and is cut anew
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
        # Of variable length, so that a missing label has another shape: of fixed length it would be whatever the
        # memory held.
        features={
            split.manifest.image_key: tfrecord.FixedLenFeature([], tfrecord.string, ""),
            split.manifest.label_key: tfrecord.VarLenFeature(tfrecord.int64, 0),
        },
        shard_id=shard[0],
        num_shards=shard[1],
        dont_use_mmap=True,  # a shard that is cut short under a map would kill the process
        prefetch_queue_depth=PREFETCH,
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
