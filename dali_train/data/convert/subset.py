"""A smaller dataset from a larger one: some classes, some images of each, with unchanged bytes."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.convert.archive import SourceError
from dali_train.data.convert.image import StoredImage
from dali_train.data.convert.sources import Source, Sources
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import SPLITS, Manifest, SplitName
from dali_train.data.dataset.storage import open_shards
from dali_train.data.dataset.tfrecord import parse_example, walk_records
from dali_train.data.sampling.rng import shuffled

_CLASSES_STREAM, _IMAGES_STREAM = 0x434C_4153_5345_53, 0x494D_4147_4553


class DatasetImages:
    """Chosen images of a split, with new labels. Many threads may read at once."""

    def __init__(self, split: Split, images: NDArray[np.int64], labels: NDArray[np.int32]) -> None:
        self._split, self._shards = split, open_shards(split)
        self._images = images
        self.labels = labels
        self.num_bytes = int(split.rows["size"][images].sum(dtype=np.int64))
        self._record_offsets = cache(split.record_offsets)  # a few kilobytes for each shard that is asked for

    def read(self, image: int) -> StoredImage:
        number = int(self._images[image])
        row = self._split.rows[number]
        content = self._shards.image(number).tobytes()
        return StoredImage(
            content, int(row["height"]), int(row["width"]), is_raw=self._split.manifest.encoding == "raw"
        )

    def name(self, image: int) -> str:
        """image/filename of the record, or the image's number where it has none."""
        number = int(self._images[image])
        shard = int(self._split.rows[number]["shard"])
        record = number - int(self._split.first_images[shard])
        offsets = [*self._record_offsets(shard)[record : record + 2].tolist(), self._split.shards[shard].num_bytes]
        content = self._shards.content(shard, offsets[0], offsets[1])
        place = f"{self._split.place(shard)}, record {record} from byte {offsets[0]} on"
        found = next(walk_records(content, place, check_payload=True), None)
        if found is None:
            raise SourceError(f"{place}: no record, where its text index has one: index the dataset again")
        feature = parse_example(content, found, place).get("image/filename")
        if feature is None or len(feature.spans) != 1:
            return f"{self._split.name}_{number}"
        return bytes(content[slice(*feature.spans[0])]).decode(errors="replace")

    def locate(self, image: int) -> tuple[str, int]:
        row = self._split.rows[int(self._images[image])]
        return self._split.place(int(row["shard"])), int(row["offset"])

    def identity(self) -> dict[str, Any]:
        shards = [(shard.name, shard.crc32c) for shard in self._split.shards]
        chosen = crc32c(self.labels.data, crc32c(self._images.data, crc32c(repr(shards).encode())))
        return {"name": self._split.dataset_name, "num_images": len(self.labels), "chosen_crc32c": f"{chosen:08x}"}


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
        SourceError: a class that is not there, or more classes than there are.
    """
    manifest = Manifest.read(root)
    chosen = _chosen_classes(manifest, classes, class_list, seed)
    new_label = np.full(manifest.num_classes, -1, dtype=np.int32)
    new_label[chosen] = np.arange(len(chosen), dtype=np.int32)
    sources: dict[SplitName, Source] = {}
    for name in SPLITS:
        if name not in manifest.splits:
            continue
        split = Split(root, name)
        labels = new_label[split.rows["label"]]
        images = np.flatnonzero(labels >= 0)
        if images_per_class is not None and name == "train":
            images = images[_first_of_each(labels[images], images_per_class, seed)]
        if len(images):
            sources[name] = DatasetImages(split, images, labels[images])
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
        names = [line.strip() for line in class_list.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise SourceError(f"--class-list {class_list}: cannot be read ({error.strerror})") from error
    number_of = {name: number for number, name in enumerate(manifest.class_names)}
    unknown = [name for name in names if name not in number_of]
    if unknown or not names:
        problem = f"{unknown[0]!r} is no class of the dataset" if unknown else "names no class"
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
