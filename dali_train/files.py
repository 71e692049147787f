"""Atomic writes that survive a kill or a power failure, reading untrusted files, locks, directories of one user and
temporary ones, and the checked-out commit."""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

from dali_train.errors import ConfigError, UserError
from dali_train.text import shortened

T = TypeVar("T")
_log = logging.getLogger("dali_train")

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # an OSError's errno when a disk, a quota or a limit is full

# An OSError's errno where a file system lacks what others have. docs/operating.md says what happens then.
_NOT_SUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
NO_SYMLINKS = (*_NOT_SUPPORTED, errno.EPERM)  # exFAT and FAT, Google Drive in Colab, buckets that are mounted
NO_DIRECTORY_FSYNC = _NOT_SUPPORTED  # SMB, 9p
NO_FLOCK = (*_NOT_SUPPORTED, errno.ENOLCK)  # Lustre mounted without flock, NFS without lockd
NO_SHARED_MAP = (*_NOT_SUPPORTED, errno.ENODEV)  # FUSE with direct_io, 9p without a cache
# How exactly the time of a change is kept: ext4 and XFS, NTFS and SMB, some FUSE, exFAT, ext3, FAT.
TIME_STEPS_NS = (1, 100, 1_000, 10_000_000, 1_000_000_000, 2_000_000_000)


def write_atomically(path: Path, *contents: bytes | memoryview) -> None:
    """Write and flush a file, of `contents` one after the other, completely, or not at all; into a device or a pipe,
    such as /dev/stdout, as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # /dev/stdout is a link, which may lead to a file.
    is_stream = path.is_symlink() and path.is_relative_to("/dev") and not path.is_relative_to("/dev/shm")
    if is_stream or (path.exists() and not path.is_file() and not path.is_dir()):
        with path.open("wb") as file:
            file.writelines(contents)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(contents)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        error.filename = str(path)  # the name that users know
        if partial.exists() and error.errno in (errno.EEXIST, *_NOT_SUPPORTED):
            error.strerror = f"{error.strerror}: its file system cannot replace a file by a rename, use another one"
        raise
    finally:
        partial.unlink(missing_ok=True)


def remove_partial_files(directory: Path, *, depth: int) -> None:
    """Remove what a kill left of `write_atomically` in a directory and the levels of directories below it, while no
    other process writes there."""
    for path in [*directory.iterdir()]:
        if path.is_symlink():
            continue
        if path.is_dir() and depth:
            remove_partial_files(path, depth=depth - 1)
        elif re.fullmatch(r"\..+\.\d+\.partial", path.name) and path.is_file():
            path.unlink()


def rename_to_free(path: Path, names: Iterable[str]) -> Path:
    """Rename `path` to the first of `names`, beside it, that nothing has, and return that. Links are not followed."""
    free = next(name for name in map(path.with_name, names) if not os.path.lexists(name))
    return path.rename(free)


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it, as far as possible; log a warning if something stays.

    A file that a process has open, this one or another, is not removed by NFS and FUSE but renamed (`is_still_open`),
    and its directory cannot be removed. Whoever removes something calls this again at the next start.
    """
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        _log.warning("%s cannot be removed yet: a file in it is open, or protected; the next start tries again", path)


def is_still_open(name: str) -> bool:
    """Return whether this is the name that NFS or FUSE gives to a file that was removed, or replaced, while it was
    open. It goes when the file is closed."""
    return re.fullmatch(r"\.(nfs|fuse_hidden)[0-9a-fA-F]+", name) is not None


def sync_directory(directory: Path) -> None:
    """Make the renames in `directory` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _sync_directory(descriptor)
    except OSError as error:
        error.filename = str(directory)
        raise
    finally:
        os.close(descriptor)


def _sync_directory(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_DIRECTORY_FSYNC:  # where this is missing, renames are as safe as the server makes them
            raise


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


_MAX_LIST_BYTES = 1 << 28  # a million names of 255 bytes


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 text, without space around them. A byte order mark is no part of it.

    Raises:
        OSError: the file, or the pipe, cannot be read, or is no list of names by its size.
        UnicodeDecodeError: it is not UTF-8.
    """
    with path.open("rb") as file:  # may be a pipe of the shell's: <(ls DIR)
        content = file.read(_MAX_LIST_BYTES + 1)
    if len(content) > _MAX_LIST_BYTES:
        raise OSError(errno.EINVAL, f"is larger than {_MAX_LIST_BYTES:,} bytes", str(path))
    return [line.strip() for line in content.decode("utf-8-sig").splitlines()]


class ForeignFileError(UserError, ValueError):
    """A file that is not what it should be. The message names the file and what is wrong; callers add the remedy."""


_MAX_DEPTH = 32  # of objects and arrays in each other: whatever walks them later needs no stack beyond that
_MAX_CONTAINERS = 2_000_000  # of about 100 bytes each; a dataset of 100,000 shards has one for each


def read_json(source: Path | bytes, max_bytes: int, *, name: object = None, non_finite: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file, or in bytes, that others may have written.

    Numbers fit in a float, integers in 64 bits. Objects and arrays are nested at most `_MAX_DEPTH` deep. All text can
    be written as UTF-8.

    Args:
        name: of the file, in messages, if `source` is not its path.
        non_finite: allow the NaN and Infinity that Python writes.

    Raises:
        FileNotFoundError: there is no such file.
        ForeignFileError: it cannot be read, is not a regular file or larger than `max_bytes`, or holds anything else.
    """
    name = source if isinstance(source, Path) else name
    if isinstance(source, Path):
        try:
            content = read_limited(source, max_bytes)
        except FileNotFoundError:
            raise
        except OSError as error:
            what = f"cannot be read: {error.strerror}" if error.errno != errno.EINVAL else error.strerror
            raise ForeignFileError(f"{name} {what}") from error
    else:
        content = source
    try:
        if len(content) > max_bytes:
            raise ValueError(f"larger than {max_bytes:,} bytes")
        if content.count(b"[") + content.count(b"{") > _MAX_CONTAINERS:
            raise ValueError(f"more than {_MAX_CONTAINERS:,} objects and arrays")
        values = (_ANY_NUMBER if non_finite else _FINITE).decode(content.decode())
        if not isinstance(values, dict):
            raise ValueError(f"{_JSON_NAMES[type(values)]} instead of an object")
        _check_depth(values)
        if re.search(rb"\\u[dD][89a-fA-F]", content):  # surrogates: a pair is a character, one alone is no text
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeError:
        raise ForeignFileError(f"{name} is not valid JSON: not UTF-8") from None
    except RecursionError:
        raise ForeignFileError(f"{name} is not valid JSON: nested more than {_MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise ForeignFileError(f"{name} is not valid JSON: {error}") from None
    return values


def json_field(values: dict[str, Any], name: str, kind: type[T]) -> T:
    """Return the value `name` of an object from `read_json`.

    Raises:
        ForeignFileError: it is missing, or of another type than `kind`; ints are accepted as floats, bools are not.
    """
    if name not in values:
        raise ForeignFileError(f"{name} is missing")
    value = values[name]
    if type(value) is int and kind is float:
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ForeignFileError(f"{name} is {_JSON_NAMES[type(value)]} instead of {_JSON_NAMES[kind]}")
    return value


_JSON_NAMES: dict[type, str] = {
    **{dict: "an object", list: "an array", str: "text", int: "a whole number", float: "a number"},
    **{bool: "true or false", type(None): "null"},
}


def _check_depth(values: dict[str, Any]) -> None:
    level: list[Any] = [values]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise RecursionError


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # 1e999
        raise ValueError(f"the number {text[:40]}")
    return value


def _whole_number(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (value := int(text)) < 1 << 64:
        raise ValueError(f"the number {text[:40]}{'...' if len(text) > 40 else ''}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shortened(repr(twice), 100)} appears twice")
    return values


_ANY_NUMBER = json.JSONDecoder(parse_int=_whole_number, object_pairs_hook=_unique)
_FINITE = json.JSONDecoder(
    parse_float=_finite_float, parse_int=_whole_number, parse_constant=_finite_float, object_pairs_hook=_unique
)


def open_lock(path: Path) -> BinaryIO:
    """Open a lock file, made if it is missing. Raises OSError: it cannot be, or is not a regular file."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644), "r+b", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return file


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed or the process ends in any way; `shared` locks can be held together.

    Return False if another process holds the lock.

    Raises:
        NoLocksError: the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        error.filename = os.readlink(f"/proc/self/fd/{file.fileno()}")  # noqa: PTH115
        if error.errno in NO_FLOCK:
            raise NoLocksError(error.filename, str(error.strerror)) from None
        raise
    return True


class NoLocksError(ConfigError):
    """A file system without locks, where a lock is needed."""

    def __init__(self, path: str, reason: str) -> None:
        self.fault = f"{path}: its file system has no locks (flock: {reason})"
        super().__init__(f"{self.fault}: use a directory on a disk of this machine, or mount it with flock")


_TEMPORARY, _IN_USE = "dali-train-", ".in-use"
_SEMAPHORES = Path("/dev/shm")


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Yield a new directory in TMPDIR, which is removed at the end.

    What was left there by processes that have been killed is removed first, with the semaphores that begin with the
    name of the directory's parent. A lock, which dies with its process, tells them from those in use. Where the file
    system has no locks, nothing is removed.
    """
    parent = Path(tempfile.gettempdir())
    with suppress(OSError):
        for path in parent.glob(f"{_TEMPORARY}*"):
            _remove_abandoned(path)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=parent, ignore_cleanup_errors=True) as name:
        in_use, locking = Path(name, _IN_USE), Path(name, f"{_IN_USE}.partial")
        with locking.open("wb") as lock:
            with suppress(NoLocksError):
                try_lock(lock)
                locking.rename(in_use)  # never there without its lock
            directory = Path(name, "files")
            directory.mkdir()
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)
                # The semaphores may be in use until this process ends: a process that starts now must not remove them.
                with suppress(OSError):
                    in_use.rename(locking)


def _remove_abandoned(path: Path) -> None:
    """Remove a directory of `temporary_directory` if its process is dead."""
    with suppress(OSError, NoLocksError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return
        with open_regular(path / _IN_USE) as lock:
            # A process that has ended meanwhile has renamed this file: its semaphores live a moment longer.
            if not try_lock(lock) or not os.path.samestat(os.fstat(lock.fileno()), (path / _IN_USE).lstat()):
                return
            for semaphore in _SEMAPHORES.glob(f"sem.{path.name}-*"):
                semaphore.unlink()
            shutil.rmtree(path / "files", ignore_errors=True)  # first: a kill in between leaves what tells its state
        shutil.rmtree(path)


def private_directory(setting: str, parent: Path) -> Path:
    """Return the directory ``user-UID`` below `parent`, which nobody else can open, and make it if it is missing.

    Args:
        setting: the name of the setting whose value `parent` is.

    Raises:
        ConfigError: it cannot be made, is a link, or belongs to another user.
    """
    directory = parent / f"user-{os.getuid()}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ConfigError(
                f"{directory} is a link or belongs to another user, so it is not trusted: set {setting} to another "
                "directory"
            )
        directory.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"{setting} {parent} is not writable on {platform.node()} ({error.strerror}): use a directory of your own, "
            "or one that every user may write to, like /tmp"
        ) from error
    return directory


def remove_written(root: Path, names: str) -> None:
    """Remove the regular files below `root` whose relative paths match the pattern `names`, and the directories that
    match with a ``/`` at the end and are empty then. Everything else stays; no link is followed.

    The files in `root` itself, by which a later call may know it, are removed last: not if a directory below it cannot
    be listed, and when what is gone below it stays so after a power failure."""
    unlisted: list[OSError] = []
    with suppress(OSError):  # it is gone, or is not to be removed: the caller can do without
        for directory, folders, files, descriptor in os.fwalk(root, topdown=False, onerror=unlisted.append):
            if unlisted and directory == str(root):
                return
            relative = os.path.relpath(directory, root)
            prefix = "" if relative == "." else f"{relative}/"
            for name in files:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and re.fullmatch(names, prefix + name):
                    os.unlink(name, dir_fd=descriptor)
            _sync_directory(descriptor)
            for name in folders:
                if re.fullmatch(names, f"{prefix}{name}/"):
                    with suppress(OSError):  # a link, or not empty
                        os.rmdir(name, dir_fd=descriptor)
        root.rmdir()


def git_commit(source: Path) -> str | None:
    """Return the commit that is checked out in a directory; None if it is not a checkout, or git is missing."""
    try:
        commit = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return commit.stdout.strip() or None
