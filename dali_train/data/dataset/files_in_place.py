"""The files that an index in place reads: names below the source, sizes and times, and whether they are still the same.

A folder of images has as many files as images, so they are rows of an array, ``index/files.npy``, and not values of
``dataset.json``. The directories that were listed are rows, too: the time of a directory changes when a file is added
to it, removed from it or renamed in it, so that a thousand of them tell this of a million files.
"""

import errno
import hashlib
import logging
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.dataset.image_file import IMAGE_SUFFIXES
from dali_train.data.dataset.passed_over import is_hidden
from dali_train.data.progress import SHORT_S, Progress
from dali_train.errors import DatasetError
from dali_train.files import sha256
from dali_train.runtime.object_store import Bucket, StoredObject, is_remote, plain_etag
from dali_train.text import printable

_log = logging.getLogger("dali_train")

UNKNOWN_TIME = -1  # of an object whose ETag is not known: its store has none
_MOST_CHECKED = 20_000  # files whose sizes and times are compared at the start of a run, in 0.1 s on a local disk
_MOST_READ = 64  # of those with another time
_ROWS_AT_ONCE = 1 << 14  # of a table
_MISSING = "is missing, the index names it: restore it"


def is_table(dtype: np.dtype[Any]) -> bool:
    """Return whether a table of files has this type: ``name`` in as many bytes as the longest, ``num_bytes``, ``time``
    of change in ns, or of an object `time_of_etag`. The name of a directory ends in "/"."""
    return bool(dtype.names) and dtype["name"].kind == "S" and dtype == table_type(dtype["name"].itemsize)


def table_type(longest: int) -> np.dtype[Any]:
    return np.dtype([("name", f"S{longest}"), ("num_bytes", "<u8"), ("time", "<i8")])


def time_of_etag(etag: str | None) -> int:
    """Return what stands for an object's time of change: 63 bits of a digest of its ETag, which changes with it."""
    if etag is None:
        return UNKNOWN_TIME
    digest = hashlib.sha256(etag.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def make_table(source: str, names: Sequence[str], objects: Sequence[StoredObject] | None) -> NDArray[np.void]:
    """Return the table of files below a directory as they are now, or of `objects`, as they were listed.

    On a disk the directories follow, and before them what else lies there, so that it is not taken for new later.

    Raises:
        OSError: a file is missing.
    """
    if objects is not None:
        table = _table(names)
        table["num_bytes"] = [found.num_bytes for found in objects]
        table["time"] = [time_of_etag(found.etag) for found in objects]
        return table
    others, directories = SourceFiles(source, _table(names), len(names), "").surroundings()
    table = _table([*names, *others, *(f"{directory}/" for directory in directories)])
    with Progress("sizes and times", total=len(table), unit="files", delay_s=SHORT_S) as progress:
        for rows in _in_pieces(table):
            names_here = rows["name"].tolist()
            found = [os.stat(f"{source}/{os.fsdecode(name)}") for name in names_here]  # noqa: PTH116  a Path each is slow
            rows["num_bytes"] = [status.st_size for status in found]
            rows["time"] = [_modified_ns(status) for status in found]
            progress.update(len(rows))
    return table


def _modified_ns(status: os.stat_result) -> int:
    """Return when a file was modified; file systems hold dates, of wrong clocks, for which 64 bits are too few."""
    return min(status.st_mtime_ns, (1 << 63) - 1)


def _table(names: Sequence[str]) -> NDArray[np.void]:
    longest = max(len(os.fsencode(name)) for name in names)
    table = np.zeros(len(names), dtype=table_type(longest))
    table["time"] = UNKNOWN_TIME
    rest = iter(names)
    for rows in _in_pieces(table):
        rows["name"] = [os.fsencode(name) for name in islice(rest, len(rows))]
    return table


def _in_pieces(table: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield the rows in views of a few thousand: as Python's objects a million names take 100 MB."""
    for first in range(0, len(table), _ROWS_AT_ONCE):
        yield table[first : first + _ROWS_AT_ONCE]


class SourceFiles:
    """The files of a table.

    Args:
        source: the directory or the URL that they lie below.
        table: see `is_table`.
        num_files: how many rows are files.
        remedy: for messages.
        labels_from: see `InPlace`.
    """

    def __init__(
        self,
        source: str,
        table: NDArray[np.void],
        num_files: int,
        remedy: str,
        labels_from: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.source, self.remedy = source, remedy
        self._labels_from = labels_from
        self._table, self._num_files = table, num_files
        self.num_bytes: NDArray[np.uint64] = table["num_bytes"]

    def __len__(self) -> int:
        return self._num_files

    def name(self, number: int) -> str:
        """Return the name below the source; bytes that are not UTF-8 are surrogates."""
        return os.fsdecode(bytes(self._table["name"][number]))

    def path(self, number: int) -> str:
        return f"{self.source}/{self.name(number)}"

    def read(self, number: int, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` of a file on a disk. Raises DatasetError: it is missing or shorter."""
        descriptor = self._open(number)
        try:
            content = os.pread(descriptor, end - begin, begin)
            if len(content) == end - begin:
                return content
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        fault = f"has {size} bytes, the index has an image at byte {begin}: restore it"
        raise self._fault(self.path(number), fault)

    def _open(self, number: int) -> int:
        """Return a descriptor. Raises DatasetError: there is no such file, or it cannot be read. OSError: too many
        files are open."""
        try:
            descriptor = os.open(self.path(number), os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise self._fault(self.path(number), _MISSING) from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            fault = f"cannot be read ({error.strerror}): allow it, or restore it"
            raise self._fault(self.path(number), fault) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._fault(self.path(number), "is a FIFO, a device or a directory now: restore it")
        return descriptor

    def check_object(self, number: int, etag: str | None) -> None:
        """Raises DatasetError: an object was replaced since it was indexed, by one of the same size: what the index has
        of it beside the images, whose checksums are compared, may be wrong, such as their labels."""
        known = int(self._table["time"][number])
        if etag is not None and known not in (UNKNOWN_TIME, time_of_etag(plain_etag(etag))):
            fault = "has been replaced since it was indexed (its ETag is another): restore that version"
            raise self._fault(self.path(number), fault)

    def check_listing(self) -> None:
        """Compare all objects with a listing of the bucket. Raises DatasetError: one is missing or was replaced."""
        listing = Bucket(self.source).listing("")
        for number in range(len(self)):
            found = listing.get(self.name(number))
            if found is None:
                raise self._fault(self.path(number), _MISSING)
            if found.num_bytes != self.num_bytes[number]:
                raise self._fault(self.path(number), self._other_size(number, found.num_bytes))
            self.check_object(number, found.etag)

    def _other_size(self, number: int, num_bytes: int) -> str:
        return f"has {num_bytes} bytes, the index was made for {self.num_bytes[number]}: restore it"

    def _fault(self, path: str, what: str) -> DatasetError:
        return DatasetError(f"{printable(path)} {what}, or {self.remedy}")

    def check(self, rows: NDArray[np.void], checksums: NDArray[np.uint32]) -> None:
        """Compare names, sizes and times on a disk with the table.

        All directories are looked at, and up to 20,000 files. A file with another time may only have been copied: its
        images are compared with their checksums, up to a number of files. Whatever else has changed is found when it
        is read.

        Raises:
            DatasetError: a file is missing, was added, or has another size or content.
        """
        if is_remote(self.source):
            return
        self._check_labels()
        self._check_directories()
        newer = []
        for number in np.unique(np.linspace(0, len(self) - 1, min(len(self), _MOST_CHECKED)).astype(np.int64)).tolist():
            path = self.path(number)
            try:
                status = os.stat(path)  # noqa: PTH116  as above
            except (FileNotFoundError, NotADirectoryError):
                raise self._fault(path, _MISSING) from None
            except OSError as error:  # links that refer to each other, a directory that is closed to the user
                raise self._fault(path, f"cannot be read ({error.strerror}): restore it") from None
            if not stat.S_ISREG(status.st_mode):
                raise self._fault(path, "is a FIFO, a device or a directory now: restore it")
            if status.st_size != self.num_bytes[number]:
                raise self._fault(path, self._other_size(number, status.st_size))
            if _modified_ns(status) != self._table["time"][number]:
                newer.append(number)
        unsure = ""  # a newer file that has more in it than images
        for number in newer[:_MOST_READ]:
            images = np.flatnonzero(rows["shard"] == number)
            images = images[[0, -1][: len(images)]]  # of another split there may be none
            for row, expected in zip(rows[images].tolist(), checksums[images].tolist(), strict=True):
                offset, size = row[:2]
                if crc32c(self.read(number, offset, offset + size)) != expected:
                    raise self._fault(self.path(number), "has changed since it was indexed: restore it")
            if (rows["size"][images] < self.num_bytes[number]).any():
                unsure = unsure or self.path(number)
        if unsure:
            _log.warning(
                "%s has another time of change than when it was indexed: its images are compared with their checksums, "
                "its labels are not; unless it was only copied, %s",
                *(printable(unsure), self.remedy),
            )

    def _check_labels(self) -> None:
        """Compare the files that the labels were read from. One that is gone is no fault: the index has its labels."""
        for name, expected in self._labels_from.items():
            path = os.path.normpath(f"{self.source}/{name}")
            try:
                has_changed = sha256(Path(path)) != expected
            except OSError as error:
                text = "%s: the labels were read from it, and cannot be compared (%s)"
                _log.warning(text, printable(path), error.strerror)
                continue
            if has_changed:
                raise self._fault(path, "has changed since the labels were read from it: restore it")

    def _check_directories(self) -> None:
        rows = self._table[["name", "time"]][self._num_files :].tolist()
        directories = [row for row in rows if row[0].endswith(b"/")]  # the others are what else lies there
        title = f"comparing the names of files in {self.source}"
        with Progress(title, total=len(directories), unit="folders", delay_s=SHORT_S) as progress:
            for name, time in directories:
                self._check_directory(os.fsdecode(name.removesuffix(b"/")), time)
                progress.update(1)

    def _check_directory(self, name: str, time: int) -> None:
        """Compare the names in a directory of the table, unless its time is the same."""
        directory = str(PurePosixPath(self.source, name))
        try:
            if _modified_ns(Path(directory).stat()) == time:
                return
            known = self._leaves(self._rows_by_directory.get(name, ()))
            there = {*self._names_in(directory, known)}
        except OSError as error:
            fault = f"cannot be read ({error.strerror}), the index names it: restore it"
            raise self._fault(directory, fault) from None
        for names, what in ((there - known, "is not in the index: move it away"), (known - there, _MISSING)):
            if names:
                others = f" ({len(names) - 1} more like it there)" if len(names) > 1 else ""
                raise self._fault(f"{directory}/{min(names)}", f"{what}{others}")

    def surroundings(self) -> tuple[list[str], list[str]]:
        """Return what else a converter would list in the directories of the files of this table, and these directories,
        sorted; "." is the source. Raises OSError: a directory is missing."""
        inside = self._rows_by_directory
        directories = {".", *(str(path) for name in inside for path in (name, *PurePosixPath(name).parents))}
        others: list[str] = []
        with Progress("looking for other files", total=len(directories), unit="folders", delay_s=SHORT_S) as progress:
            for directory in sorted(directories):
                known = self._leaves(inside.get(directory, ()))
                names = {*self._names_in(f"{self.source}/{directory}", known)} - known
                prefix = "" if directory == "." else f"{directory}/"
                others += sorted({prefix + name for name in names} - directories)
                progress.update(1)
        return others, sorted(directories)

    @cached_property
    def _rows_by_directory(self) -> dict[str, NDArray[np.int64]]:
        """Return the rows of the files and directories in each directory; "." is the source."""
        numbers: dict[bytes, int] = {}
        parents = np.empty(len(self._table), dtype=np.int32)
        for rows, of_rows in zip(_in_pieces(self._table), _in_pieces(parents), strict=True):
            directories = [name.rstrip(b"/").rpartition(b"/")[0] for name in rows["name"].tolist()]
            of_rows[:] = [numbers.setdefault(directory, len(numbers)) for directory in directories]
        order = np.argsort(parents, kind="stable")
        ends = np.cumsum(np.bincount(parents, minlength=len(numbers)))
        rows_of = np.split(order, ends[:-1])
        return {os.fsdecode(directory) or ".": rows_of[number] for directory, number in numbers.items()}

    def _leaves(self, rows: Sequence[int] | NDArray[np.int64]) -> set[str]:
        """Return the names of these rows without their directories."""
        names = self._table["name"][np.asarray(rows, dtype=np.int64)].tolist()
        return {os.fsdecode(name.rstrip(b"/").rpartition(b"/")[2]) for name in names} - {"."}

    @cached_property
    def _suffixes(self) -> frozenset[str]:
        """Those of the files that the converter would list."""
        suffix = PurePosixPath(self.name(0)).suffix.lower()
        return IMAGE_SUFFIXES if suffix in IMAGE_SUFFIXES else frozenset({suffix})

    def _names_in(self, directory: str, known: Collection[str]) -> Iterator[str]:
        """Yield the names of files that the converter would list, and of directories that are `known` or have such."""
        with os.scandir(directory) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                if not entry.is_dir():
                    if os.path.splitext(entry.name)[1].lower() in self._suffixes:  # noqa: PTH122  as above
                        yield entry.name
                elif entry.name in known or any(self._names_in(entry.path, ())):
                    yield entry.name
