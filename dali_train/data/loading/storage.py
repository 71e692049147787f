"""Where the bytes of images come from. An image is a byte range of a shard; what returns byte ranges is a storage.

To add one, write a class with `read` and `prefetch` in a file of its own, and give it a row in `STORAGES`.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dali_train.config import DataConfig
from dali_train.data.dataset.index import MappedShards, Split, allow_open_files
from dali_train.errors import ConfigError, DatasetError

Range = tuple[int, int, int]
"""(shard, first byte, number of bytes); shards are numbered as in the manifest."""

REQUEST_BYTES = 1 << 20
"""The longest range that `prefetch` is given."""


class Storage(Protocol):
    """One split's shards. Both methods are called from several threads at once."""

    def read(self, shard: int, offset: int, size: int) -> NDArray[np.uint8]:
        """Return these bytes, (size,), possibly as a read-only view. Called in the order of use, just before the bytes
        are needed."""

    def prefetch(self, ranges: Iterable[Range]) -> None:
        """Bring these ranges closer, so that a `read` of them some seconds from now does not wait. May take as long as
        it takes.

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

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self._files: dict[int, int] = {}  # shard -> descriptor
        self._opening = threading.Lock()
        self._buffers = threading.local()
        weakref.finalize(self, _close_all, self._files)

    def prefetch(self, ranges: Iterable[Range]) -> None:
        buffer = self._buffers.__dict__.get("buffer")
        if buffer is None:
            buffer = self._buffers.buffer = memoryview(bytearray(REQUEST_BYTES))
        for shard, offset, size in ranges:
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


STORAGES: dict[str, Callable[[Split], Storage]] = {"file": MappedFiles}
"""By the scheme of the URL in data.root; a path without a scheme is a file."""


def open_storage(split: Split, data: DataConfig) -> Storage:
    """Return the storage that holds the shards of `split`: of data.root, or of the local copy that `split` is of.

    Raises:
        ConfigError: as `storage_class`.
    """
    return storage_class(data)(split)


def storage_class(data: DataConfig) -> Callable[[Split], Storage]:
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
    rows = split.rows[images]
    # Plain integers at once: one element of a structured array costs a microsecond, and a micro-batch has hundreds.
    ranges = zip(rows["shard"].tolist(), rows["offset"].tolist(), rows["size"].tolist(), strict=True)
    contents = [storage.read(shard, offset, size) for shard, offset, size in ranges]
    if split.manifest.encoding == "image":
        return contents
    sizes = zip(rows["height"].tolist(), rows["width"].tolist(), strict=True)
    return [pixels.reshape(height, width, 3) for pixels, (height, width) in zip(contents, sizes, strict=True)]
