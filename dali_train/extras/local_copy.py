"""A copy of the dataset on a disk of each host, made once before training; of a mixture, of each that lies on a disk.

Each version of a dataset has its own directory, named by a hash of its ``dataset.json`` and index, so a changed source
is copied again while other runs can still read the old version. Files are renamed into place when they are complete and
flushed, dataset.json last, so an interrupted copy is resumed. A file whose size or time differs from the source's is
copied again. Copies are in a directory that only their user can open.

Processes coordinate through two locks (flock, which is released however its process ends). The first is held
exclusively while copying: one process of a host copies and the others, of this run or of another, wait. The second is
held shared while a version is in use, so that it is not removed. The launcher's local ranks would not do: locks also
work between runs, and with launchers whose local rank does not identify the host.
"""

import glob
import hashlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import torch.distributed as dist
from crc32c import crc32c

from dali_train.config import DataConfig
from dali_train.config.sections import is_url
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import SPLITS, Manifest, checksums_path, index_path, text_index_path
from dali_train.data.dataset.storage import DatasetLocation
from dali_train.data.dataset.write_index import map_shards
from dali_train.data.progress import Progress
from dali_train.errors import DatasetError, UserError
from dali_train.files import NO_SPACE, TIME_STEPS_NS, open_lock, private_directory, remove_written, try_lock
from dali_train.runtime.launch import Launch
from dali_train.runtime.process_group import first_fault, host_group

WAITING_LINE_S = 30.0
_NUM_STREAMS = 4  # a parallel file system gives one reader only part of its speed
_CHUNK_BYTES = 4 << 20
_DIGEST_LENGTH = 12
# In a copy, for `remove_written`.
_COPIED = r"dataset\.json|(train|validation|index|idx_files)/[^/]*|idx_files/(train|validation)/[^/]*"
_NO_LIMIT = timedelta(days=30)  # no timeout: other hosts wait however long a copy takes


@dataclass(frozen=True)
class Copy:
    """A copy, which is not removed while this object exists."""

    path: Path
    in_use: BinaryIO  # holds its lock


def copied(data: DataConfig, launch: Launch) -> DatasetLocation:
    """Return the copies that data.local_copy asks for. All ranks call this together.

    Raises:
        DatasetError: on all ranks, if any host fails to make its copies.
    """
    assert data.local_copy is not None
    group = host_group(launch, timeout=_NO_LIMIT)
    copies: dict[str, Copy] = {}
    failure = ""
    try:
        for root in (root for root in data.roots if not is_url(root)):
            copies[root] = make_copy(Path(root), Path(data.local_copy), verbose=launch.local_rank == 0)
    except (UserError, OSError) as error:
        failure = f"{error} (on {platform.node()})"
    failure, _ = first_fault(failure, group)
    if group is not None:
        dist.destroy_process_group(group)
    if failure:
        raise DatasetError(failure)
    places = {root: str(copy.path) for root, copy in copies.items()}
    copied_data = replace(data.moved(places), local_copy=None)
    return DatasetLocation(copied_data, tuple(copy.in_use for copy in copies.values()))


def make_copy(source: Path, directory: Path, *, verbose: bool) -> Copy:
    """Copy the dataset to a directory below `directory`, or wait for another process that does, or reuse a copy.

    Args:
        verbose: report on stderr when this process waits.

    Raises:
        ConfigError: as `private_directory`.
        DatasetError: `source` is not a complete dataset or changes while it is copied, or the disk is too small.
    """
    directory, source = private_directory("data.local_copy", directory), source.resolve()
    manifest = Manifest.read(source)
    if manifest.in_place is not None:
        raise DatasetError(
            f"data.local_copy is {directory.parent} with the dataset {source}, an index of what lies in "
            f"{manifest.in_place.source}: copy that directory and index the copy, or convert it"
        )
    family = f"{source.name}-{_digest(str(source).encode())}"
    indexes = [path for name in manifest.splits if (path := index_path(source, name)).exists()]
    content = [(source / "dataset.json").read_bytes(), *(repr(_size_and_time(path)).encode() for path in indexes)]
    root = directory / f"{family}-{_digest(*content)}"
    in_use = open_lock(_beside(root, "in-use"))
    while not try_lock(in_use, shared=True):  # another process looks whether it may remove this version
        time.sleep(0.05)
    with _alone(root, f"the copy of {source} to {root}" if verbose else None):
        for other in directory.glob(f"{glob.escape(family)}-{'[0-9a-f]' * _DIGEST_LENGTH}"):
            if other != root:
                _remove_unused(other)
        _copy(source, root, manifest)
    return Copy(root, in_use)


def _copy(source: Path, root: Path, manifest: Manifest) -> None:
    """Copy what is not in `root` as it is in `source`, dataset.json last."""
    checksums: dict[Path, str | None] = {}
    for name, split in manifest.splits.items():
        checksums |= {source / name / shard.name: shard.crc32c for shard in split.shards}
        text_indexes = (text_index_path(source, name, shard.name) for shard in split.shards)
        checksums |= dict.fromkeys([path for path in text_indexes if path.exists()])
        indexes = (index_path(source, name), checksums_path(source, name))
        checksums |= dict.fromkeys([path for path in indexes if path.exists()])
    files = [*checksums, source / "dataset.json"]
    needed = [path for path in files if not _is_copy(root / path.relative_to(source), path)]
    if not needed:
        return
    for name in SPLITS:
        if name in manifest.splits:
            Split(source, name)  # complete, and no shard newer than the index
    num_bytes = sum(path.stat().st_size for path in needed)
    _check_space(source, root.parent.parent, num_bytes)
    with Progress(f"copying {source} to {root}", total=num_bytes, unit="B") as progress:

        def copy(path: Path) -> None:
            _copy_file(path, root / path.relative_to(source), checksums.get(path), progress)

        try:
            for _ in map_shards([path for path in needed if path in checksums], copy, workers=_NUM_STREAMS):
                pass
            for path in needed:
                if path not in checksums:
                    copy(path)  # dataset.json: now it is a dataset
        except OSError as error:
            if error.errno in NO_SPACE:
                raise DatasetError(
                    f"data.local_copy {root.parent.parent} is full: something else was written there while {source} "
                    "was copied; free some space and start again, the copy continues"
                ) from error
            raise


def _copy_file(path: Path, target: Path, checksum: str | None, progress: Progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    buffer, crc = memoryview(bytearray(_CHUNK_BYTES)), 0
    with path.open("rb", buffering=0) as reading, partial.open("wb", buffering=0) as writing:
        stat = os.fstat(reading.fileno())
        while size := reading.readinto(buffer):
            crc = crc32c(buffer[:size], crc)
            written = 0
            while written < size:
                written += writing.write(buffer[written:size])
            progress.update(size)
        os.fsync(writing.fileno())
    if checksum is not None and f"{crc:08x}" != checksum:
        partial.unlink()
        raise DatasetError(
            f"{path} has checksum {crc:08x}, dataset.json says {checksum}: run `dali-train data verify` on the dataset"
        )
    os.utime(partial, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # an index must not be older than its shards
    partial.replace(target)


def _size_and_time(path: Path) -> tuple[int, int] | None:
    """Return a file's size and time of change in ns; None if it is missing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def _is_copy(path: Path, original: Path) -> bool:
    """Return whether a file has the size of another one, and its time as a file system keeps it, rounded down."""
    here, there = _size_and_time(path), _size_and_time(original)
    if here is None or there is None:
        return False
    return here[0] == there[0] and any(here[1] == there[1] // step * step for step in TIME_STEPS_NS)


def _check_space(source: Path, directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise DatasetError(
            f"data.local_copy {directory} has {free:,} bytes free, the copy of {source} needs {needed:,} more: free "
            f"{needed - free:,} bytes, use a larger disk, or leave data.local_copy out"
        )


def _remove_unused(root: Path) -> None:
    """Remove a version, unless a run is reading it. What has no such lock beside it is not a copy."""
    if _beside(root, "in-use").exists():
        with open_lock(_beside(root, "in-use")) as lock:
            if try_lock(lock):
                remove_written(root, _COPIED)


@contextmanager
def _alone(root: Path, what: str | None) -> Iterator[None]:
    """Hold the lock for making `root`; while waiting, say now and then that this process waits for `what`."""
    said = time.monotonic()
    with open_lock(_beside(root, "copying")) as lock:
        while not try_lock(lock):
            time.sleep(0.2)
            if what is not None and time.monotonic() - said > WAITING_LINE_S:
                said = time.monotonic()
                print(f"waiting for {what} by another process", file=sys.stderr, flush=True)
        yield


def _beside(root: Path, kind: str) -> Path:
    """Return a lock file next to the copy's directory, not inside it, because locks must outlive the directory."""
    return root.with_name(f".{root.name}.{kind}")


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:_DIGEST_LENGTH]
