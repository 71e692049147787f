"""Several datasets as one split: their indexes one behind the other, with the classes of all of them.

An image of source i has the number it has there plus the number of images of the sources before i. So everything that
takes a split and image numbers takes a mixture too: loader, trace, record, ledger.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.config import DataConfig, SampleConfig
from dali_train.data.dataset.index import Split, kept_images
from dali_train.data.dataset.manifest import (
    Manifest,
    Shard,
    SplitManifest,
    SplitName,
    dataset_content,
    metadata_directory,
)
from dali_train.data.dataset.sample_recipe import names_content
from dali_train.errors import ConfigError, DatasetError
from dali_train.extras.mixture.merge import MixedOrder, mixed_order
from dali_train.extras.mixture.mixed_classes import class_names, class_numbers, united_sets
from dali_train.text import plural


def open_mixed(data: DataConfig, name: SplitName, *, local: bool) -> Split:
    """Return the training split of a mixture, or the validation split of data.root with the classes of the mixture.

    Args:
        local: see `Split`.

    Raises:
        ConfigError: the datasets do not go together.
        DatasetError: see `Split`.
    """
    return MixedSplit(data, local=local) if name == "train" else _validation_split(data, name, local=local)


def _validation_split(data: DataConfig, name: SplitName, *, local: bool) -> Split:
    split = Split(data.root, name, local=local)
    mixed = mixed_manifest(data)  # the labels of data.root come first
    split.manifest = replace(
        split.manifest,
        num_classes=mixed.num_classes,
        class_names=mixed.class_names,
        label_sets=mixed.label_sets,
        format_version=mixed.format_version,
    )
    split.dataset_bytes = _num_bytes(mixed)
    split.label_sets = split.padded_sets(mixed)
    return split


class MixedSplit(Split):
    """The training splits of the datasets of data.mix as one.

    Raises:
        ConfigError: the datasets do not go together; see also `kept_images`.
        DatasetError: see `Split`.
    """

    def __init__(self, data: DataConfig, *, local: bool = True) -> None:
        self.parts = [Split(root, "train", local=local) for _, root, _ in data.mix]
        for part, (name, _, _) in zip(self.parts, data.mix, strict=True):
            part.source_name = name
        self.firsts = np.cumsum([0, *map(len, self.parts[:-1])])  # the number of each one's first image, (sources,)
        manifests = [part.manifest for part in self.parts]
        self.root_manifest = Manifest.read(data.root)
        self.manifest, numbers = _manifest_of(data, self.root_manifest, manifests)
        self.root = metadata_directory(data.root)
        self.dataset_name = " + ".join(name for name, _, _ in data.mix)
        self.name = "train"
        self.url = None
        self.label_sets = self.padded_sets(self.manifest)
        self.files = None
        self.shards = ()
        self.paths = []
        self.num_bytes = sum(part.num_bytes for part in self.parts)
        self.dataset_bytes = _num_bytes(self.manifest)
        self.rows = np.concatenate([part.rows for part in self.parts])
        labels = [of_source[part.rows["label"]] for part, of_source in zip(self.parts, numbers, strict=True)]
        self.rows["label"] = np.concatenate(labels)
        checksums = [part.checksums for part in self.parts if part.checksums is not None]
        self.checksums = np.concatenate(checksums) if len(checksums) == len(self.parts) else None
        self._leave_out(data.exclude, reads_images=local)
        if self.kept is not None:
            for part, kept in zip(self.parts, np.split(self.kept, self.firsts[1:]), strict=True):
                if not kept.any():
                    raise ConfigError(
                        f"data.exclude leaves no image of {part.source_name}: leave that dataset out of data.mix"
                    )
        self._epoch_images = data.epoch_images
        self._weights = data.mix_weights[-1][1]

    @property
    def num_images(self) -> int:
        """The positions of an epoch: data.epoch_images, or as many as there are images."""
        return self._epoch_images or super().num_images

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Images of each class in an epoch with the last weights, (classes,): rounded, but not down to none."""
        expected = np.zeros(self.num_classes)
        for number, images in enumerate(np.split(np.arange(len(self)), self.firsts[1:])):
            taking_part = images if self.kept is None else images[self.kept[images]]
            counts = self.count_classes(self.rows["label"][taking_part])
            share = self._weights[number] / sum(self._weights)
            expected += counts / len(taking_part) * share * self.num_images
        return np.where(expected > 0, np.maximum(1, np.rint(expected)), 0).astype(np.int64)

    def order(self, config: SampleConfig) -> MixedOrder:
        num_images = [len(part) for part in self.parts]
        return mixed_order(config, num_images, self.rows["label"], self.kept)

    def source_of(self, image: int) -> tuple[int, int]:
        """Return the number of the source that has image number `image`, and the image's number there."""
        source = int(np.searchsorted(self.firsts, image, side="right")) - 1
        return source, image - int(self.firsts[source])

    def locate(self, image: int) -> tuple[Split, int]:
        """Return the source's split that has image number `image`, and the image's number there."""
        source, number = self.source_of(image)
        return self.parts[source], number

    def describe(self, image: int) -> str:
        part, number = self.locate(image)
        return f"{part.source_name}: {part.describe(number)}"

    def index_problem(self) -> str | None:
        return next((problem for part in self.parts if (problem := part.index_problem()) is not None), None)


# Manifest


def read_manifests(data: DataConfig) -> list[Manifest]:
    """Return the manifests of the sources. Raises DatasetError: see `Manifest.read`, or one has no training split."""
    manifests = [Manifest.read(root) for _, root, _ in data.mix]
    for (name, root, _), manifest in zip(data.mix, manifests, strict=True):
        if "train" not in manifest.splits:
            raise DatasetError(f"data.mix {name}: {root} has no train split: use a dataset that has one")
    return manifests


def mixed_manifest(data: DataConfig) -> Manifest:
    """Return a manifest of the whole: its classes, and each source as if it were a shard.

    Raises:
        ConfigError: a class has no counterpart, or some sources hold encoded images and others pixels.
        DatasetError: see `read_manifests`.
    """
    manifest, _ = _manifest_of(data, Manifest.read(data.root), read_manifests(data))
    return manifest


def _manifest_of(
    data: DataConfig, root: Manifest, manifests: Sequence[Manifest]
) -> tuple[Manifest, list[NDArray[np.int32]]]:
    """Return the manifest of the whole, and of each source the number there of each of its labels, (its labels,)."""
    encodings = {name: manifest.encoding for (name, _, _), manifest in zip(data.mix, manifests, strict=True)}
    if len({*encodings.values()}) > 1:
        kinds = " and ".join(f"{name} {encoding}" for name, encoding in encodings.items())
        raise ConfigError(f"data.mix has datasets of several encodings, {kinds}: convert all of them alike")
    names = class_names(data, root, manifests)
    sources = {name: manifest for (name, _, _), manifest in zip(data.mix, manifests, strict=True)}
    splits = {"train": _as_shards(sources, "train")}
    if "validation" in root.splits:
        splits["validation"] = _as_shards({"validation": root}, "validation")
    numbers = class_numbers(data, manifests, names)
    label_sets = None
    if any(manifest.label_sets is not None for manifest in (root, *manifests)):
        label_sets, numbers = united_sets(root, manifests, numbers)
    manifest = Manifest(
        num_classes=len(names),
        class_names=names,
        label_sets=label_sets,
        format_version=1 if label_sets is None else 2,
        label_base=0,
        splits=splits,
        encoding=manifests[0].encoding,
        conversion=root.conversion,
    )
    return manifest, numbers


def _num_bytes(manifest: Manifest) -> int:
    return sum(split.num_bytes for split in manifest.splits.values())


def _as_shards(manifests: dict[str, Manifest], split: SplitName) -> SplitManifest:
    shards = tuple(
        Shard(
            name=name,
            num_records=manifest.splits[split].num_records,
            num_bytes=manifest.splits[split].num_bytes,
            crc32c=f"{crc32c(dataset_content(manifest).encode()):08x}",
        )
        for name, manifest in manifests.items()
    )
    content = " ".join(str(shard) for shard in shards)
    return SplitManifest(
        num_records=sum(shard.num_records for shard in shards),
        shards=shards,
        index_crc32c=f"{crc32c(content.encode()):08x}",
    )


def describe_uses(config: SampleConfig, steps: int) -> list[str]:
    """Return a line for each source: its share with each of the weights, and what the first `steps` have of it.

    Raises:
        ConfigError, DatasetError: see `MixedSplit`, of which only the manifests are read.
    """
    data, batch = config.data, config.batch
    sources = [manifest.splits["train"].num_records for manifest in read_manifests(data)]
    kept = None if data.exclude is None else kept_images(data.exclude, sum(sources))
    order = mixed_order(config, sources, np.zeros(sum(sources), dtype=np.int64), kept)
    counts = order.counts_before(steps * batch.num_micro_batches).tolist()  # repeats included
    weights = data.mix_weights
    lines = []
    for number, (name, _, _) in enumerate(data.mix):
        shares = [f"{each[number] / sum(each):.1%} from epoch {epoch:g}" for epoch, each in weights]
        if len(weights) == 1:
            shares = [f"{weights[0][1][number] / sum(weights[0][1]):.1%}"]
        num_images = order.orders[number].num_images
        lines.append(
            f"{name}: {', '.join(shares)}; {plural(counts[number], 'image')} in {plural(steps, 'step')}, "
            f"{counts[number] / num_images:.2f} epochs of {num_images:,}"
        )
    return lines


def mixed_recipe(data: DataConfig) -> dict[str, Any]:
    """Return what a recipe has of data.mix: the names in their order, and the weight and the content of each dataset.

    Raises DatasetError: see `read_manifests`.
    """
    fields: dict[str, Any] = {"data.mix": [name for name, _, _ in data.mix]}
    for (name, _, weight), manifest in zip(data.mix, read_manifests(data), strict=True):
        fields[f"data.mix {name} (weight)"] = weight
        fields[f"data.mix {name} (dataset)"] = f"{dataset_content(manifest)}, {names_content(manifest.class_names)}"
    return fields
