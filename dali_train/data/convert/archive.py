"""Where image files lie: in a tar archive, read in place without unpacking anything, or in a directory.

Python's `tarfile` finds the members, and nothing in an archive is trusted: what is not a plain file or directory with
a harmless name is refused, and so is an end that may not be the end.
"""

import gzip
import os
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

_MAX_EXTENSION_BYTES = 1 << 20  # a long name or a pax header
_MAX_UNPACKED_BYTES = 2 << 30  # of a gzipped archive: the small datasets and the devkit are far below
_MAX_PADDING = 128 << 10  # zeros behind the last member; tar itself pads to 10 kB
_REFUSED = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a FIFO",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}
_OTHER_COMPRESSIONS = {b"BZh": "bzip2", b"\xfd7z": "xz", b"PK\x03": "zip", b"\x28\xb5\x2f": "zstd"}


class SourceError(ValueError):
    """A source that is not what its command expects; the message names the file, the place and what to do."""


class Member(NamedTuple):
    """One file of a container. Bytes of its name that are not UTF-8 are surrogates, as everywhere in Python."""

    name: str
    offset: int  # of its content, bytes from the beginning of the container's file; 0 in a directory
    size: int


class Container(Protocol):
    path: Path

    def members(self) -> Iterator[Member]: ...

    def read(self, member: Member) -> bytes:
        """From any thread. Raises SourceError: it is no longer there as it was listed."""
        ...

    def place(self, name: str) -> str:
        """How people find the member called `name`."""
        ...


def printable(name: str) -> str:
    """A name of the file system as proper text: bytes that are not UTF-8 as \\xNN, so that two names stay two."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


class Directory:
    """The files below a directory, in the order of their names; hidden ones are passed over, links are followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def members(self) -> Iterator[Member]:
        """Raises SourceError: a directory within itself, a dead link, or what is not a file."""
        yield from self._below(str(self.path), "", ())

    def _below(self, directory: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Member]:
        with os.scandir(directory) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            if entry.name.startswith("."):
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:
                raise SourceError(
                    f"{printable(entry.path)}: a link to a file that does not exist: remove or mend it"
                ) from None
            if stat.S_ISDIR(status.st_mode):
                identity = status.st_dev, status.st_ino
                if identity in above:
                    raise SourceError(f"{printable(entry.path)}: a link to a directory that it lies in: remove it")
                yield from self._below(entry.path, f"{prefix}{entry.name}/", (*above, identity))
            elif stat.S_ISREG(status.st_mode):
                yield Member(prefix + entry.name, 0, status.st_size)
            else:
                raise SourceError(
                    f"{printable(entry.path)}: a device, FIFO or socket, or a link to one, not a file: remove it"
                )

    def read(self, member: Member) -> bytes:
        try:
            content = (self.path / member.name).read_bytes()
        except FileNotFoundError:
            raise SourceError(f"{self.place(member.name)}: vanished while converting") from None
        if len(content) != member.size:
            raise SourceError(
                f"{self.place(member.name)}: has {len(content)} bytes, {member.size} when the conversion began"
            )
        return content

    def place(self, name: str) -> str:
        return printable(str(self.path / name))


class _Window:
    """The part of a file that `tarfile` may see, as its file object: the headers of one archive, in reads of a useful
    size."""

    def __init__(self, descriptor: int, begin: int, end: int) -> None:
        self._descriptor, self._position, self._end = descriptor, begin, end

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_EXTENSION_BYTES:
            raise SourceError(f"a name or header extension of {size} bytes: refused")
        content = os.pread(self._descriptor, max(0, min(size, self._end - self._position)), self._position)
        self._position += len(content)
        return content


class Archive:
    """An open tar file, plain or gzipped."""

    def __init__(self, path: Path) -> None:
        """Raises SourceError: no such file, or compressed in a way that cannot be read."""
        self.path = path
        try:
            self._file: IO[bytes] = path.open("rb", buffering=0)
            magic = self._file.read(3)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened ({error.strerror})") from error
        if magic[:2] == b"\x1f\x8b":
            self._file = _unpacked(path)
        elif magic in _OTHER_COMPRESSIONS:
            raise SourceError(
                f"{path}: compressed with {_OTHER_COMPRESSIONS[magic]}; unpack it to a plain tar or a directory first"
            )
        self._descriptor = self._file.fileno()
        self.size = os.fstat(self._descriptor).st_size

    def read(self, member: Member) -> bytes:
        content = os.pread(self._descriptor, member.size, member.offset)
        while len(content) < member.size:  # a read may be interrupted
            more = os.pread(self._descriptor, member.size - len(content), member.offset + len(content))
            if not more:
                raise SourceError(
                    f"{self.place(member.name)}: at byte {member.offset}: {member.size} bytes expected, "
                    f"{len(content)} are there"
                )
            content += more
        return content

    def place(self, name: str) -> str:
        return printable(f"{self.path}:{name}")

    def members(self, within: Member | None = None) -> Iterator[Member]:
        """Every file of the archive, or of the archive that is its member `within`, in the order they stand there.

        Raises:
            SourceError: not a tar, cut off, or a member that is not to be trusted, with its name and place.
        """
        # Headers lie far apart: reading ahead of each would read the entire archive.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        position, end = (within.offset, within.offset + within.size) if within else (0, self.size)
        window: Any = _Window(self._descriptor, position, end)
        tar: tarfile.TarFile | None = None
        while True:
            try:
                if tar is None:  # reads the first header
                    tar = tarfile.TarFile(fileobj=window, encoding="utf-8", errors="surrogateescape")
                member = tar.next()
                if member is None:
                    break
                # tarfile would keep a kilobyte for each of ImageNet's 1.28 million members.
                tar.members.clear()  # type: ignore[attr-defined]
                self._check(member, end)
                if tar.offset <= position:
                    raise SourceError(
                        f"member {printable(member.name)!r} has a size that leads backwards: damaged or forged"
                    )
            except SourceError as error:
                raise self._error(position, within, str(error)) from None
            except tarfile.ReadError as error:
                if tar is None:
                    break  # no header at the very beginning: `_check_end` says what is there instead
                raise self._error(position, within, f"{error}: cut off or damaged here") from None
            except (
                tarfile.TarError,
                ValueError,
                OverflowError,
                ArithmeticError,
                LookupError,
                RecursionError,
                AttributeError,
            ) as error:
                raise self._error(position, within, f"no tar header ({error}): damaged here") from None
            position = tar.offset
            if member.isfile() and not member.name.endswith("/"):
                yield Member(member.name.removeprefix("./"), member.offset_data, member.size)
        self._check_end(position, end, within)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_NORMAL)

    def _check(self, member: tarfile.TarInfo, end: int) -> None:
        name = printable(member.name)
        if member.issparse() or not (member.isfile() or member.isdir()):
            kind = "a sparse file" if member.issparse() else _REFUSED.get(member.type, f"of type {member.type!r}")
            raise SourceError(f"member {name!r} is {kind}: refused, only files are read")
        there = end - member.offset_data
        if not 0 <= member.size <= there:
            raise SourceError(
                f"member {name!r} has {member.size} bytes, the archive {max(0, there)} more: cut off or forged"
            )
        if name.startswith("/") or ".." in name.split("/"):
            raise SourceError(f"member {name!r} points outside of the archive: refused")

    def _check_end(self, position: int, end: int, within: Member | None) -> None:
        """tarfile takes whatever is no header for the end: a hole of zeros, damage, or the end of an archive put before
        another.

        A real end is at least one block of zeros, and nothing but a little padding of them up to the end of the file.
        """
        rest = os.pread(self._descriptor, min(end - position, _MAX_PADDING + 1), position)
        if len(rest) < tarfile.BLOCKSIZE:
            problem = "the archive ends without its closing blocks: cut off, e.g. an unfinished download"
        elif rest[: tarfile.BLOCKSIZE].strip(b"\0"):
            problem = "no tar header (its checksum does not fit): not a tar archive, or damaged here"
        elif rest.strip(b"\0"):
            problem = (
                f"the archive seems to end here, but {end - position:,} bytes follow, not all of them zeros: a hole "
                "of an unfinished download, or two archives joined into one file (join them with `tar "
                "--concatenate`)"
            )
        elif len(rest) > _MAX_PADDING:
            problem = f"{end - position:,} bytes of zeros follow: probably an unfinished download, fetch it again"
        else:
            return
        raise self._error(position, within, problem)

    def _error(self, position: int, within: Member | None, problem: str) -> SourceError:
        return SourceError(
            f"{self.path}{f' ({printable(within.name)} in it)' if within else ''}: at byte {position}: {problem}"
        )


def _unpacked(path: Path) -> IO[bytes]:
    """The content of a gzipped file, in a temporary file that vanishes with the process."""
    unpacked: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  kept open as long as its archive
    total = 0
    try:
        with gzip.open(path) as packed:
            while chunk := packed.read(1 << 20):
                total += len(chunk)
                if total > _MAX_UNPACKED_BYTES:
                    raise SourceError(
                        f"{path}: over {_MAX_UNPACKED_BYTES:,} bytes when unpacked: gunzip it first, then it is read "
                        "in place"
                    )
                unpacked.write(chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(f"{path}: damaged or cut off ({error}): fetch it again") from error
    return unpacked
