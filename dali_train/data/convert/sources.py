"""What a conversion reads: a source lists images, each a range of bytes in some file, and reads them one at a time.

A converter gives each split as `Images` of a `Source`. Those of files are `ImageFiles`, whatever the files are; a new
format needs a function that yields an `Image` for each of its images, and, where these are not plain ranges of bytes,
a function that reads one. Directories and archives are in archives.py.

A listing yields a `PassedOver` for what it does not take for an image; `Images` counts and shows them, for all formats.
"""

import copy
import hashlib
import io
import json
import os
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from zipfile import BadZipFile

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.config.check import Extra
from dali_train.data.convert.image import MAX_ENCODED_BYTES, RawImage
from dali_train.data.dataset.label_kind import CLASSES, LabelKind
from dali_train.data.dataset.manifest import SplitName
from dali_train.data.dataset.passed_over import PassedOver, warn_passed_over
from dali_train.data.progress import SHORT_S, Progress
from dali_train.data.sampling.rng import shuffled
from dali_train.errors import DatasetError
from dali_train.files import write_atomically

GROUPED = Extra[Callable[..., NDArray[np.bool_]]]("dali_train.extras.grouping:held_out_groups", "--group-by")
# What numpy and zipfile raise for arrays that are missing, or that a power failure or a bit that flipped has spoilt;
# RuntimeError is of a flag or a version in zip's headers that zipfile does not know.
UNREADABLE_ARRAYS = (OSError, ValueError, KeyError, EOFError, BadZipFile, RuntimeError)
_COLUMNS = {"name_ends": "Q", "offsets": "Q", "sizes": "I", "packed": "b", "file_numbers": "I"}  # and codes of `array`
_LISTED_AT_ONCE = 1000  # images between two updates of the bar
_HELD_OUT_STREAM = 0x4845_4C44_4F55_54  # apart from those that training draws from, whose keys are small numbers


_LOADING = threading.Lock()


@contextmanager
def loaded_arrays(path: Path) -> Iterator[Any]:
    """Open a file of arrays, one thread at a time: NumPy has Python's parser read their headers, which in CPython 3.11
    sometimes fails with a SystemError if several threads use it (its issue 106905). None waits for another's disk.

    Raises:
        One of `UNREADABLE_ARRAYS`: also for reading one of the arrays.
    """
    content = io.BytesIO(path.read_bytes())
    with _LOADING, np.load(content, allow_pickle=False) as arrays:
        yield arrays


class SourceError(DatasetError):
    """A source that its command does not expect; the message names the file, the position in it and the remedy."""


def printable_name(name: str) -> str:
    """Decode a file name; bytes that are not UTF-8 become \\xNN, so that distinct names stay distinct."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


class Image(NamedTuple):
    """`size` bytes at byte `offset` of a file. Bytes of names that are not UTF-8 are surrogates, as everywhere in
    Python."""

    file: str  # a path; of a directory, with "/" at its end, if the image is all of the file `name` below it
    name: str
    offset: int
    size: int
    label: int = -1  # from 0; -1 for a file of which it is not known
    is_packed: bool = False  # these bytes are no image, but something that `Source.read` unpacks

    @property
    def location(self) -> str:
        """`file` and `name`, for messages."""
        return printable_name(f"{self.file}{'' if self.file.endswith('/') else ':'}{self.name}")


class Source(Protocol):
    def list(self) -> Iterable[Image | PassedOver]:
        """Yield the images of one split, always in the same order, and what is passed over. Raises SourceError: not
        what it should be."""
        ...

    def read(self, image: Image) -> RawImage:
        """Read an image that `list` has yielded, from any thread. Raises SourceError: it is not as it was listed."""
        ...


class Images:
    """The images of one split of a source, numbered from 0; a conversion depends on all of this.

    A million images are a few columns and one string: as Python objects they would take half a gigabyte.
    """

    labels: NDArray[np.int32]  # (N,), from 0
    label_kind: LabelKind = CLASSES  # what `labels` stand for
    num_bytes: int  # of all images together, as the source holds them
    passed_over: Counter[PassedOver]  # also logged as a warning
    labels_from: Mapping[Path, str]  # the SHA-256 of each file, without images, that the labels were read from
    _whole: "Images | None" = None  # of a part of a listing

    def __init__(
        self,
        source: Source,
        root: Path | str,
        *,
        kept: Path | None = None,
        labels_from: Mapping[Path, str] = MappingProxyType({}),
        **facts: object,
    ) -> None:
        """List a source, and warn of what is passed over in it.

        Args:
            root: the file or directory that holds it; image/filename of a record is relative to it.
            kept: the file of `keep`, from which the listing is taken if it is there; None: it is never kept.
            labels_from: see the attribute.
            facts: further values that identify it.
        """
        self._source, self._root, self._kept = source, root, kept
        self.labels_from = labels_from
        self._rows: NDArray[np.int64] | None = None  # the numbers of the listed images that count; None: all do
        if kept is None or not self._load(kept):
            self._list(source)
        self.num_bytes = sum(self._sizes)
        self._facts = {
            "name": printable_name(Path(root).name),
            "num_images": len(self.labels),
            "num_bytes": self.num_bytes,
            **facts,
        }
        warn_passed_over(root, self.passed_over)

    def _list(self, source: Source) -> None:
        names, self._name_ends = bytearray(), array("Q", [0])
        self._offsets, self._sizes, labels = array("Q"), array("I"), array("i")
        files: dict[str, int] = {}
        self._file_numbers = array("I")
        self._packed = array("b")
        self.passed_over = Counter()
        title = f"listing {printable_name(Path(self._root).name)}"
        with Progress(title, total=None, unit="images", delay_s=SHORT_S) as progress:
            for listed in source.list():
                if isinstance(listed, PassedOver):
                    self.passed_over[listed] += 1
                    continue
                file, name, offset, size, label, is_packed = listed
                names += name.encode(errors="surrogateescape")
                self._name_ends.append(len(names))
                self._offsets.append(offset)
                self._sizes.append(size)
                labels.append(label)
                self._packed.append(is_packed)
                self._file_numbers.append(files.setdefault(file, len(files)))
                if len(labels) % _LISTED_AT_ONCE == 0:
                    progress.update(_LISTED_AT_ONCE)
            progress.update(len(labels) % _LISTED_AT_ONCE)
        self._names, self._files = bytes(names), [*files]
        self.labels = np.array(labels, dtype=np.int32)

    def keep(self) -> None:
        """Write the listing to the file `kept`, if that has a directory: the next start then need not list again what
        takes minutes, such as the headers of a large archive."""
        if self._whole is not None:
            return self._whole.keep()
        if self._kept is None or self._kept.exists() or not self._kept.parent.is_dir():
            return
        facts = {"files": self._files, "passed_over": [[*one, count] for one, count in self.passed_over.items()]}
        columns: dict[str, Any] = {
            name: np.array(getattr(self, f"_{name}"), dtype=code) for name, code in _COLUMNS.items()
        }
        columns["labels"], columns["names"] = self.labels, np.frombuffer(self._names, np.uint8)
        columns["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        content = io.BytesIO()
        np.savez(content, **columns)
        write_atomically(self._kept, content.getbuffer())

    def _load(self, path: Path) -> bool:
        """Take the listing of an earlier start; return False if there is none, or a power failure has spoilt it."""
        try:
            with loaded_arrays(path) as arrays:
                facts = json.loads(arrays["facts"].tobytes())
                columns = {name: array(code, arrays[name].tobytes()) for name, code in _COLUMNS.items()}
                self._names, self.labels = arrays["names"].tobytes(), arrays["labels"]
        except UNREADABLE_ARRAYS:
            return False
        self._name_ends, self._file_numbers = columns["name_ends"], columns["file_numbers"]
        self._offsets, self._sizes, self._packed = columns["offsets"], columns["sizes"], columns["packed"]
        self._files = facts["files"]
        self.passed_over = Counter({PassedOver(place, reason): count for place, reason, count in facts["passed_over"]})
        return True

    def __getitem__(self, number: int) -> Image:
        row = number if self._rows is None else int(self._rows[number])
        name = self._names[self._name_ends[row] : self._name_ends[row + 1]].decode(errors="surrogateescape")
        file = self._files[self._file_numbers[row]]
        place = self._offsets[row], self._sizes[row]
        return Image(file, name, *place, int(self.labels[number]), bool(self._packed[row]))

    def read(self, number: int) -> RawImage:
        return self._source.read(self[number])

    def name(self, number: int) -> str:
        """Return the record's image/filename: the location below the root."""
        location = self[number].location
        return location.removeprefix(printable_name(f"{self._root}:")).removeprefix(printable_name(f"{self._root}/"))

    def part(self, rows: NDArray[np.int64], fraction: float | None = None, group_by: str | None = None) -> "Images":
        """Return some of the images, by their numbers; `fraction` and `group_by` are those of `hold_out`."""
        assert self._rows is None
        chosen = copy.copy(self)
        chosen._whole, chosen._rows, chosen.labels = self, rows, self.labels[rows]
        chosen.num_bytes = self.num_bytes * len(rows) // max(1, len(self.labels))  # enough for a number of shards
        chosen._facts = {
            **self.identity(),
            "validation_fraction": fraction,
            "num_chosen": len(rows),
            "chosen_crc32c": f"{crc32c(rows.data):08x}",
            **({} if group_by is None else {"group_by": group_by}),
        }
        return chosen

    @property
    def strata(self) -> NDArray[np.int32]:
        """What a validation split has a fraction of each of, (N,)."""
        return self.label_kind.strata(self.labels)

    def relabel(self, labels: NDArray[np.int32], kind: LabelKind) -> None:
        """Give the images other labels, (N,), which are of this kind."""
        assert self._rows is None
        self.labels = labels
        self.label_kind = kind
        self._facts |= kind.facts()

    def identity(self) -> dict[str, Any]:
        """Return values that a resumed conversion compares: the files with sizes, offsets and labels. What the images
        hold is not read for it."""
        if self._rows is not None:
            return self._facts
        listing = crc32c(self._sizes, crc32c(self._offsets, crc32c(self._names)))
        listing = crc32c(self.labels.data, listing)
        if len(self._files) > 1:
            below = [file.removeprefix(f"{self._root}/") for file in self._files]
            listing = crc32c(self._file_numbers, crc32c(json.dumps(below).encode(), listing))
        return {**self._facts, "listing_crc32c": f"{listing:08x}"}


def kept_listing(directory: Path | None, split: SplitName, *sources: Path | None) -> Path | None:
    """Return the file in `directory` for `Images.keep` of what is listed in `sources`, which another start only finds
    if they have the same sizes and times of change. None: there is no directory."""
    if directory is None:
        return None
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sources if path is not None]
    return directory / f"listing-{split}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.npz"


Sources = tuple[dict[SplitName, Images], Sequence[str]]
"""The splits, and the class names in the order of the labels."""


def hold_out(
    images: Mapping[SplitName, Images], fraction: float | None, *, seed: int, group_by: str | None = None
) -> dict[SplitName, Images]:
    """Return `images`; if there is a `fraction`, with that part of each class of the training split, chosen by `seed`,
    as the validation split.

    Args:
        group_by: a regular expression that finds in an image's name the group that stays on one side.

    Raises:
        SourceError: it is no fraction, there is another split than that for training, no class has two images, or
            there are no such groups.
    """
    if fraction is None:
        if group_by is not None:
            raise SourceError(f"--group-by {group_by}: says how --validation-fraction divides: give that as well")
        return dict(images)
    if not 0 < fraction < 1:
        raise SourceError(f"--validation-fraction is {fraction}: use a fraction between 0 and 1, e.g. 0.1")
    if set(images) != {"train"}:
        raise SourceError(
            f"--validation-fraction is {fraction} where there is a validation split, or none for training: give a "
            "training split alone, which it divides, or leave it out"
        )
    train = images["train"]
    if group_by is None:
        chosen = held_out(train.strata, fraction, seed=seed)
    else:
        chosen = GROUPED.load()(train, group_by, fraction, seed=seed)
    if len(chosen) and not chosen.any():
        raise SourceError(
            f"--validation-fraction is {fraction} where no class has two images, of which one could be held out: leave "
            "it out"
        )
    return {
        "train": train.part(np.flatnonzero(~chosen), fraction, group_by),
        "validation": train.part(np.flatnonzero(chosen), fraction, group_by),
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


def read_range(image: Image) -> bytes:
    """Read part of a file, which is opened for it, since there may be more such files than a process can keep open.

    Raises:
        SourceError: it is not as it was listed.
    """
    try:
        with Path(image.file).open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), image.size, image.offset)
    except OSError as error:
        raise SourceError(f"{printable_name(image.file)}: cannot be read any more ({error.strerror})") from None
    return checked_length(content, image)


def checked_length(content: bytes, image: Image) -> bytes:
    if len(content) != image.size:
        raise SourceError(f"{image.location}: has {len(content)} bytes, {image.size} when it was listed")
    return content


class ImageFiles:
    """The source of image files that a function yields, wherever they lie."""

    def __init__(
        self, images: Callable[[], Iterable[Image | PassedOver]], read: Callable[[Image], RawImage] = read_range
    ) -> None:
        self._images = images
        self.read = read

    def list(self) -> Iterator[Image | PassedOver]:
        """Raises SourceError: by `images`, or a file is too large for an image."""
        for image in self._images():
            if isinstance(image, Image) and image.size > MAX_ENCODED_BYTES:
                limit = f"the limit for an image is {MAX_ENCODED_BYTES:,}; remove it"
                raise SourceError(f"{image.location}: {image.size:,} bytes: {limit}")
            yield image


class PixelSource:
    """Small images held in memory, shape (N, height, width, 3) for RGB or (N, height, width) for grey, uint8."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.int32], *, title: str, first: int = 0) -> None:
        """`title` names the source in records and errors; the first image is number `first` of it."""
        self._pixels, self._labels, self._title, self._first = pixels, labels, title, first
        self._size = int(np.prod(pixels.shape[1:]))

    def list(self) -> Iterator[Image]:
        for number, label in enumerate(self._labels.tolist()):
            name = f"{self._title}_{self._first + number:05d}"
            yield Image(self._title, name, number * self._size, self._size, label)

    def read(self, image: Image) -> NDArray[np.uint8]:
        return self._pixels[image.offset // self._size]

    def images(self) -> Images:
        content = crc32c(self._labels.data, crc32c(np.ascontiguousarray(self._pixels).data))
        return Images(self, self._title, crc32c=f"{content:08x}")
