"""The sources of a conversion: lists of labelled images, which are read in place, one at a time."""

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.convert.archive import Member, Readable, SourceError, printable
from dali_train.data.convert.image import MAX_ENCODED_BYTES, RawImage
from dali_train.data.dataset.manifest import SplitName
from dali_train.data.sampling.rng import shuffled

_HELD_OUT_STREAM = 0x4845_4C44_4F55_54  # apart from those that training draws from, whose keys are small numbers


class Source(Protocol):
    """One split. Images are numbered from 0 in an order that the source fixes; many threads may read at once."""

    labels: NDArray[np.int32]  # (N,), from 0
    num_bytes: int  # of all images together, as the source holds them

    def read(self, image: int) -> RawImage: ...

    def name(self, image: int) -> str:
        """Return the record's image/filename."""
        ...

    def locate(self, image: int) -> tuple[str, int]:
        """Return (file, byte offset in it), to find a bad image."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return values that identify this source; a resumed conversion compares them."""
        ...


Sources = tuple[dict[SplitName, Source], Sequence[str]]
"""The splits, and the class names in the order of the labels."""


def hold_out(sources: Mapping[SplitName, Source], fraction: float | None, *, seed: int) -> dict[SplitName, Source]:
    """Return `sources`; if there is a `fraction`, with that part of each class of the training split, chosen by `seed`,
    as the validation split.

    Raises:
        SourceError: it is no fraction, or there is another split than that for training.
    """
    if fraction is None:
        return dict(sources)
    if not 0 < fraction < 1:
        raise SourceError(f"--validation-fraction is {fraction}: use a fraction between 0 and 1, e.g. 0.1")
    if set(sources) != {"train"}:
        raise SourceError(
            f"--validation-fraction is {fraction} where there is a validation split, or none for training: give a "
            "training split alone, which it divides, or leave it out"
        )
    source = sources["train"]
    chosen = held_out(source.labels, fraction, seed=seed)
    return {
        "train": SourcePart(source, np.flatnonzero(~chosen), fraction),
        "validation": SourcePart(source, np.flatnonzero(chosen), fraction),
    }


def held_out(labels: NDArray[np.int32], fraction: float, *, seed: int) -> NDArray[np.bool_]:
    """Choose the images of a validation split: `fraction` of each class, rounded, and at least one image of every class
    that has two."""
    chosen = np.zeros(len(labels), dtype=np.bool_)
    order = shuffled(np.random.Philox(key=[seed, _HELD_OUT_STREAM]), len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        chosen[by_class[start : start + min(count - 1, max(1, round(count * fraction)))]] = True
    return chosen


class ImageFiles:
    """Image files in an archive or a directory, with their labels.

    A million files are a few columns and one string: as Python objects they would take half a gigabyte.
    """

    def __init__(self, container: Readable, files: Iterable[tuple[Member, int]]) -> None:
        """`files` yields members and their labels. Raises SourceError: a file too large for an image."""
        self._container = container
        names, name_ends = bytearray(), array("Q", [0])
        offsets, sizes, labels = array("Q"), array("I"), array("i")
        for member, label in files:
            if member.size > MAX_ENCODED_BYTES:
                place = container.place(member.name)
                raise SourceError(
                    f"{place}: {member.size:,} bytes: the limit for an image is {MAX_ENCODED_BYTES:,}; remove it"
                )
            # File systems know names that are not UTF-8; Python marks those bytes as surrogates.
            names += member.name.encode(errors="surrogateescape")
            name_ends.append(len(names))
            offsets.append(member.offset)
            sizes.append(member.size)
            labels.append(label)
        self._names, self._name_ends = bytes(names), name_ends
        self._offsets, self._sizes = offsets, sizes
        self.labels = np.array(labels, dtype=np.int32)
        self.num_bytes = sum(sizes)

    def read(self, image: int) -> bytes:
        return self._container.read(Member(self._name(image), self._offsets[image], self._sizes[image]))

    def name(self, image: int) -> str:
        return printable(self._name(image))

    def locate(self, image: int) -> tuple[str, int]:
        return self._container.place(self._name(image)), self._offsets[image]

    def identity(self) -> dict[str, Any]:
        """Return the list of files with sizes, places and labels. What the images hold is not read for it."""
        listing = crc32c(self.labels.data, crc32c(self._sizes, crc32c(self._offsets, crc32c(self._names))))
        return {
            "name": self._container.path.name,
            "num_images": len(self.labels),
            "num_bytes": self.num_bytes,
            "listing_crc32c": f"{listing:08x}",
        }

    def _name(self, image: int) -> str:
        return self._names[self._name_ends[image] : self._name_ends[image + 1]].decode(errors="surrogateescape")


class SourcePart:
    """Some images of another source, (N,) numbers."""

    def __init__(self, source: Source, images: NDArray[np.int64], fraction: float | None = None) -> None:
        """`fraction` is the one that `hold_out` was called with."""
        self._source = source
        self._images = images
        self._fraction = fraction
        self.labels = source.labels[images]
        # Enough to choose a number of shards.
        self.num_bytes = source.num_bytes * len(images) // max(1, len(source.labels))

    def read(self, image: int) -> RawImage:
        return self._source.read(int(self._images[image]))

    def name(self, image: int) -> str:
        return self._source.name(int(self._images[image]))

    def locate(self, image: int) -> tuple[str, int]:
        return self._source.locate(int(self._images[image]))

    def identity(self) -> dict[str, Any]:
        return {
            **self._source.identity(),
            "validation_fraction": self._fraction,
            "num_chosen": len(self._images),
            "chosen_crc32c": f"{crc32c(self._images.data):08x}",
        }


class JoinedSources:
    """The sources of several files, concatenated."""

    def __init__(self, root: Path, sources: Sequence[Source]) -> None:
        """The files lie below `root`."""
        self._root = root
        self._sources = sources
        self._ends = list(accumulate(len(source.labels) for source in sources))
        self.labels = np.concatenate([source.labels for source in sources])
        self.num_bytes = sum(source.num_bytes for source in sources)

    def read(self, image: int) -> RawImage:
        source, number = self._find(image)
        return source.read(number)

    def name(self, image: int) -> str:
        """Return the place in `root`: different files may use the same names."""
        return self.locate(image)[0].removeprefix(printable(f"{self._root}/"))

    def locate(self, image: int) -> tuple[str, int]:
        source, number = self._find(image)
        return source.locate(number)

    def identity(self) -> dict[str, Any]:
        listing = crc32c(json.dumps([source.identity() for source in self._sources]).encode())
        return {
            "name": self._root.name,
            "num_images": len(self.labels),
            "num_bytes": self.num_bytes,
            "listing_crc32c": f"{listing:08x}",
        }

    def _find(self, image: int) -> tuple[Source, int]:
        number = bisect_right(self._ends, image)
        return self._sources[number], image - (self._ends[number - 1] if number else 0)


class PixelSource:
    """Small images that lie in memory, shape (N, height, width, 3) for RGB or (N, height, width) for grey, uint8."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.int32], *, title: str, first: int = 0) -> None:
        """`title` names the source in records and errors; the first image is number `first` of it."""
        self._pixels = pixels
        self.labels = labels
        self.num_bytes = pixels.nbytes
        self._title = title
        self._first = first

    def read(self, image: int) -> NDArray[np.uint8]:
        return self._pixels[image]

    def name(self, image: int) -> str:
        return f"{self._title}_{self._first + image:05d}"

    def locate(self, image: int) -> tuple[str, int]:
        return self._title, image * self._pixels[0].nbytes

    def identity(self) -> dict[str, Any]:
        content = crc32c(self.labels.data, crc32c(np.ascontiguousarray(self._pixels).data))
        return {"name": self._title, "num_images": len(self.labels), "crc32c": f"{content:08x}"}
