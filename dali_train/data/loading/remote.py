"""Images of a dataset in an object store: fetched ahead of use, and kept on the node's disk if it has a cache."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.remote import RemoteShards
from dali_train.data.loading.cache import ImageCache

Image = NDArray[np.uint8]


class RemoteImages(RemoteShards):
    """A split in an object store, as a `Storage`.

    Prefetched images wait in memory until they have been read as many times as they were prefetched.

    Args:
        staged_bytes: limit of the memory for waiting images. Beyond it images are only put into the cache; without a
            cache, the oldest waiting images are dropped, and fetched again when they are read.
    """

    portion_bytes = 8 << 20  # four portions in flight are hundreds of images of 110 kB

    def __init__(self, split: Split, cache: ImageCache | None, *, staged_bytes: int) -> None:
        super().__init__(split)
        self._cache, self._most_bytes = cache, staged_bytes
        self._staged: OrderedDict[int, tuple[Future[Image], int]] = OrderedDict()  # and how often it will be read
        self._num_staged_bytes = 0
        self._changing = threading.Lock()

    @property
    def keeps_windows(self) -> bool:
        """Whether whole windows of a block order may be prefetched: only if they can wait on a disk."""
        return self._cache is not None

    def prefetch(self, images: NDArray[np.int64]) -> None:
        """Fetch `images`, which are distinct, into memory or into the cache."""
        mine: dict[int, Future[Image]] = {}
        with self._changing:
            for image in images.tolist():
                if image in self._staged:
                    future, count = self._staged[image]
                    self._staged[image] = future, count + 1
                else:
                    mine[image] = Future()
                    self._staged[image] = mine[image], 1
                    self._num_staged_bytes += int(self._rows["size"][image])
        self._bring(mine)
        self._drop_surplus(mine)

    def read(self, images: NDArray[np.int64]) -> list[Image]:
        """Return the stored bytes of each of `images`, read-only, (size,) each.

        Raises:
            DatasetError: a shard is missing or has changed, or an image's checksum is wrong repeatedly.
        """
        futures: dict[int, Future[Image]] = {}
        missing: dict[int, Future[Image]] = {}
        with self._changing:
            for image in dict.fromkeys(images.tolist()):
                futures[image] = self._take(image) or missing.setdefault(image, Future())
        self._bring(missing)
        return [futures[image].result() for image in images.tolist()]

    def _take(self, image: int) -> Future[Image] | None:
        if image not in self._staged:
            return None
        future, count = self._staged[image]
        if count > 1:
            self._staged[image] = future, count - 1
        else:
            self._drop(image)
        return future

    def _drop(self, image: int) -> None:
        del self._staged[image]
        self._num_staged_bytes -= int(self._rows["size"][image])

    def _drop_surplus(self, newest: Iterable[int]) -> None:
        with self._changing:
            if self._cache is not None:
                for image in newest:
                    if self._num_staged_bytes > self._most_bytes and image in self._staged:
                        self._drop(image)
            while self._num_staged_bytes > 2 * self._most_bytes:  # read before it arrived, and not prefetched again
                self._drop(next(iter(self._staged)))

    def _bring(self, futures: dict[int, Future[Image]]) -> None:
        """Set the result of each future to its image, from the cache or from the store."""
        try:
            missing = []
            for image, future in futures.items():
                content = self._cache.load(image) if self._cache is not None else None
                if content is not None:
                    future.set_result(content)
                else:
                    missing.append(image)
            for image, content in self.fetch(np.array(sorted(missing), dtype=np.int64)):
                if self._cache is not None:
                    self._cache.store(image, content)
                futures[image].set_result(content)
        except BaseException as error:
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)
            raise
