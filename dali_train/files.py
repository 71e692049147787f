"""Atomic writes that survive a kill or a power failure, reading untrusted files, locks, and the checked-out commit."""

import errno
import fcntl
import hashlib
import os
import stat
import subprocess
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # an OSError's errno when a disk, a quota or a limit is full


def write_atomically(path: Path, content: bytes) -> None:
    """Write and flush a file completely, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        error.filename = str(path)  # the name that users know
        raise
    finally:
        partial.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make the renames in `directory` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the digest of a regular file. Raises OSError: as `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one: opening a FIFO would wait for a writer, and a device might never end.

    Raises:
        OSError: the file does not exist, cannot be opened, or is not a regular file.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return file


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises OSError: as `open_regular`, or it is larger than `max_bytes`."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EINVAL, f"is larger than {max_bytes:,} bytes", str(path))
    return content


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed or the process ends in any way; `shared` locks can be held together.

    Return False if another process holds the lock."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def git_commit(source: Path) -> str | None:
    """Return the commit that is checked out in a directory; None if it is not a checkout, or git is missing."""
    try:
        commit = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return commit.stdout.strip() or None
