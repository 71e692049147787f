"""A cache of images from an object store on a disk of this node, shared by its ranks.

Each image is one file, verified by its checksum in the index. There is no other state, so a process may be killed at
any moment, and damaged files are fetched again. A disk that fails ends nothing: training goes on without the cache.
Nothing is removed but regular files in directories that carry the cache's mark, and links are not followed.

One process of the node, which holds the lock, evicts the images needed furthest in the future (`NextUse`). It needs no
messages from the other ranks: what they have fetched follows from the order.

When the node needs each image next is known in advance, because the order of all epochs is a pure function of the seed.
A cache that always evicts the image needed furthest in the future (L. A. Belady, IBM Systems Journal 5(2), 1966) has
the highest possible hit rate. The prefetching of N. Dryden et al., "Clairvoyant prefetching for distributed machine
learning I/O" (SC 2021, arXiv:2101.08734) uses the same knowledge.
"""

import errno
import gc
import logging
import os
import platform
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, singledispatch
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch.distributed as dist
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.config import DataConfig, SampleConfig
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import Manifest
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.data.sampling.order import SampleOrder
from dali_train.errors import ConfigError, DatasetError
from dali_train.files import NO_SPACE, open_lock, private_directory, remove_written, try_lock
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch
from dali_train.runtime.process_group import first_fault, host_group

logger = logging.getLogger("dali_train")

_FILES_PER_DIRECTORY = 1 << 12
_MARK = ".dali-train-cache"  # a file in each directory that a cache has made
_OWN_FILES = rf"\d+/\d*|{re.escape(_MARK)}"  # in such a directory, for `remove_written`
_BLOCK_BYTES = 1 << 12  # a file takes whole blocks of the disk
_RESERVE = 0.05  # fraction of the disk that stays free
_LEAST_FILLED = 0.98  # a round of eviction leaves at least this fraction of the capacity
# Wait between two rounds: at least so long, and so many times as long as choosing took (5 % of a core).
_LEAST_WAIT_S = 0.02
_WAIT_RATIO = 20.0
_WAIT_S = 10.0  # for the previous user of the directory, which may be about to end


@dataclass(frozen=True, kw_only=True)
class Node:
    """This process's view of the cache of its node."""

    directory: Path  # data.cache
    limit: int | None  # bytes; None: the free space of the disk
    dp_size: int
    coordinates: frozenset[int]  # data-parallel, of the ranks on this node that read images
    lock: BinaryIO | None  # held by the process that evicts images

    def cache(self, split: Split) -> "ImageCache | None":
        """Return the cache of `split`; None if it lies on a disk. `Eviction` removes training images. The validation
        split is read in the same order every time, so each rank keeps its first images and evicts nothing."""
        if split.name == "train":
            return cache_of(split, self.directory)
        if split.is_on_disk:
            return None
        limit = self.limit
        if limit is None:
            try:
                limit = shutil.disk_usage(self.directory).free
            except OSError:  # `ImageCache` says so
                limit = 0
        return ImageCache(self.directory, split, budget=int(limit * _share(split)) // len(self.coordinates))

    def most_ahead(self, split: Split) -> int:
        """Return how many images of `split` each rank may read ahead: half of the cache, so that what waits there is
        not evicted, nor exceeds the limit."""
        cache = None if self.limit is None else self.cache(split)
        if self.limit is None or cache is None:
            return split.num_images
        return int(self.limit * _share(split) / 2 / cache.file_sizes.mean()) // len(self.coordinates)

    def eviction(self, split: Split, config: SampleConfig, *, start_step: int, num_ahead: int) -> "Eviction | None":
        """Return the eviction of the training split's cache; None if another process evicts, or there is none.

        Args:
            num_ahead: how many micro-batches before its use an image may be fetched.
        """
        cache = None if self.lock is None else self.cache(split)
        if cache is None:
            return None
        next_use = NextUse(
            config,
            split.order(config),  # not shared with training, which is in other epochs
            dp_size=self.dp_size,
            coordinates=self.coordinates,
            start_step=start_step,
        )
        limit = None if self.limit is None else int(self.limit * _share(split))
        try:
            for mark in self.directory.glob(f"*/{_MARK}"):
                if mark.parent.name not in cache.directories:  # of another dataset: nothing else would remove it
                    remove_written(mark.parent, _OWN_FILES)
            return Eviction(cache, next_use, limit=limit, start_step=start_step, num_ahead=num_ahead)
        except OSError as error:
            cache.give_up("read", error)
            return None


class ImageCache:
    """One split's images in files, by image number. Thread-safe and process-safe.

    Args:
        budget: store at most this many bytes and evict nothing; None: store everything, and `Eviction` removes.

    Raises:
        ConfigError: its directory has a link where it would have a directory of its own.
        DatasetError: the index has no checksums.
    """

    def __init__(self, directory: Path, split: Split, *, budget: int | None = None) -> None:
        if split.checksums is None:
            raise DatasetError(
                f"data.cache needs the checksum of every image, which the index of {split.url} lacks: run "
                "`dali-train data index` on the dataset, and copy index/ and dataset.json to the bucket"
            )
        self.directory = directory / _directory_name(split.manifest, split.name)
        self.directories = directory_names(split.manifest)
        self._checksums = split.checksums
        self._sizes = split.rows["size"]
        self._budget = budget
        self._counted: set[int] = set()
        self.num_hits = self.num_damaged = 0
        self._reads = self._writes = True  # until the disk fails
        self._warned = False
        try:
            self._make_directory()
            links = [entry.path for entry in os.scandir(self.directory) if entry.is_symlink()]
            links += [str(self.directory)] if self.directory.is_symlink() else []
        except OSError as error:
            self.give_up("written", error)
            return
        if links:
            raise ConfigError(
                f"{links[0]} is a link, but data.cache keeps only files of its own there: "
                "remove the link, or use another directory"
            )

    @cached_property
    def file_sizes(self) -> NDArray[np.int64]:
        """The bytes that each image takes on disk, (N,)."""
        return -(-self._sizes.astype(np.int64) // _BLOCK_BYTES) * _BLOCK_BYTES

    def load(self, image: int) -> NDArray[np.uint8] | None:
        """Return an image's bytes, (size,), or None if they are missing or damaged."""
        if not self._reads:
            return None
        try:
            content = _read_regular(self.path(image), int(self._sizes[image]))
        except FileNotFoundError:
            return None
        except OSError as error:
            self.give_up("read", error)
            return None
        if content is None or crc32c(content) != self._checksums[image]:
            self.num_damaged += 1
            try:
                self.remove(image)
            except OSError as error:
                self.give_up("written", error)
            return None
        self.num_hits += 1
        self._count(image)
        return np.frombuffer(content, dtype=np.uint8)

    def store(self, image: int, content: NDArray[np.uint8]) -> None:
        """Store an image, if there is room."""
        if not self._writes or not self._count(image):
            return
        path = self.path(image)
        try:
            # No temporary name: the checksum detects partial files, and a rename would cost as much as the write.
            try:
                file = path.open("xb", buffering=0)
            except FileNotFoundError:
                self._make_directory()  # again, if somebody has removed it
                path.parent.mkdir(exist_ok=True)
                file = path.open("xb", buffering=0)
            with file:
                try:
                    file.write(content.data)
                except OSError:
                    path.unlink(missing_ok=True)
                    raise
        except FileExistsError:  # another rank, perhaps of another run, is writing the same bytes
            pass
        except OSError as error:
            if error.errno in NO_SPACE:  # until there is room again
                self._warn(f"is full ({error.strerror}): images without room are fetched again; free some space")
            else:
                self.give_up("written", error)

    def remove(self, image: int) -> bool:
        """Remove an image's file; return whether there was one. Raises OSError."""
        path = self.path(image)
        try:
            is_file = stat.S_ISREG(path.lstat().st_mode)
            if is_file:
                path.unlink()
        except FileNotFoundError:
            return False
        return is_file

    def give_up(self, what: Literal["read", "written"], error: OSError) -> None:
        """Use the cache no more: only for reading, if it cannot be written."""
        self._writes = False
        self._reads = self._reads and what == "written"
        self._warn(
            f"cannot be {what} ({error.strerror}): training continues without it, and fetches these images again; "
            "repair that disk, or use another directory at the next start"
        )

    def present(self) -> NDArray[np.bool_]:
        """Return which images have a file, (N,)."""
        present = np.zeros(len(self._checksums), dtype=np.bool_)
        with suppress(FileNotFoundError):  # somebody is removing it
            for directory in os.scandir(self.directory):
                if directory.name.isdecimal() and directory.is_dir(follow_symlinks=False):
                    for entry in os.scandir(directory):
                        image = int(entry.name) if entry.name.isdecimal() else -1
                        if 0 <= image < len(present) and entry.is_file(follow_symlinks=False):
                            present[image] = True
        return present

    def path(self, image: int) -> Path:
        return self.directory / str(image // _FILES_PER_DIRECTORY) / str(image)

    def _count(self, image: int) -> bool:
        if self._budget is None or image in self._counted:
            return True
        size = int(self.file_sizes[image])
        if size > self._budget:
            return False
        self._budget -= size
        self._counted.add(image)
        return True

    def _make_directory(self) -> None:
        self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.mkdir(exist_ok=True)
        if not (self.directory / _MARK).exists():
            (self.directory / _MARK).touch()

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("data.cache %s %s", self.directory.parent, what)


def _read_regular(path: Path, size: int) -> bytes | None:
    """Return the content of a regular file of `size` bytes; None if there is something else. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            return None
        raise
    try:
        status = os.fstat(descriptor)
        return os.read(descriptor, size) if stat.S_ISREG(status.st_mode) and status.st_size == size else None
    finally:
        os.close(descriptor)


def directory_names(manifest: Manifest) -> set[str]:
    """Return the names of the directories of all splits of a dataset."""
    return {_directory_name(manifest, name) for name in manifest.splits}


def _directory_name(manifest: Manifest, split: str) -> str:
    """Name a split's directory by the checksum of its images' checksums, so that datasets are never mixed up."""
    of = manifest.splits[split]
    return f"{split}-{of.num_records}-{of.image_checksums_crc32c}"


def _share(split: Split) -> float:
    """Return the split's share of the dataset's bytes."""
    return split.num_bytes / split.dataset_bytes


def join_node(data: DataConfig, launch: Launch, layout: Layout) -> Node | None:
    """Return this process's view of the cache of its node, None without data.cache. All ranks call this together.

    Raises:
        ConfigError: on all ranks, if another run uses the directory on any node, or it is not writable.
    """
    if data.cache is None:
        return None
    group = host_group(launch)
    reads = layout.pipeline_rank == 0
    mine = (platform.node(), launch.rank, layout.data_rank if reads else None)
    everybody = [mine] * launch.world_size
    if group is not None:
        dist.all_gather_object(everybody, mine, group=group)
    here = [(rank, coordinate) for host, rank, coordinate in everybody if host == mine[0] and coordinate is not None]
    lock = None
    failure = ""
    directory = Path(data.cache) / f"user-{os.getuid()}"  # every rank of this node finds it by this
    if reads and launch.rank == min(rank for rank, _ in here):
        try:
            lock = open_lock(private_directory("data.cache", Path(data.cache)) / "lock")
            end = time.monotonic() + _WAIT_S
            while not (locked := try_lock(lock)) and time.monotonic() < end:
                gc.collect()  # an earlier run in this process may not have been collected yet
                time.sleep(0.2)
            if not locked:
                failure = (
                    f"data.cache {data.cache} is in use by another run on {mine[0]}: use another directory, or wait "
                    "until that run has ended"
                )
        except ConfigError as error:
            failure = str(error)
        except OSError as error:
            failure = f"data.cache {data.cache}: {error.filename}: {error.strerror}: use another directory"
    failure, _ = first_fault(failure, group)
    if group is not None:
        dist.destroy_process_group(group)
    if failure:
        raise ConfigError(failure)
    return Node(
        directory=directory,
        limit=None if data.cache_gb is None else int(data.cache_gb * 1e9),
        dp_size=layout.data_size,
        coordinates=frozenset(coordinate for _, coordinate in here),
        lock=lock,
    )


_MOST_EVENTS_PER_IMAGE = 3
"""The look-ahead, in uses per image of the split, 12 bytes each. A node with 1 / W of the ranks needs a fraction c of
the dataset within W ln(1 / (1 - c)) epochs, so 3 uses per image are enough for a cache of c = 0.95."""


@singledispatch
def cache_of(split: Split, directory: Path) -> ImageCache | None:
    """Return the cache of the training images of a split; None if they lie on a disk. Other kinds of split register
    theirs."""
    return None if split.is_on_disk else ImageCache(directory, split)


class NextUse:
    """When the data-parallel coordinates of one node use each image next.

    Time is counted in micro-batches of coordinate 0, which has at least as many per step as any other; all coordinates
    compute theirs at the same time.

    Args:
        order: of the split's images.
        dp_size: number of data-parallel coordinates.
        coordinates: those whose ranks are on this node.
        start_step: the first step whose uses are known.
    """

    def __init__(
        self,
        config: SampleConfig,
        order: SampleOrder,
        *,
        dp_size: int,
        coordinates: frozenset[int],
        start_step: int,
    ) -> None:
        self._order = order
        batch = config.batch
        mine = np.array([k for k in range(batch.num_micro_batches) if k % dp_size in coordinates])
        self._within = (mine[:, None] * batch.micro_batch + np.arange(batch.micro_batch)).ravel()  # a step's positions
        self._turns = np.repeat(mine // dp_size, batch.micro_batch).astype(np.int32)
        self.per_step = batch.grad_accum_steps(dp_size)
        self._global_batch = batch.global_batch
        self._dp_size = dp_size
        self.total_steps = config.total_steps(self._order.num_images)
        self._steps_per_chunk = max(1, self._order.num_images // batch.global_batch)
        self._end = start_step  # uses are known in steps before it
        self._images = np.empty(0, dtype=np.int32)  # uses in the order of time
        self._times = np.empty(0, dtype=np.int32)

    def uses(self, first_step: int, end_step: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return (images, times) of this node's uses in these steps, in order of time."""
        steps = np.arange(first_step, max(first_step, int(min(end_step, self.total_steps))), dtype=np.int64)
        positions = steps[:, None] * self._global_batch + self._within
        images, _ = self._order.images_at(positions.ravel())
        times = steps[:, None] * self.per_step + self._turns
        return images.astype(np.int32), times.astype(np.int32).ravel()

    def time(self, step: int, k: int) -> int:
        """Return when micro-batch `k` of `step` is computed."""
        return step * self.per_step + k // self._dp_size

    def forget(self, end: int) -> None:
        """Forget the uses before time `end`, which will not be asked for again."""
        keep = int(np.searchsorted(self._times, end))
        self._images, self._times = self._images[keep:], self._times[keep:]

    def between(self, first: int, end: int) -> NDArray[np.int32]:
        """Return the images used from time `first` to before `end`, none of which were forgotten."""
        while self._end * self.per_step < end and self._end < self.total_steps:
            self._look_further()
        begin, stop = np.searchsorted(self._times, [first, end])
        return self._images[begin:stop]

    def first_use(self, now: int, sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int32]:
        """Return the time of each image's first use from `now` on, (N,).

        It is the largest int32 for images that are never used again, or only after other images of `capacity` bytes.

        Args:
            sizes: of all images, bytes.
        """
        never = np.iinfo(np.int32).max
        while True:
            found = np.full(len(sizes), never, dtype=np.int32)
            begin = int(np.searchsorted(self._times, now))
            images, times = self._images[begin:], self._times[begin:]
            found[images[::-1]] = times[::-1]  # the last assignment counts: the earliest use
            too_many = len(images) >= _MOST_EVENTS_PER_IMAGE * len(sizes)
            if sizes[found < never].sum() > capacity or too_many or self._end >= self.total_steps:
                return found
            self._look_further()

    def _look_further(self) -> None:
        images, times = self.uses(self._end, self._end + self._steps_per_chunk)
        self._end += self._steps_per_chunk
        self._images, self._times = np.concatenate([self._images, images]), np.concatenate([self._times, times])


class Eviction:
    """A thread that keeps one split's cache within its capacity by evicting the images needed furthest in the future.

    Args:
        limit: largest size in bytes; None: no limit but the free space of the disk, less a reserve.
        num_ahead: how many micro-batches before its use an image may be fetched.
    """

    def __init__(
        self, cache: ImageCache, next_use: NextUse, *, limit: int | None, start_step: int, num_ahead: int
    ) -> None:
        self._cache, self._next_use, self._limit, self._num_ahead = cache, next_use, limit, num_ahead
        self._present = cache.present()
        self._seen = self._now = next_use.time(start_step, 0)
        # Ranks wait for one another in every step; this one's images may be read ahead, and another's not yet.
        self._lag = next_use.per_step + num_ahead
        self._total = int(cache.file_sizes[self._present].sum())  # bytes after the last round
        self._choosing_s = 0.0
        self._stopped = threading.Event()
        threading.Thread(target=self._work, name="cache-eviction", daemon=True).start()

    def follow(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield `micro_batches` and track the node's progress by them. The thread ends with this iterator."""
        try:
            for micro_batch in micro_batches:
                self._now = self._next_use.time(micro_batch.step, micro_batch.k)
                yield micro_batch
        finally:
            self._stopped.set()

    def remove_latest(self) -> None:
        """Remove images, those needed furthest in the future first, until there is room for as much as was added since
        the last round.

        Along the micro-batches of the run, `now` being the one that this rank trains::

            now - lag                    now                    end = now + num_ahead + 1
            |  ranks that lag behind     |  may be stored already  |  needed later: removed first
                                                 ^ seen: up to here counted in the last round
        """
        began = time.thread_time()
        sizes = self._cache.file_sizes
        now = self._now
        end = now + self._num_ahead + 1
        self._present[self._next_use.between(self._seen, end)] = True  # by one rank or another
        self._seen = max(self._seen, end)
        self._next_use.forget(now - self._lag)
        total = int(sizes[self._present].sum())
        disk = shutil.disk_usage(self._cache.directory)
        capacity = max(0, total + disk.free - int(_RESERVE * disk.total))
        if self._limit is not None:
            capacity = min(capacity, self._limit)
        added = total - self._total
        goal = max(capacity - added, int(_LEAST_FILLED * capacity))
        self._total = total
        if total <= capacity:
            return
        first_use = self._next_use.first_use(now, sizes, capacity)
        present = np.flatnonzero(self._present)
        latest = present[np.argsort(-first_use[present], kind="stable")]
        recent = {*self._next_use.between(now - self._lag, end).tolist()}
        self._choosing_s = time.thread_time() - began  # without removal, which takes longer the longer it has waited
        for image in latest.tolist():
            if self._total <= goal or self._stopped.is_set():
                break
            if not self._cache.remove(image) and image in recent:
                continue  # a rank that lags has still to store it, and room for it must be left
            self._present[image] = False
            self._total -= int(sizes[image])

    def _work(self) -> None:
        while not self._stopped.wait(max(_LEAST_WAIT_S, _WAIT_RATIO * self._choosing_s)):
            try:
                self.remove_latest()
            except FileNotFoundError:  # somebody has removed it: the next image that is stored makes it again
                continue
            except OSError as error:
                self._cache.give_up("written", error)
                return
