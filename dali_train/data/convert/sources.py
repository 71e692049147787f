"""What a conversion reads: a source lists images, each a range of bytes in some file, and reads them one at a time.

A converter gives each split as `Images` of a `Source`. Those of files are `ImageFiles`, whatever the files are; a new
format needs a function that yields an `Image` for each of its images, and, where these are not plain ranges of bytes,
a function that reads one. Containers of files are sources themselves: directories, and tar archives, which `tarfile`
lists and which are read in place.

A listing yields a `PassedOver` for what it does not take for an image; `Images` counts and shows them, for all formats.
"""

import copy
import errno
import gzip
import hashlib
import io
import json
import os
import posixpath
import stat
import tarfile
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, Protocol, Self
from zipfile import BadZipFile

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.config.check import Extra
from dali_train.data.convert.image import MAX_ENCODED_BYTES, RawImage
from dali_train.data.dataset.manifest import SplitName, sets_text
from dali_train.data.dataset.packed_files import GZIP, how_packed
from dali_train.data.dataset.passed_over import HIDDEN, PassedOver, is_hidden, warn_passed_over
from dali_train.data.progress import SHORT_S, Progress
from dali_train.data.sampling.rng import shuffled
from dali_train.errors import DatasetError
from dali_train.files import open_regular, write_atomically

GROUPED = Extra[Callable[..., NDArray[np.bool_]]]("dali_train.extras.grouping:held_out_groups", "--group-by")
# What numpy and zipfile raise for arrays that are missing, or that a power failure or a bit that flipped has spoilt;
# RuntimeError is of a flag or a version in zip's headers that zipfile does not know.
UNREADABLE_ARRAYS = (OSError, ValueError, KeyError, EOFError, BadZipFile, RuntimeError)
_COLUMNS = {"name_ends": "Q", "offsets": "Q", "sizes": "I", "packed": "b", "file_numbers": "I"}  # and codes of `array`
_LISTED_AT_ONCE = 1000  # images between two updates of the bar
_HELD_OUT_STREAM = 0x4845_4C44_4F55_54  # apart from those that training draws from, whose keys are small numbers


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
    label_sets: Sequence[tuple[int, ...]] | None = None  # with several labels an image, what `labels` number
    num_bytes: int  # of all images together, as the source holds them
    passed_over: Counter[PassedOver]  # also logged as a warning
    _whole: "Images | None" = None  # of a part of a listing

    def __init__(self, source: Source, root: Path | str, *, kept: Path | None = None, **facts: object) -> None:
        """List a source, and warn of what is passed over in it.

        Args:
            root: the file or directory that holds it; image/filename of a record is relative to it.
            kept: the file of `keep`, from which the listing is taken if it is there; None: it is never kept.
            facts: further values that identify it.
        """
        self._source, self._root, self._kept = source, root, kept
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
            with np.load(path, allow_pickle=False) as arrays:
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
        """What a validation split has a fraction of each of, (N,): the classes. With several labels all images are of
        one stratum, since most sets of classes are those of a single image."""
        return self.labels if self.label_sets is None else np.zeros_like(self.labels)

    def number_sets(self, labels: NDArray[np.int32], label_sets: Sequence[tuple[int, ...]]) -> None:
        """Give the images several labels each: `labels` number `label_sets`, tuples of classes."""
        assert self._rows is None
        self.labels = labels
        self.label_sets = label_sets
        self._facts["label_sets_crc32c"] = f"{crc32c(sets_text(label_sets).encode()):08x}"

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
        self, images: Callable[[], Iterable[Image | PassedOver]], read: Callable[[Image], bytes] = read_range
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


_MAX_UNPACKED_BYTES = 2 << 30  # of a gzipped archive: the small datasets and the devkit are far below
_PIECE = 1 << 20  # of the zeros behind the last member


class FilesByName(dict[str, Image]):
    """The files of a container by their names without directories. Raises SourceError: no such file."""

    def __init__(self, container: "Container") -> None:
        super().__init__((PurePosixPath(file.name).name, file) for file in container.list())
        self._path = container.path

    def __missing__(self, name: str) -> Image:
        raise SourceError(
            f"{self._path}: {name} is missing: this is the wrong archive or directory, or it is incomplete"
        )


def open_container(path: Path) -> "Container":
    """Open a directory or an archive. Raises SourceError if it cannot be opened."""
    return Directory(path) if os.access(path, os.F_OK) and path.is_dir() else Archive(path)


class Directory:
    """The files below a directory, in the order of their names; links are followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def list(self) -> Iterator[Image]:
        """Yield the files. Raises SourceError: as `walk`."""
        return _images_only(self.walk())

    def walk(self, *, folders: bool = False) -> Iterator[Image | PassedOver]:
        """Yield the files, what is hidden, and if asked for the folders, whose names end in "/".

        Raises:
            SourceError: a directory within itself or that cannot be read, a dead link, or what is not a file.
        """
        for entry in self._below(str(self.path), "", ()):
            if folders or isinstance(entry, PassedOver) or not entry.name.endswith("/"):
                yield entry

    def _below(self, directory: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Image | PassedOver]:
        try:
            with os.scandir(directory) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            raise SourceError(
                f"{printable_name(directory)}: cannot be read ({error.strerror}): allow it, or move it"
            ) from None
        root, place = f"{self.path}/", prefix.partition("/")[0]
        for entry in ordered:
            if is_hidden(entry.name):
                yield PassedOver(place, HIDDEN)
                continue
            location = printable_name(entry.path)
            try:
                status = entry.stat()
            except FileNotFoundError:
                raise SourceError(f"{location}: a link to a file that does not exist: remove or mend it") from None
            except OSError as error:  # links that refer to each other, a disk that fails
                raise SourceError(f"{location}: cannot be read ({error.strerror}): remove or mend it") from None
            if stat.S_ISDIR(status.st_mode):
                identity = status.st_dev, status.st_ino
                if identity in above:
                    raise SourceError(f"{location}: a link to a directory that it lies in: remove it")
                yield Image(root, f"{prefix}{entry.name}/", 0, 0)
                yield from self._below(entry.path, f"{prefix}{entry.name}/", (*above, identity))
            elif stat.S_ISREG(status.st_mode):
                yield Image(root, prefix + entry.name, 0, status.st_size)
            else:
                raise SourceError(f"{location}: a device, FIFO or socket, or a link to one, not a file: remove it")

    def read(self, image: Image) -> bytes:
        """Raises SourceError: it is not as it was listed."""
        try:
            with open_regular(self.path / image.name) as file:  # it may have become a FIFO
                content = file.read()
        except FileNotFoundError:
            raise SourceError(f"{image.location}: vanished since it was listed") from None
        except OSError as error:
            raise SourceError(
                f"{image.location}: cannot be read ({error.strerror or error}): allow it, or restore it"
            ) from None
        return checked_length(content, image)


class Archive:
    """An open tar file, plain or gzipped."""

    def __init__(self, path: Path) -> None:
        """Raises SourceError: no such file, or none that has an end, or a damaged gzip."""
        self.path = path
        try:
            self._file: IO[bytes] = open_regular(path)
            self.is_gzipped = self._file.read(2) == GZIP
            if self.is_gzipped:
                self._file = _unpacked(path)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened ({error.strerror or error}): use another one") from error
        self._descriptor = self._file.fileno()

    def read(self, image: Image) -> bytes:
        """Raises SourceError: it is not as it was listed."""
        return checked_length(os.pread(self._descriptor, image.size, image.offset), image)

    def list(self, within: Image | None = None) -> Iterator[Image]:
        """Yield the files. Raises SourceError: as `walk`."""
        return _images_only(self.walk(within))

    def walk(self, within: Image | None = None, *, folders: bool = False) -> Iterator[Image | PassedOver]:
        """Yield the files of the archive, or of the archive that is its file `within`, in their order there, what is
        hidden (macOS's tar adds `._NAME` to each file NAME), and if asked for the folders, whose names end in "/".

        As after unpacking, a link to a file has that file's bytes, and of several members with one name the last
        counts; it has the place of the first, beside the other files of a WebDataset's sample.

        Raises:
            SourceError: not a tar, truncated, or a member that is neither file nor directory, or a link to something
                else than a file of the archive, with its name and offset.
        """
        members = self._members(within)
        latest: dict[int, int] = {}
        replaced: set[int] = set()
        for rows in members.with_one_name():
            latest[rows[0]] = rows[-1]
            replaced.update(rows[1:])
        for row, kind in enumerate(members.kinds):
            name = members.name(row)
            place = name.partition("/")[0] if "/" in name else ""
            if kind == _LABEL:
                yield PassedOver(place, "label of a tape")
            elif any(is_hidden(part) for part in name.split("/") if part not in (".", "..")):
                if kind != _FOLDER:
                    yield PassedOver(place, HIDDEN)
            elif kind == _FOLDER:
                if folders:
                    yield Image(str(self.path), name, members.offsets[row], 0)
            elif row in replaced:
                yield PassedOver(place, "replaced by a later member of the same name")
            else:
                last = latest.get(row, row)
                content = members.content_of(last)
                if content is None:
                    raise SourceError(
                        f"{self._location(within)}: at byte {members.offsets[last]}: member {printable_name(name)!r} "
                        f"is a link to {printable_name(members.targets[last])!r}, which is no file of the archive: "
                        "pack that file itself (tar --dereference --hard-dereference), or leave the link out"
                    )
                place_of = members.offsets[content], members.sizes[content]
                yield Image(str(self.path), name, *place_of, is_packed=self.is_gzipped)

    def _members(self, within: Image | None) -> "_Members":
        # Headers lie far apart: reading ahead of each would read the entire archive. Several archives within it may be
        # listed at the same time, by threads, while the archive is.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        size = os.fstat(self._descriptor).st_size
        begin, end = (within.offset, within.offset + within.size) if within else (0, size)
        position = begin
        headers: Any = _FileRange(self._descriptor, begin, end)
        members = _Members()
        try:
            tar = tarfile.TarFile(fileobj=headers, tarinfo=_Header, encoding="utf-8", errors="surrogateescape")
            while (entry := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # a kilobyte for each of ImageNet's 1.28 million
                members.append(entry, end)
                position = tar.offset
            self._check_end(position, end)
        except (SourceError, tarfile.TarError, ValueError, OverflowError) as error:
            problem = str(error)
            if not isinstance(error, SourceError):
                head = os.pread(self._descriptor, min(tarfile.BLOCKSIZE, end - begin), begin)
                packed = how_packed(within.name if within else self.path, head) if position == begin else None
                problem = packed or f"{error}: not a plain or gzipped tar, or damaged here"
            raise SourceError(f"{self._location(within)}: at byte {position}: {problem}") from error
        if within is None:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_NORMAL)
        return members

    def _location(self, within: Image | None) -> str:
        return f"{self.path} ({printable_name(within.name)} in it)" if within else str(self.path)

    def _check_end(self, position: int, end: int) -> None:
        """Check that the last member is followed by the end; `tarfile` also takes damage or a hole for an end.

        A real end is at least one block of zeros, with nothing but zeros up to the end of the file: some 10 kB of them,
        or megabytes where the records were made for tapes or parallel file systems.
        """
        follow = end - position
        if follow < tarfile.BLOCKSIZE:
            raise SourceError("the archive ends without its closing blocks: truncated, e.g. an unfinished download")
        while position < end:
            position = _next_data(self._descriptor, position, end)
            piece = os.pread(self._descriptor, min(_PIECE, end - position), position)
            if piece != bytes(len(piece)):
                raise SourceError(
                    f"the archive seems to end here, but {follow:,} bytes follow, which are not all zero: damaged, an "
                    "unfinished download, or two archives joined into one file (join them with `tar --concatenate`)"
                )
            position += _PIECE


_FILE, _FOLDER, _HARD_LINK, _SYMBOLIC_LINK, _LABEL = range(5)  # kinds of members
_KINDS = {
    **dict.fromkeys(tarfile.REGULAR_TYPES, _FILE),
    **dict.fromkeys((tarfile.DIRTYPE, b"D"), _FOLDER),  # D: of an incremental dump
    tarfile.LNKTYPE: _HARD_LINK,
    tarfile.SYMTYPE: _SYMBOLIC_LINK,
    b"V": _LABEL,  # as `tar --label` writes it
}
_SPECIAL = {
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a FIFO",
    b"M": "the rest of a file in another volume of the archive: join the volumes",
}


class _Header(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if buf[257:265] == b"ustar  \0":  # GNU's: `tar -g` writes times where `tarfile` looks for a name's beginning
            header.name = bytes(buf[:100]).partition(b"\0")[0].decode(encoding, errors)
        return header


class _Members:
    """The headers of an archive in their order, in columns: as Python objects a million would take a gigabyte."""

    def __init__(self) -> None:
        self.kinds = bytearray()
        self.offsets = array("Q")  # of the content, and of a link's header
        self.sizes = array("Q")
        self.targets: dict[int, str] = {}  # the names that links lead to, by their rows
        self._names, self._name_ends, self._hashes = bytearray(), array("Q", [0]), array("q")

    def append(self, entry: tarfile.TarInfo, end: int) -> None:
        """Add the member of an archive with this `end`. Raises SourceError: it ends beyond, or is of no use here."""
        shown = f"member {printable_name(entry.name)!r}"
        if entry.issparse():
            raise SourceError(f"{shown} is a sparse file, which is not read: pack it without `tar --sparse`")
        kind = _KINDS.get(entry.type)
        if kind is None:
            special = _SPECIAL.get(entry.type, f"of the unknown type {entry.type!r}")
            raise SourceError(f"{shown} is {special}: only files, and links to them, are read: leave it out")
        there = end - entry.offset_data
        if kind == _FILE and not 0 <= entry.size <= there:
            raise SourceError(f"{shown} has {entry.size} bytes, {there} are there: truncated")
        name = _clean(entry.name)
        if kind in (_HARD_LINK, _SYMBOLIC_LINK):
            self.targets[len(self.kinds)] = _target(entry)
        elif kind == _FOLDER:
            name = "./" if name == "." else f"{name}/"
        self.kinds.append(kind)
        self.offsets.append(entry.offset_data if kind == _FILE else entry.offset)
        self.sizes.append(entry.size if kind == _FILE else 0)
        self._names += name.encode(errors="surrogateescape")
        self._name_ends.append(len(self._names))
        self._hashes.append(hash(name))

    def name(self, row: int) -> str:
        return self._names[self._name_ends[row] : self._name_ends[row + 1]].decode(errors="surrogateescape")

    def with_one_name(self) -> Iterator[Sequence[int]]:
        """Yield the rows of each name that several have. Of a million names the hashes take a tenth of a second, where
        a set would take 100 MB."""
        hashes = np.array(self._hashes, dtype=np.int64)
        order = np.argsort(hashes)
        equal = np.flatnonzero(np.diff(hashes[order]) == 0)
        rows_of: dict[str, list[int]] = {}
        for row in np.union1d(order[equal], order[equal + 1]).tolist():
            rows_of.setdefault(self.name(row), []).append(row)
        yield from (rows for rows in rows_of.values() if len(rows) > 1)

    def content_of(self, row: int) -> int | None:
        """Return the row of the file whose bytes a file or a link has; None: the link leads to none of them."""
        seen: set[int] = set()
        while row in self.targets:
            seen.add(row)
            found = self._targeted.get(self.targets[row], [])
            if self.kinds[row] == _HARD_LINK:  # to what was unpacked before it, under its own name, too
                found = [other for other in found if other < row] or found
            if not found or found[-1] in seen:
                return None
            row = found[-1]
        return row

    @cached_property
    def _targeted(self) -> dict[str, list[int]]:
        """The rows of the files and links that links lead to, by name."""
        names, rows_of = {*self.targets.values()}, dict[str, list[int]]()
        for row in range(len(self.kinds)):
            if (name := self.name(row)) in names:
                rows_of.setdefault(name, []).append(row)
        return rows_of


def _clean(name: str) -> str:
    """Return a member's name below the directory where it is unpacked: without "./", "//" and a first "/"."""
    return posixpath.normpath(name).lstrip("/")


def _target(link: tarfile.TarInfo) -> str:
    """Return the name of the member that a link leads to, which may not be there."""
    if link.islnk():
        return _clean(link.linkname)
    if link.linkname.startswith("/") and not link.name.startswith("/"):
        return link.linkname  # out of the archive, whose names are relative
    return _clean(posixpath.join(posixpath.dirname(link.name), link.linkname))


def _next_data(descriptor: int, position: int, end: int) -> int:
    """Return where the next bytes are, from `position` on, that are no hole of the file; `end` if there are none."""
    try:
        return min(os.lseek(descriptor, position, os.SEEK_DATA), end)
    except OSError as error:
        return end if error.errno == errno.ENXIO else position  # a file system that does not know its holes


Container = Directory | Archive


def _images_only(walk: Iterable[Image | PassedOver]) -> Iterator[Image]:
    return (entry for entry in walk if isinstance(entry, Image))


class _FileRange:
    """The bytes from `begin` to `end` of a file, unbuffered, for `tarfile` to read headers from."""

    def __init__(self, descriptor: int, begin: int, end: int) -> None:
        self._descriptor, self._position, self._end = descriptor, begin, end

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, size: int) -> bytes:
        content = os.pread(self._descriptor, max(0, min(size, self._end - self._position)), self._position)
        self._position += len(content)
        return content


def _unpacked(path: Path) -> IO[bytes]:
    """Return the content of a gzipped file, in a temporary file that vanishes with the process."""
    unpacked: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  kept open as long as its archive
    total = 0
    try:
        with gzip.open(path) as packed:
            while chunk := packed.read(1 << 20):
                total += len(chunk)
                if total > _MAX_UNPACKED_BYTES:
                    raise SourceError(f"{path}: over {_MAX_UNPACKED_BYTES:,} bytes when unpacked: gunzip it first")
                unpacked.write(chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(f"{path}: damaged or truncated ({error}): fetch it again") from error
    return unpacked
