"""Directories and tar archives of image files; `tarfile` lists the latter, and they are read in place."""

import errno
import gzip
import os
import posixpath
import stat
import tarfile
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self

import numpy as np

from dali_train.data.convert.sources import Image, SourceError, checked_length, printable_name
from dali_train.data.dataset.packed_files import GZIP, how_joined, how_packed
from dali_train.data.dataset.passed_over import HIDDEN, PassedOver, is_hidden
from dali_train.data.progress import SHORT_S, Progress
from dali_train.files import open_regular

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


def folders_in(directory: Path) -> list[str]:
    """Return the names of the folders in a directory that are not hidden, sorted. Raises OSError: it cannot be read."""
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if not is_hidden(entry.name) and entry.is_dir())


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
        status = self.path.stat() if self.path.is_dir() else None
        for entry in self._below(str(self.path), "", () if status is None else ((status.st_dev, status.st_ino),)):
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
                    raise SourceError(self._circle(Path(entry.path)))
                yield Image(root, f"{prefix}{entry.name}/", 0, 0)
                yield from self._below(entry.path, f"{prefix}{entry.name}/", (*above, identity))
            elif stat.S_ISREG(status.st_mode):
                yield Image(root, prefix + entry.name, 0, status.st_size)
            else:
                raise SourceError(f"{location}: a device, FIFO or socket, or a link to one, not a file: remove it")

    def _circle(self, again: Path) -> str:
        """Return the message for a directory that was met on the way to it: the link to remove is above it, if it is
        not one itself."""
        for path in (again, *again.parents):
            if path == self.path:
                break
            if path.is_symlink():
                return f"{printable_name(str(path))}: a link to a directory that it lies in: remove it"
        return f"{printable_name(str(again))}: a directory that it lies in, mounted there once more: unmount it"

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
        members = self._whole if within is None else self._members(within)
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

    @cached_property
    def _whole(self) -> "_Members":
        """The archive's own members: class folders are listed more than once, and a million headers take minutes."""
        return self._members(None)

    def _members(self, within: Image | None) -> "_Members":
        # Headers lie far apart: reading ahead of each would read the entire archive. Several archives within it may be
        # listed at the same time, by threads, while the archive is.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        size = os.fstat(self._descriptor).st_size
        begin, end = (within.offset, within.offset + within.size) if within else (0, size)
        position = begin
        headers: Any = _FileRange(self._descriptor, begin, end)
        members = _Members()
        title = f"reading the headers of {printable_name(self.path.name)}"
        bar = Progress(title, total=end - begin, unit="B", delay_s=SHORT_S) if within is None else None
        try:
            with bar or nullcontext():
                tar = tarfile.TarFile(fileobj=headers, tarinfo=_Header, encoding="utf-8", errors="surrogateescape")
                while (entry := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # a kilobyte for each of ImageNet's 1.28 million
                    members.append(entry, end)
                    if bar is not None:
                        bar.update(tar.offset - position)
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
        reason = how_joined(path) or f"damaged or truncated ({error}): fetch it again"
        raise SourceError(f"{path}: {reason}") from error
    return unpacked
