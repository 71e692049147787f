"""A smaller dataset from a larger one: some classes, some images of each, with unchanged bytes."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.convert.conversion import check_seed
from dali_train.data.convert.image import StoredImage
from dali_train.data.convert.sources import Image, Images, SourceError, Sources, printable_name
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import SPLITS, Manifest, SplitName
from dali_train.data.dataset.storage import open_shards, stored_image
from dali_train.data.sampling.rng import shuffled
from dali_train.extras.image_names import ImageNames
from dali_train.files import read_lines

_CLASSES_STREAM, _IMAGES_STREAM = 0x434C_4153_5345_53, 0x494D_4147_4553


class DatasetSource:
    """Chosen images of a split, with new labels."""

    def __init__(self, split: Split, images: NDArray[np.int64], labels: NDArray[np.int32]) -> None:
        self._split, self._shards = split, open_shards(split)
        self._images, self._labels = images, labels
        self._names = ImageNames(split, self._shards)

    def list(self) -> Iterator[Image]:
        rows = self._split.rows[self._images]
        location = cache(self._split.shard_location)
        columns = [rows[name].tolist() for name in ("shard", "offset", "size")]
        for number, shard, offset, size, label in zip(self._images, *columns, self._labels.tolist(), strict=True):
            yield Image(location(shard), f"image {number}", offset, size, label)

    def read(self, image: Image) -> StoredImage:
        number = int(image.name.rpartition(" ")[2])
        row = self._split.rows[number]
        content = stored_image(self._shards, number).tobytes()
        is_raw = self._split.manifest.encoding == "raw"
        name = self._names.find(number) or f"{self._split.name}_{number}"
        return StoredImage(content, int(row["height"]), int(row["width"]), is_raw=is_raw, name=name)

    def images(self, root: Path | str) -> Images:
        shards: Any = [(shard.name, shard.crc32c) for shard in self._split.shards]
        if self._split.files is not None:
            shards = self._split.manifest.splits[self._split.name].image_checksums_crc32c
        chosen = crc32c(self._labels.data, crc32c(self._images.data, crc32c(repr(shards).encode())))
        return Images(
            self, str(root).rstrip("/"), name=printable_name(self._split.dataset_name), chosen_crc32c=f"{chosen:08x}"
        )


def subset(
    root: Path | str, *, classes: int | None, class_list: Path | None, images_per_class: int | None, seed: int
) -> Sources:
    """Return the chosen images of each split, and the names of the chosen classes in their old order.

    Args:
        classes: number of classes, chosen by `seed`.
        class_list: a file with one class name per line.
        images_per_class: largest number of images of each class of the training split, chosen by `seed`. The
            validation split keeps all.

    Raises:
        DatasetError: `seed` is none.
        SourceError: a class that is not there, or more classes than there are; or `images_per_class` with several
            labels an image.
    """
    check_seed(seed)
    manifest = Manifest.read(root)
    if images_per_class is not None and not manifest.label_kind.is_class:
        raise SourceError(
            f"--images-per-class is for one label an image, and {root} has several: choose --classes or --class-list"
        )
    chosen = _chosen_classes(manifest, classes, class_list, seed)
    new_class = np.full(manifest.num_classes, -1, dtype=np.int32)
    new_class[chosen] = np.arange(len(chosen), dtype=np.int32)
    sources: dict[SplitName, Images] = {}
    for name in SPLITS:
        if name not in manifest.splits:
            continue
        split = Split(root, name)
        new_label, label_kind = split.label_kind.of_some_classes(new_class)
        labels = new_label[split.rows["label"]]
        images = np.flatnonzero(labels >= 0)
        if images_per_class is not None and name == "train":
            images = images[_first_of_each(labels[images], images_per_class, seed)]
        if len(images):
            sources[name] = DatasetSource(split, images, labels[images]).images(root)
            sources[name].relabel(labels[images], label_kind)
    if not sources:
        raise SourceError(f"{root}: the chosen classes have no images")
    return sources, [manifest.class_names[number] for number in chosen]


def _chosen_classes(manifest: Manifest, classes: int | None, class_list: Path | None, seed: int) -> list[int]:
    if classes is not None:
        if not 1 <= classes <= manifest.num_classes:
            raise SourceError(f"--classes is {classes}: use 1 to {manifest.num_classes}, the dataset has no more")
        order = shuffled(np.random.Philox(key=[seed, _CLASSES_STREAM]), manifest.num_classes)
        return sorted(order[:classes].tolist())
    if class_list is None:
        return list(range(manifest.num_classes))
    try:
        names = [name for name in read_lines(class_list) if name]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SourceError(f"--class-list {class_list}: cannot be read ({reason})") from error
    number_of = {name: number for number, name in enumerate(manifest.class_names)}
    unknown = [name for name in names if name not in number_of]
    if unknown or not names:
        problem = f"{unknown[0]!r} is not a class of the dataset" if unknown else "it names no class"
        examples = ", ".join(manifest.class_names[:3])
        raise SourceError(f"--class-list {class_list}: {problem}: one name per line is expected, such as {examples}")
    return sorted({number_of[name] for name in names})


def _first_of_each(labels: NDArray[np.int32], most: int, seed: int) -> NDArray[np.int64]:
    """Return the places in `labels` of at most `most` images of each class, at random, ascending."""
    if most < 1:
        raise SourceError(f"--images-per-class is {most}: use at least 1")
    order = shuffled(np.random.Philox(key=[seed, _IMAGES_STREAM]), len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    rank = np.arange(len(labels)) - np.repeat(starts, counts)
    return np.sort(by_class[rank < most]).astype(np.int64)
