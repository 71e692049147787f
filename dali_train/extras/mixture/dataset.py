"""Several datasets as one split: their indexes one behind the other, with the classes of all of them.

An image of source i has the number it has there plus the number of images of the sources before i. So everything that
takes a split and image numbers takes a mixture too: loader, trace, record, ledger.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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
from dali_train.data.dataset.storage import Storage, open_storage
from dali_train.errors import ConfigError, DatasetError
from dali_train.extras.mixture.merge import mixed_order
from dali_train.text import plural

T = TypeVar("T")


def open_mixed(data: DataConfig, name: SplitName, *, local: bool = True) -> Split:
    """Return the training split of a mixture, or the validation split of data.root with the classes of the mixture.

    Raises:
        ConfigError: the datasets do not go together.
        DatasetError: see `Split`.
    """
    if name == "train":
        return MixedSplit(data, local=local)
    split = Split(data.root, name, local=local)
    names = class_names(data, split.manifest, read_manifests(data))
    split.manifest = replace(split.manifest, num_classes=len(names), class_names=names)  # its own classes come first
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
        self.sources = [len(part) for part in self.parts]
        self.firsts = np.cumsum([0, *self.sources[:-1]])  # the number of each one's first image, (sources,)
        manifests = [part.manifest for part in self.parts]
        self.manifest = _manifest_of(data, manifests)
        self.root = metadata_directory(data.root)
        self.dataset_name = " + ".join(name for name, _, _ in data.mix)
        self.name = "train"
        self.url = None
        self.label_sets = None
        self.files = None
        self.shards = ()
        self.paths = []
        self.num_bytes = sum(part.num_bytes for part in self.parts)
        self.rows = np.concatenate([part.rows for part in self.parts])
        labels = [
            numbers[part.rows["label"]]
            for part, numbers in zip(self.parts, class_numbers(data, manifests, self.manifest.class_names), strict=True)
        ]
        self.rows["label"] = np.concatenate(labels)
        checksums = [part.checksums for part in self.parts if part.checksums is not None]
        self.checksums = np.concatenate(checksums) if len(checksums) == len(self.parts) else None
        self.kept = None if data.exclude is None else kept_images(data.exclude, len(self))
        if self.kept is not None:
            for part, kept in zip(self.parts, np.split(self.kept, self.firsts[1:]), strict=True):
                if not kept.any():
                    raise ConfigError(
                        f"data.exclude leaves no image of {part.source_name}: leave that dataset out of data.mix"
                    )
        self._epoch_images = data.epoch_images
        self._weights = data.mix_weights[-1][1]
        self._data = data

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
            counts = np.bincount(self.rows["label"][taking_part], minlength=self.num_classes)
            share = self._weights[number] / sum(self._weights)
            expected += counts / len(taking_part) * share * self.num_images
        return np.where(expected > 0, np.maximum(1, np.rint(expected)), 0).astype(np.int64)

    def locate(self, image: int) -> tuple[Split, int]:
        """Return the source's split that has image number `image`, and the image's number there."""
        source = int(np.searchsorted(self.firsts, image, side="right")) - 1
        return self.parts[source], image - int(self.firsts[source])

    def describe(self, image: int) -> str:
        part, number = self.locate(image)
        return f"{part.source_name}: {part.describe(number)}"

    def index_problem(self) -> str | None:
        return next((problem for part in self.parts if (problem := part.index_problem()) is not None), None)

    def settings_of(self, number: int, data: DataConfig) -> DataConfig:
        """Return the settings of a loader for source `number` alone."""
        root = self._data.mix[number][1]
        return replace(data, root=root, mix=(), mix_until=(), mix_classes="union", epoch_images=None, exclude=None)

    def by_source(self, images: NDArray[np.int64], read: Callable[[int, NDArray[np.int64]], list[T]]) -> list[T]:
        """Return what ``read(source, its images)`` returns for each of `images`, in their order."""
        results: list[Any] = [None] * len(images)
        sources = np.searchsorted(self.firsts, images, side="right") - 1
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            for place, result in zip(here.tolist(), read(source, images[here] - self.firsts[source]), strict=True):
                results[place] = result
        return results


class MixedImages:
    """The images of a mixture, each from the storage of its source. See `Storage`."""

    keeps_windows = False

    def __init__(self, split: MixedSplit, data: DataConfig) -> None:
        self._split = split
        self._storages: list[Storage] = [
            open_storage(part, split.settings_of(number, data)) for number, part in enumerate(split.parts)
        ]
        self.portion_bytes = min(storage.portion_bytes for storage in self._storages)

    def read(self, images: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        return self._split.by_source(images, lambda source, numbers: self._storages[source].read(numbers))

    def content(self, shard: int, begin: int, end: int) -> memoryview:
        raise NotImplementedError("a mixture has no shards: read from the source, see Split.locate")

    def prefetch(self, images: NDArray[np.int64]) -> None:
        def fetch(source: int, numbers: NDArray[np.int64]) -> list[None]:
            self._storages[source].prefetch(numbers)
            return [None] * len(numbers)

        self._split.by_source(images, fetch)


# Manifest and classes


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
    return _manifest_of(data, read_manifests(data))


def _manifest_of(data: DataConfig, manifests: Sequence[Manifest]) -> Manifest:
    root = Manifest.read(data.root)
    encodings = {name: manifest.encoding for (name, _, _), manifest in zip(data.mix, manifests, strict=True)}
    if len({*encodings.values()}) > 1:
        kinds = " and ".join(f"{name} {encoding}" for name, encoding in encodings.items())
        raise ConfigError(f"data.mix has datasets of several encodings, {kinds}: convert all of them alike")
    names = class_names(data, root, manifests)
    sources = {name: manifest for (name, _, _), manifest in zip(data.mix, manifests, strict=True)}
    splits = {"train": _as_shards(sources, "train")}
    if "validation" in root.splits:
        splits["validation"] = _as_shards({"validation": root}, "validation")
    return Manifest(
        num_classes=len(names),
        class_names=names,
        label_base=0,
        splits=splits,
        encoding=manifests[0].encoding,
        conversion=root.conversion,
    )


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


def class_names(data: DataConfig, root: Manifest, manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """Return the classes of a mixture: those of data.root, and with data.mix_classes union the others' behind them."""
    names = dict.fromkeys(root.class_names)
    if data.mix_classes == "union":
        for manifest in manifests:
            names |= dict.fromkeys(manifest.class_names)
    for where, its_names in ((data.root, root.class_names), *_named(data, manifests)):
        twice = [name for name, count in Counter(its_names).items() if count > 1]
        if twice:
            raise ConfigError(
                f"data.mix matches classes by name, and {len(twice)} of {where} are called alike, {twice[0]!r} the "
                "first: give each another name, with --class-names"
            )
    return tuple(names)


def _named(data: DataConfig, manifests: Sequence[Manifest]) -> list[tuple[str, tuple[str, ...]]]:
    return [(root, manifest.class_names) for (_, root, _), manifest in zip(data.mix, manifests, strict=True)]


def class_numbers(data: DataConfig, manifests: Sequence[Manifest], names: Sequence[str]) -> list[NDArray[np.int32]]:
    """Return the class in the mixture of each class of each source, (its classes,).

    Args:
        manifests: of the sources.
        names: of the mixture's classes.

    Raises:
        ConfigError: a class has no counterpart, or data.mix_classes does not fit the source; the message names it.
    """
    numbers = {name: number for number, name in enumerate(names)}
    given = data.mix_classes if isinstance(data.mix_classes, dict) else {}
    sources = [name for name, _, _ in data.mix]
    for name in given:
        if name not in sources:
            raise ConfigError(f"data.mix_classes names {name!r}, which is none of data.mix: use {', '.join(sources)}")
    found = []
    for (name, root, _), manifest in zip(data.mix, manifests, strict=True):
        theirs = manifest.class_names
        targets = given.get(name, {})
        if isinstance(targets, dict):
            unknown = [one for one in targets if one not in theirs]
            if unknown:
                raise ConfigError(f"data.mix_classes {name}: {root} has no class {unknown[0]!r}: use its own names")
            targets = tuple(targets.get(one, one) for one in theirs)
        if len(targets) != len(theirs):
            raise ConfigError(
                f"data.mix_classes {name}: {plural(len(targets), 'class')} for the {len(theirs)} of {root}: name one "
                "of data.root for each of them, in their order"
            )
        for own, target in zip(theirs, targets, strict=True):
            if target not in numbers:
                said = "" if own == target else f", which data.mix_classes takes for {target!r},"
                raise ConfigError(
                    f"data.mix {name}: class {own!r} of {root}{said} is not among the {len(numbers)} of {data.root}: "
                    "set data.mix_classes to union, or name its counterpart there"
                )
        found.append(np.array([numbers[target] for target in targets], dtype=np.int32))
    return found


@dataclass(frozen=True, kw_only=True)
class SourceUse:
    """What the first steps of a run have of a source."""

    name: str
    num_images: int  # of its epoch
    num_trained: int  # images, repeats included

    @property
    def epochs(self) -> float:
        return self.num_trained / self.num_images


def uses_of(config: SampleConfig, steps: int) -> list[SourceUse]:
    """Return how many images of each source the first `steps` have.

    Raises:
        ConfigError, DatasetError: see `MixedSplit`, of which only the manifests are read.
    """
    data, batch = config.data, config.batch
    sources = [manifest.splits["train"].num_records for manifest in read_manifests(data)]
    kept = None if data.exclude is None else kept_images(data.exclude, sum(sources))
    order = mixed_order(config, sources, np.zeros(sum(sources), dtype=np.int64), kept)
    counts = order.counts_before(steps * batch.num_micro_batches)
    return [
        SourceUse(name=name, num_images=part.num_images, num_trained=count)
        for (name, _, _), part, count in zip(data.mix, order.orders, counts.tolist(), strict=True)
    ]


def describe_uses(config: SampleConfig, steps: int) -> list[str]:
    """Return a line for each source: its share with each of the weights, and what the first `steps` have of it."""
    weights = config.data.mix_weights
    lines = []
    for number, use in enumerate(uses_of(config, steps)):
        shares = [f"{each[number] / sum(each):.1%} from epoch {epoch:g}" for epoch, each in weights]
        if len(weights) == 1:
            shares = [f"{weights[0][1][number] / sum(weights[0][1]):.1%}"]
        lines.append(
            f"{use.name}: {', '.join(shares)}; {plural(use.num_trained, 'image')} in {plural(steps, 'step')}, "
            f"{use.epochs:.2f} epochs of {use.num_images:,}"
        )
    return lines


def mixed_recipe(data: DataConfig) -> dict[str, Any]:
    """Return what a recipe has of data.mix: the names in their order, and the weight and the content of each dataset.

    Raises DatasetError: see `read_manifests`.
    """
    from dali_train.checkpoint.recipe import names_content  # imports timm, which a loader does without

    fields: dict[str, Any] = {"data.mix": [name for name, _, _ in data.mix]}
    for (name, _, weight), manifest in zip(data.mix, read_manifests(data), strict=True):
        fields[f"data.mix {name} (weight)"] = weight
        fields[f"data.mix {name} (dataset)"] = f"{dataset_content(manifest)}, {names_content(manifest.class_names)}"
    return fields
