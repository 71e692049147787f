"""Where image files lie: in a tar archive, read in place without unpacking anything, or in a directory.

The tar reader is written here rather than with `tarfile`, which keeps an object of over a kilobyte for each of
ImageNet's 1.28 million members, and because nothing in an archive is trusted: whatever is no plain file or directory
of a harmless name is refused. The format is POSIX ustar with the GNU and pax extensions for long names and large sizes
(https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html#tag_20_94_13).
"""

import gzip
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, Protocol

BLOCK = 512
_MAX_EXTENSION_BYTES = 1 << 20  # a long name or a pax header
_MAX_UNPACKED_BYTES = 2 << 30  # of a gzipped archive: the small datasets and the devkit are far below
_REGULAR, _DIRECTORY = (b"0", b"\0", b"7"), b"5"
_GNU_NAME, _GNU_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_REFUSED = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a FIFO", b"S": "a sparse file"}
_OTHER_COMPRESSIONS = {b"BZh": "bzip2", b"\xfd7z": "xz", b"PK\x03": "zip", b"\x28\xb5\x2f": "zstd"}


class SourceError(ValueError):
    """A source that is not what its command expects; the message names the file, the place and what to do."""


class Member(NamedTuple):
    """One file of a container."""

    name: str
    offset: int  # of its content, bytes from the beginning of the container's file; 0 in a directory
    size: int


class Container(Protocol):
    path: Path

    def members(self) -> Iterator[Member]: ...

    def read(self, member: Member) -> bytes:
        """From any thread. Raises SourceError: it is not there any more as it was listed."""
        ...

    def place(self, name: str) -> str:
        """How people find the member called `name`."""
        ...


class Directory:
    """The files below a directory, in the order of their names; hidden ones are passed over, links are followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def members(self) -> Iterator[Member]:
        yield from self._below(str(self.path), "")

    def _below(self, directory: str, prefix: str) -> Iterator[Member]:
        with os.scandir(directory) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from self._below(entry.path, f"{prefix}{entry.name}/")
            else:
                try:
                    yield Member(prefix + entry.name, 0, entry.stat().st_size)
                except FileNotFoundError:
                    raise SourceError(f"{entry.path}: a link to a file that does not exist: remove or mend it") from None

    def read(self, member: Member) -> bytes:
        try:
            content = (self.path / member.name).read_bytes()
        except FileNotFoundError:
            raise SourceError(f"{self.place(member.name)}: vanished while converting") from None
        if len(content) != member.size:
            raise SourceError(f"{self.place(member.name)}: has {len(content)} bytes, {member.size} when the conversion began")
        return content

    def place(self, name: str) -> str:
        return str(self.path / name)


class Archive:
    """An open tar file, plain or gzipped."""

    def __init__(self, path: Path) -> None:
        """Raises SourceError: no such file, or compressed in a way that cannot be read."""
        self.path = path
        try:
            self._file: IO[bytes] = path.open("rb")
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened ({error.strerror})") from error
        magic = self._file.read(3)
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
                    f"{self.place(member.name)}: at byte {member.offset}: {member.size} bytes expected, {len(content)} are there"
                )
            content += more
        return content

    def place(self, name: str) -> str:
        return f"{self.path}:{name}"

    def members(self, within: Member | None = None) -> Iterator[Member]:
        """Every file of the archive, or of the archive that is its member `within`, in the order they stand there.

        Raises:
            SourceError: not a tar, cut off, or a member that is not to be trusted, with its name and place.
        """
        # Headers lie far apart: reading ahead of each would read the whole archive.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        start, end = (within.offset, within.offset + within.size) if within else (0, self.size)
        position, long_name, long_size = start, None, None
        while True:
            if position + BLOCK > end:
                raise self._error(
                    position, within, "the archive ends without its closing blocks: cut off, e.g. an unfinished download"
                )
            block = os.pread(self._descriptor, BLOCK, position)
            if block.count(0) == BLOCK:
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_NORMAL)
                return
            if not _checksum_fits(block):
                raise self._error(position, within, "no tar header (its checksum does not fit): not a tar archive, or damaged here")
            kind, content = block[156:157], position + BLOCK
            try:
                size = long_size if long_size is not None else _number(block[124:136])
            except ValueError:
                raise self._error(position, within, f"a size of {block[124:136]!r}: damaged here") from None
            name = long_name if long_name is not None else _name(block)
            if not 0 <= size <= end - content:
                raise self._error(
                    position,
                    within,
                    f"member {name!r} has {size} bytes, the archive {max(0, end - content)} more: cut off or forged",
                )
            position = content + -(-size // BLOCK) * BLOCK
            if kind in (_GNU_NAME, _GNU_LINK, _PAX, _PAX_GLOBAL):
                if size > _MAX_EXTENSION_BYTES:
                    raise self._error(content - BLOCK, within, f"a name or header extension of {size} bytes: refused")
                extension = self.read(Member(name, content, size))
                if kind == _GNU_NAME:
                    long_name = _text(extension)
                elif kind == _PAX:
                    fields = _pax_fields(extension)
                    long_name = fields.get("path", long_name)
                    long_size = int(fields["size"]) if fields.get("size", "").isdigit() else long_size
                continue
            long_name = long_size = None
            if kind in _REFUSED or kind not in (*_REGULAR, _DIRECTORY):
                raise self._error(
                    content - BLOCK,
                    within,
                    f"member {name!r} is {_REFUSED.get(kind, f'of type {kind!r}')}: refused, only files are read",
                )
            parts = name.split("/")
            if name.startswith("/") or ".." in parts:
                raise self._error(content - BLOCK, within, f"member {name!r} points outside of the archive: refused")
            if kind != _DIRECTORY and not name.endswith("/"):
                yield Member(name.removeprefix("./"), content, size)

    def _error(self, position: int, within: Member | None, problem: str) -> SourceError:
        return SourceError(f"{self.path}{f' ({within.name} in it)' if within else ''}: at byte {position}: {problem}")


def _unpacked(path: Path) -> IO[bytes]:
    """The content of a gzipped file, in a temporary file that vanishes with the process."""
    unpacked: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  kept open as long as its archive
    total = 0
    try:
        with gzip.open(path) as packed:
            while chunk := packed.read(1 << 20):
                total += len(chunk)
                if total > _MAX_UNPACKED_BYTES:
                    raise SourceError(
                        f"{path}: over {_MAX_UNPACKED_BYTES:,} bytes when unpacked: gunzip it first, then it is read in place"
                    )
                unpacked.write(chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(f"{path}: damaged or cut off ({error}): fetch it again") from error
    unpacked.flush()
    return unpacked


def _checksum_fits(block: bytes) -> bool:
    """The header's sum counts its own eight bytes as spaces."""
    try:
        return sum(block) - sum(block[148:156]) + 8 * 0x20 == _number(block[148:156])
    except ValueError:
        return False


def _number(field: bytes) -> int:
    """Octal digits, or GNU's base 256 where the first bit is set. Raises ValueError: neither."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1  # the others are negative
    digits = field.strip(b" \0")
    return int(digits, 8) if digits else 0


def _name(block: bytes) -> str:
    name = _text(block[:100])
    # GNU's own variant of the format keeps other things where ustar has the prefix.
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")


def _pax_fields(content: bytes) -> dict[str, str]:
    """Lines "LENGTH KEY=VALUE", where LENGTH counts the whole line. What does not fit that is passed over."""
    fields, position = {}, 0
    while position < len(content):
        length, space, _ = content[position:].partition(b" ")
        if not space or not length.isdigit() or int(length) <= len(length):
            break
        line = content[position + len(length) + 1 : position + int(length)].rstrip(b"\n")
        key, _, value = line.partition(b"=")
        fields[key.decode(errors="replace")] = value.decode(errors="replace")
        position += int(length)
    return fields
