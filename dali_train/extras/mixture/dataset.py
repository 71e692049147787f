"""Several datasets as one split: their indexes one behind the other, with the classes of all of them.

An image of source i has the number it has there plus the number of images of the sources before i. So everything that
takes a split and image numbers takes a mixture too: loader, trace, record, ledger.
"""

from collections.abc import Sequence

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.config import DataConfig, SampleConfig
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.label_kind import CLASSES, LabelKind
from dali_train.data.dataset.manifest import (
    Manifest,
    Shard,
    SplitManifest,
    SplitName,
    dataset_content,
    metadata_directory,
)
from dali_train.errors import ConfigError, DatasetError
from dali_train.extras.mixture.merge import MixedOrder, mixed_order
from dali_train.extras.mixture.mixed_classes import class_names, class_numbers, united_sets


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
        self.label_kind = self.manifest.label_kind
        self.root = metadata_directory(data.root)
        self.dataset_name = " + ".join(name for name, _, _ in data.mix)
        self.name = "train"
        self.url = None
        self.files = None
        self.shards = ()
        self.paths = []
        self.num_bytes = sum(part.num_bytes for part in self.parts)
        self.dataset_bytes = num_bytes(self.manifest)
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


def source_manifests(data: DataConfig) -> list[Manifest]:
    """Return the manifests of the sources. Raises DatasetError: see `Manifest.read`, or one has no training split."""
    manifests = [Manifest.read(root) for _, root, _ in data.mix]
    for (name, root, _), manifest in zip(data.mix, manifests, strict=True):
        if "train" not in manifest.splits:
            raise DatasetError(f"data.mix {name}: {root} has no train split: use a dataset that has one")
    return manifests


def read_manifest(data: DataConfig) -> Manifest:
    """Return a manifest of the whole: its classes, and each source as if it were a shard.

    Raises:
        ConfigError: a class has no counterpart, or some sources hold encoded images and others pixels.
        DatasetError: see `source_manifests`.
    """
    manifest, _ = _manifest_of(data, Manifest.read(data.root), source_manifests(data))
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
    label_kind: LabelKind = CLASSES
    if not all(manifest.label_kind.is_class for manifest in (root, *manifests)):
        label_kind, numbers = united_sets(root, manifests, numbers)
    manifest = Manifest(
        num_classes=len(names),
        class_names=names,
        **label_kind.manifest_fields(),
        label_base=0,
        splits=splits,
        encoding=manifests[0].encoding,
        conversion=root.conversion,
    )
    return manifest, numbers


def num_bytes(manifest: Manifest) -> int:
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
