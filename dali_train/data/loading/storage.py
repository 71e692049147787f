"""Where the bytes of images come from. An image is a byte range of a shard; what returns images is a storage.

To add one, write a class with `read` and `prefetch` in a file of its own, and give it a row in `STORAGES`.
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
from dali_train.data.loading.cache import Node
from dali_train.data.loading.remote import RemoteImages
from dali_train.errors import ConfigError, DatasetError
from dali_train.runtime.object_store import SCHEMES

REQUEST_BYTES = 1 << 20
"""Files are read ahead in pieces of at most this."""
GAP_BYTES = 1 << 16  # up to this much between two images, framing and other features, is read with them


class Storage(Protocol):
    """One split's images. Methods are called from several threads at once."""

    portion_bytes: int
    """`prefetch` is given images of about this many bytes at a time."""

    @property
    def keeps_windows(self) -> bool:
        """Whether complete windows of a block order, gigabytes, may be prefetched rather than micro-batches."""

    def read(self, images: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Return what is stored of each of `images`, (size,) each, possibly as read-only views. Called in the order of
        use, just before the bytes are needed."""

    def prefetch(self, images: NDArray[np.int64]) -> None:
        """Bring `images`, ascending, closer, so that a `read` of them some seconds from now does not wait. May take as
        long as it takes.

        Raises:
            OSError: the storage does not answer; reading ahead ends with a warning and training continues without it.
            DatasetError: a shard is not what was indexed; the run ends.
        """


class MappedFiles(MappedShards):
    """Files, mapped into memory: a read copies nothing, and what decodes is what waits for the disk.

    `prefetch` reads the same bytes into the page cache instead of advising the kernel (madvise or posix_fadvise with
    WILLNEED). One advice is cut to the device's largest request (force_page_cache_ra in Linux' mm/readahead.c),
    Lustre's client ignores it (its llite sets ra_pages and io_pages to 0), and Python's mmap.madvise holds the
    interpreter's lock. A read works wherever the data can be read.
    """

    portion_bytes = REQUEST_BYTES
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
            buffer = self._buffers.buffer = memoryview(bytearray(REQUEST_BYTES))
        for shard, offset, size in zip(*(part.tolist() for part in requests(self._rows, images)), strict=True):
            descriptor = self._file(shard)
            while size > 0:
                num_read = os.preadv(descriptor, [buffer[:size]], offset)
                if num_read == 0:
                    # The decoder would touch a page of the map that has no file behind it and the process would die of
                    # SIGBUS.
                    length = os.fstat(descriptor).st_size
                    raise DatasetError(
                        f"{self._paths[shard]} has become shorter while it was in use: it ends at byte {length}, the "
                        f"index says that an image lies at byte {offset}. Restore the shard, and start again"
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


def requests(
    rows: NDArray[np.void], images: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (shards, first bytes, sizes) of the reads, each at most REQUEST_BYTES, that fetch `images` in disk order.

    Args:
        rows: the split's index (``INDEX_DTYPE``), which is in the order on disk.
    """
    rows = rows[np.unique(images)]
    shards, starts = rows["shard"].astype(np.int64), rows["offset"].astype(np.int64)
    stops = starts + rows["size"]
    apart = (np.diff(shards) != 0) | (starts[1:] - stops[:-1] > GAP_BYTES)
    first = np.flatnonzero(np.concatenate([[True], apart])) if len(rows) else np.empty(0, dtype=np.int64)
    shards, starts, stops = shards[first], starts[first], stops[np.append(first, len(rows))[1:] - 1]
    counts = -(-(stops - starts) // REQUEST_BYTES)
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # which piece of its run each is
    begins = np.repeat(starts, counts) + inside * REQUEST_BYTES
    return np.repeat(shards, counts), begins, np.minimum(np.repeat(stops, counts) - begins, REQUEST_BYTES)


def _open_files(split: Split, data: DataConfig, node: Node | None) -> Storage:
    return MappedFiles(split)


def _open_remote(split: Split, data: DataConfig, node: Node | None) -> Storage:
    cache = None if node is None else node.cache(split)
    return RemoteImages(split, cache, staged_bytes=max(32, data.read_ahead_mb) * 1_000_000)


STORAGES: dict[str, Callable[[Split, DataConfig, Node | None], Storage]] = {
    "file": _open_files,
    **dict.fromkeys(SCHEMES, _open_remote),
}
"""By the scheme of the URL in data.root; a path without a scheme is a file."""


def open_storage(split: Split, data: DataConfig, node: Node | None = None) -> Storage:
    """Return the storage that holds the images of `split`: of data.root, or of the local copy that `split` is of.

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
            f"data.root is {data.root}: there is no storage for {scheme}://, only for {', '.join(STORAGES)}"
        )
    return STORAGES[scheme]


def read_stored(storage: Storage, split: Split, images: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
    """Return what is stored of each image: a file's bytes, (size,), or with raw records pixels, (height, width, 3)."""
    contents = storage.read(images)
    if split.manifest.encoding == "image":
        return contents
    rows = split.rows[images]
    sizes = zip(rows["height"].tolist(), rows["width"].tolist(), strict=True)
    return [pixels.reshape(height, width, 3) for pixels, (height, width) in zip(contents, sizes, strict=True)]
