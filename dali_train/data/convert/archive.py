"""Containers of files, each a source: directories, and tar archives, listed by `tarfile` and read in place."""

import gzip
import os
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dali_train.data.convert.sources import Image, SourceError, checked_length, printable

_MAX_UNPACKED_BYTES = 2 << 30  # of a gzipped archive: the small datasets and the devkit are far below
_MAX_PADDING = 128 << 10  # zeros behind the last member; tar itself pads to 10 kB


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
    """The files below a directory, in the order of their names; hidden ones are skipped, links are followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def list(self, *, folders: bool = False) -> Iterator[Image]:
        """Yield the files, and if asked for the folders, whose names end in "/".

        Raises:
            SourceError: a directory within itself or that cannot be read, a dead link, or what is not a file.
        """
        root = f"{self.path}/"
        for name, size in self._below(str(self.path), "", ()):
            if folders or not name.endswith("/"):
                yield Image(root, name, 0, size)

    def _below(self, directory: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int]]:
        try:
            with os.scandir(directory) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name)
        except PermissionError:
            raise SourceError(
                f"{printable(directory)}: cannot be read (Permission denied): allow it, or move it"
            ) from None
        for entry in ordered:
            if entry.name.startswith("."):
                continue
            location = printable(entry.path)
            try:
                status = entry.stat()
            except FileNotFoundError:
                raise SourceError(f"{location}: a link to a file that does not exist: remove or mend it") from None
            if stat.S_ISDIR(status.st_mode):
                identity = status.st_dev, status.st_ino
                if identity in above:
                    raise SourceError(f"{location}: a link to a directory that it lies in: remove it")
                yield f"{prefix}{entry.name}/", 0
                yield from self._below(entry.path, f"{prefix}{entry.name}/", (*above, identity))
            elif stat.S_ISREG(status.st_mode):
                yield prefix + entry.name, status.st_size
            else:
                raise SourceError(f"{location}: a device, FIFO or socket, or a link to one, not a file: remove it")

    def read(self, image: Image) -> bytes:
        """Raises SourceError: it is not as it was listed."""
        try:
            content = (self.path / image.name).read_bytes()
        except FileNotFoundError:
            raise SourceError(f"{image.location}: vanished while converting") from None
        except PermissionError:
            raise SourceError(f"{image.location}: cannot be read (Permission denied): allow it") from None
        return checked_length(content, image)


class Archive:
    """An open tar file, plain or gzipped."""

    def __init__(self, path: Path) -> None:
        """Raises SourceError: no such file, or a damaged gzip."""
        self.path = path
        try:
            self._file: IO[bytes] = path.open("rb", buffering=0)
            self.is_gzipped = self._file.read(2) == b"\x1f\x8b"
            if self.is_gzipped:
                self._file = _unpacked(path)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened ({error.strerror or error})") from error
        self._descriptor = self._file.fileno()

    def read(self, image: Image) -> bytes:
        """Raises SourceError: it is not as it was listed."""
        return checked_length(os.pread(self._descriptor, image.size, image.offset), image)

    def list(self, within: Image | None = None, *, folders: bool = False) -> Iterator[Image]:
        """Yield the files of the archive, or of the archive that is its file `within`, in their order there; if asked
        for, the folders as well, whose names end in "/".

        Raises:
            SourceError: not a tar, truncated, or a member that is neither file nor directory, with its name and offset.
        """
        # Headers lie far apart: reading ahead of each would read the entire archive.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        size = os.fstat(self._descriptor).st_size
        position, end = (within.offset, within.offset + within.size) if within else (0, size)
        file = str(self.path)
        headers: Any = _Part(self._descriptor, position, end)
        try:
            tar = tarfile.TarFile(fileobj=headers, encoding="utf-8", errors="surrogateescape")
            while (entry := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # a kilobyte for each of ImageNet's 1.28 million
                there = end - entry.offset_data
                if entry.issparse() or not (entry.isreg() or entry.isdir()):
                    raise SourceError(
                        f"member {printable(entry.name)!r} is a link or a special file: only files are read"
                    )
                if not 0 <= entry.size <= there:
                    raise SourceError(
                        f"member {printable(entry.name)!r} has {entry.size} bytes, {there} are there: truncated"
                    )
                position = tar.offset
                name = entry.name.removeprefix("./")
                if entry.isdir():  # tarfile has removed the slash
                    name = f"{name.rstrip('/')}/"
                if folders or not name.endswith("/"):
                    yield Image(file, name, entry.offset_data, entry.size)
            self._check_end(position, end)
        except (SourceError, tarfile.TarError, ValueError, OverflowError) as error:
            inner = f" ({printable(within.name)} in it)" if within else ""
            hint = "" if isinstance(error, SourceError) else ": not a plain or gzipped tar, or damaged here"
            raise SourceError(f"{self.path}{inner}: at byte {position}: {error}{hint}") from error
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_NORMAL)

    def _check_end(self, position: int, end: int) -> None:
        """Check that the last member is followed by the end; `tarfile` also takes damage or a hole for an end.

        A real end is at least one block of zeros, with only a little zero padding up to the end of the file.
        """
        rest = os.pread(self._descriptor, min(end - position, _MAX_PADDING + 1), position)
        if len(rest) < tarfile.BLOCKSIZE:
            raise SourceError("the archive ends without its closing blocks: truncated, e.g. an unfinished download")
        if rest.strip(b"\0") or len(rest) > _MAX_PADDING:
            raise SourceError(
                f"the archive seems to end here, but {end - position:,} bytes follow: damaged, an unfinished download, "
                "or two archives joined into one file (join them with `tar --concatenate`)"
            )


Container = Directory | Archive


class _Part:
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
