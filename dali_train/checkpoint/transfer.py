"""Sending checkpoint files between hosts that do not share the run directory, so that rank 0's disk has all of them.

All ranks of a group call each of these functions together. If all of them see rank 0's disk, nothing is sent.
"""

import os
import shutil
import socket
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from dali_train.checkpoint.run_directory import MANIFEST
from dali_train.files import sha256
from dali_train.runtime.process_group import on_rank_0

_VISIBILITY_TIMEOUT_S = 5.0  # a network file system may show a new file to other hosts later
_CHUNK = 64 << 20  # bytes


def ranks_without_shared_disk(directory: Path, group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks that do not see what rank 0 writes into `directory`."""
    if group is None:
        return []
    probe = directory / f".probe-{on_rank_0(lambda: uuid.uuid4().hex, group)}"
    on_rank_0(probe.touch, group)
    end = time.monotonic() + _VISIBILITY_TIMEOUT_S
    while not probe.exists() and time.monotonic() < end:
        time.sleep(0.1)
    seen = [False] * dist.get_world_size(group)
    dist.all_gather_object(seen, probe.exists(), group=group)
    on_rank_0(probe.unlink, group)
    return [rank for rank, sees in enumerate(seen) if not sees]


def collect(
    directory: Path, names: Sequence[Collection[str]], apart: Sequence[int], group: dist.ProcessGroup | None
) -> None:
    """Move the files `names` (by rank) of the ranks `apart` from their `directory` to rank 0's."""
    for rank in apart:
        for name in sorted(names[rank]):
            _send(directory / name, source=rank, target=0, group=group)
        if dist.get_rank(group) == rank:
            for name in names[rank]:
                (directory / name).unlink()
            with suppress(OSError):  # another rank of this host still has files there
                directory.rmdir()


@contextmanager
def local_copy_of(path: Path, group: dist.ProcessGroup | None) -> Iterator[Path]:
    """Yield the directory of the checkpoint `path`, or of a temporary copy on hosts that do not see rank 0's."""
    if group is None:
        yield path
        return
    rank = dist.get_rank(group)
    views = [("", "")] * dist.get_world_size(group)  # where a rank looks, and the digest of what it sees there
    dist.all_gather_object(views, (f"{socket.gethostname()} {path.absolute()}", _digest(path)), group=group)
    wanted = views[0][1]
    fetching: dict[str, int] = {}  # one rank for each host
    for other, (directory, digest) in enumerate(views):
        if digest != wanted != "":
            fetching.setdefault(directory, other)
    if not fetching:
        yield path
        return
    copy = path.with_name(f".{path.name}.copy")
    names = on_rank_0(lambda: sorted(child.name for child in path.iterdir() if child.is_file()), group)
    fetches = rank in fetching.values()
    if fetches:
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True)
    try:
        for target in fetching.values():
            for name in names:
                _send(path / name, source=0, target=target, group=group, received=copy / name)
        dist.barrier(group)
        yield path if views[rank][1] == wanted else copy
    finally:
        if fetches:
            shutil.rmtree(copy, ignore_errors=True)


def _digest(path: Path) -> str:
    try:
        return sha256(path / MANIFEST)
    except OSError:
        return ""


def _send(
    path: Path, *, source: int, target: int, group: dist.ProcessGroup | None, received: Path | None = None
) -> None:
    """Send a file from rank `source` to `target`, where it is stored as `received`, by default under the same path.

    Other ranks do nothing."""
    rank = dist.get_rank(group)
    if rank == source:
        dist.send(torch.tensor([path.stat().st_size]), target, group=group)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                dist.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), target, group=group)
    elif rank == target:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=group)
        with (received or path).open("wb") as file:
            while left := int(size) - file.tell():
                part = torch.empty(min(left, _CHUNK), dtype=torch.uint8)
                dist.recv(part, source, group=group)
                file.write(part.numpy().data)
            file.flush()
            os.fsync(file.fileno())
