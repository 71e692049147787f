"""Storages, which return the bytes of images. An image is a byte range of a shard.

To add a storage, write a class with `read` and `prefetch` in its own file, and add a row to `STORAGES`.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dali_train.config import DataConfig
from dali_train.data.dataset.index import MappedShards, Split, allow_open_files
from dali_train.data.dataset.remote import RUN_BYTES, adjacent
from dali_train.data.loading.cache import Node
from dali_train.data.loading.remote import RemoteImages
from dali_train.errors import ConfigError, DatasetError
from dali_train.runtime.object_store import SCHEMES


class Storage(Protocol):
    """One split's images. Methods are called from several threads at once."""

    portion_bytes: int
    """About how many bytes of images each call of `prefetch` gets."""

    @property
    def keeps_windows(self) -> bool:
        """Whether whole windows of a block order (gigabytes) may be prefetched instead of micro-batches."""

    def read(self, images: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Return the stored bytes of each of `images`, (size,) each, possibly as read-only views. Called in order of
        use, just before the bytes are needed."""

    def prefetch(self, images: NDArray[np.int64]) -> None:
        """Fetch `images`, which are ascending, so that a `read` some seconds later does not wait. May block.

        Raises:
            OSError: the storage does not answer; reading ahead stops with a warning and training continues without it.
            DatasetError: a shard differs from the index; the run ends.
        """


class MappedFiles(MappedShards):
    """Memory-mapped files: a read copies nothing, and the decoder waits for the disk.

    `prefetch` reads the same bytes into the page cache instead of advising the kernel (madvise or posix_fadvise with
    WILLNEED). The kernel limits one advice to the device's largest request (force_page_cache_ra in Linux'
    mm/readahead.c), Lustre's client ignores advice (its llite sets ra_pages and io_pages to 0), and Python's
    mmap.madvise holds the GIL. Reading works everywhere.
    """

    portion_bytes = RUN_BYTES
    keeps_windows = True  # in the page cache

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self._files: dict[int, int] = {}  # shard -> descriptor
        self._opening = threading.Lock()
        self._buffers = threading.local()
        weakref.finalize(self, _close_all, self._files)

    def prefetch(self, images: NDArray[np.int64]) -> None:
        """Read `images` into the page cache."""
        buffer = self._buffers.__dict__.get("buffer")
        if buffer is None:
            buffer = self._buffers.buffer = memoryview(bytearray(RUN_BYTES))
        for run in adjacent(self._rows, images):
            first, last = self._rows[run[0]], self._rows[run[-1]]
            shard, offset = int(first["shard"]), int(first["offset"])
            size, descriptor = int(last["offset"]) + int(last["size"]) - offset, self._file(shard)
            while size > 0:
                num_read = os.preadv(descriptor, [buffer[:size]], offset)
                if num_read == 0:
                    # The decoder would touch a page of the map that has no file behind it and the process would die of
                    # SIGBUS.
                    length = os.fstat(descriptor).st_size
                    raise DatasetError(
                        f"{self._paths[shard]} was truncated while in use: it ends at byte {length}, but the index has "
                        f"an image at byte {offset}. Restore the shard, and start again"
                    )
                offset, size = offset + num_read, size - num_read

    def _file(self, shard: int) -> int:
        with self._opening:
            if shard not in self._files:
                self._require_descriptors()
                self._files[shard] = os.open(self._paths[shard], os.O_RDONLY)
            return self._files[shard]

    def _require_descriptors(self) -> None:
        if not self._files:
            shortage = allow_open_files(2 * len(self._paths) + 256)  # a shard's map holds a descriptor too
            if shortage:
                raise OSError(shortage)


def _close_all(files: dict[int, int]) -> None:
    for descriptor in files.values():
        os.close(descriptor)


def _open_files(split: Split, data: DataConfig, node: Node | None) -> Storage:
    return MappedFiles(split)


def _open_remote(split: Split, data: DataConfig, node: Node | None) -> Storage:
    cache = None if node is None else node.cache(split)
    return RemoteImages(split, cache, staged_bytes=max(32, data.read_ahead_mb) * 1_000_000)


STORAGES: dict[str, Callable[[Split, DataConfig, Node | None], Storage]] = {
    "file": _open_files,
    **dict.fromkeys(SCHEMES, _open_remote),
}
"""Functions that open a storage, by the scheme of the URL in data.root; a path without a scheme is a file."""


def open_storage(split: Split, data: DataConfig, node: Node | None = None) -> Storage:
    """Return the storage with the images of `split`, which may be a split of data.root or of its local copy.

    Args:
        node: the cache of this node, if it has one.

    Raises:
        ConfigError: as `storage_of`.
    """
    return storage_of(data)(split, data, node)


def storage_of(data: DataConfig) -> Callable[[Split, DataConfig, Node | None], Storage]:
    """Return the row of `STORAGES` that data.root names.

    Raises:
        ConfigError: the URL's scheme is unknown.
    """
    scheme, separator, _ = data.root.partition("://")
    if not separator or data.local_copy is not None:
        scheme = "file"
    if scheme not in STORAGES:
        raise ConfigError(
            f"data.root is {data.root}: there is no storage for {scheme}://, use one of {', '.join(STORAGES)}"
        )
    return STORAGES[scheme]


def read_stored(storage: Storage, split: Split, images: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
    """Return each image as stored: encoded bytes, (size,), or pixels of raw records, (height, width, 3)."""
    contents = storage.read(images)
    if split.manifest.encoding == "image":
        return contents
    rows = split.rows[images]
    sizes = zip(rows["height"].tolist(), rows["width"].tolist(), strict=True)
    return [pixels.reshape(height, width, 3) for pixels, (height, width) in zip(contents, sizes, strict=True)]
