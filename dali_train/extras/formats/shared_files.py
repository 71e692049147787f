"""Class folders with several labels an image: ``--several-labels``.

Files with the same bytes are one image, whose classes are all folders that hold one: copies, hard links and links. The
first of them by name is read and gives the image its name.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dali_train.data.convert.archives import open_container
from dali_train.data.convert.sources import Image, ImageFiles, Images, SourceError, Sources, hold_out
from dali_train.data.dataset.manifest import SplitName
from dali_train.extras.formats.label_sets import LabelSets
from dali_train.extras.formats.trees import folders


def folders_of_several(
    train: Path | None,
    validation: Path | None,
    *,
    validation_fraction: float | None,
    seed: int,
    group_by: str | None,
    **options: Any,
) -> Sources:
    """Return the splits and the class names as `folders`, with the files of each image put together.

    Raises:
        SourceError: as `folders`; or no image is in two class folders, or one is in both splits.
        DatasetError: as `folders`.
    """
    listed, names = folders(train, validation, validation_fraction=None, seed=seed, **options)
    sets = LabelSets()
    paths: Mapping[SplitName, Path | None] = {"train": train, "validation": validation or train}
    seen: dict[bytes, str] = {}
    merged: dict[SplitName, Images] = {}
    sizes = Counter(size for images in listed.values() for size in _sizes(images))
    for split, images in listed.items():
        path = paths[split]
        assert path is not None
        read = open_container(path).read
        merged[split] = _merged(images, path, read, sets, sizes, seen)
    if sets.largest < 2:
        raise SourceError(f"{train or validation}: no image is in two class folders: leave --several-labels out")
    sets.resolve(merged)
    return hold_out(merged, validation_fraction, seed=seed, group_by=group_by), names


def _sizes(images: Images) -> Iterator[int]:
    return (images[number].size for number in range(len(images.labels)))


def _merged(
    images: Images,
    path: Path,
    read: Callable[[Image], bytes],
    sets: LabelSets,
    sizes: Mapping[int, int],
    seen: dict[bytes, str],
) -> Images:
    """Return a split with each image once.

    Args:
        sizes: how many files of all splits have a size; only of one that several have is the content read.
        seen: the images of the splits before, by their content; those of this one are added.
    """
    first: dict[bytes | int, Image] = {}
    classes: dict[bytes | int, list[int]] = {}
    for number in range(len(images.labels)):
        image = images[number]
        content: bytes | int = number
        if sizes[image.size] > 1:
            content = hashlib.sha256(read(image)).digest()
            if content in seen:
                raise SourceError(
                    f"{image.location}: is the same image as {seen[content]}, in another split: leave one of them out"
                )
        first.setdefault(content, image)
        classes.setdefault(content, []).append(image.label)
    seen |= {content: image.location for content, image in first.items() if isinstance(content, bytes)}
    whole = [image._replace(label=sets.label(classes[content], image.location)) for content, image in first.items()]
    merged = Images(ImageFiles(partial(iter, whole), read), path)
    merged.passed_over = images.passed_over  # of which the listing has warned
    return merged
