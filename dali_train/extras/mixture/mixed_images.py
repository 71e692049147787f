"""The images of a mixture, each from the storage of its source, and what a node keeps of them in its cache."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from dali_train.config import DataConfig
from dali_train.data.dataset.storage import Storage, open_storage
from dali_train.data.loading.cache import ImageCache, cache_of, directory_names
from dali_train.extras.mixture.dataset import MixedSplit

T = TypeVar("T")


class MixedImages:
    """The images of a mixture, each from the storage of its source. See `Storage`."""

    def __init__(self, split: MixedSplit, data: DataConfig, cache: "MixedCache | None" = None) -> None:
        self._firsts = split.firsts
        caches = [None] * len(split.parts) if cache is None else cache.of_sources
        self._storages: list[Storage] = []
        for part, its_cache in zip(split.parts, caches, strict=True):
            self._storages.append(open_storage(part, data, its_cache))
        # The largest: a store has to be asked for many images at the same time.
        self.portion_bytes = max(storage.portion_bytes for storage in self._storages)

    @property
    def keeps_windows(self) -> bool:
        return all(storage.keeps_windows for storage in self._storages)

    def read(self, images: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        return self._by_source(images, lambda source, numbers: self._storages[source].read(numbers))

    def content(self, shard: int, begin: int, end: int) -> memoryview:
        raise NotImplementedError("a mixture has no shards: read from the source, see Split.locate")

    def prefetch(self, images: NDArray[np.int64]) -> None:
        def fetch(source: int, numbers: NDArray[np.int64]) -> list[None]:
            self._storages[source].prefetch(numbers)
            return [None] * len(numbers)

        self._by_source(images, fetch)

    def _by_source(self, images: NDArray[np.int64], read: Callable[[int, NDArray[np.int64]], list[T]]) -> list[T]:
        """Return what ``read(source, its images)`` returns for each of `images`, in their order."""
        results: list[Any] = [None] * len(images)
        sources = np.searchsorted(self._firsts, images, side="right") - 1
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            for place, result in zip(here.tolist(), read(source, images[here] - self._firsts[source]), strict=True):
                results[place] = result
        return results


class MixedCache(ImageCache):
    """The caches of the sources as one, by the image numbers of the mixture, for `Eviction`.

    So it removes the image needed furthest in the future, of whichever source: none has a share of its own. Images of
    a source on a disk have no file and take no bytes.
    """

    def __init__(self, directory: Path, split: MixedSplit) -> None:
        self.directory = directory
        self.of_sources = [None if part.is_on_disk else ImageCache(directory, part) for part in split.parts]
        self._caches = [cache for cache in self.of_sources if cache is not None]
        self._split = split
        used = (directory_names(split.root_manifest), *(cache.directories for cache in self._caches))
        self.directories = {name for names in used for name in names}

    @cached_property
    def file_sizes(self) -> NDArray[np.int64]:
        sizes = np.zeros(len(self._split), dtype=np.int64)
        for first, cache in zip(self._split.firsts, self.of_sources, strict=True):
            if cache is not None:
                sizes[first : first + len(cache.file_sizes)] = cache.file_sizes
        return sizes

    def present(self) -> NDArray[np.bool_]:
        present = np.zeros(len(self._split), dtype=np.bool_)
        for first, cache in zip(self._split.firsts, self.of_sources, strict=True):
            if cache is not None:
                present[first : first + len(cache.file_sizes)] = cache.present()
        return present

    def remove(self, image: int) -> bool:
        source, number = self._split.source_of(image)
        cache = self.of_sources[source]
        return cache is not None and cache.remove(number)

    def give_up(self, what: Literal["read", "written"], error: OSError) -> None:
        for cache in self._caches:
            cache.give_up(what, error)


@open_storage.register
def _(split: MixedSplit, data: DataConfig, cache: MixedCache | None = None) -> MixedImages:
    return MixedImages(split, data, cache)


@cache_of.register
def _(split: MixedSplit, directory: Path) -> MixedCache | None:
    """Return the cache of a mixture's training images; None if all its sources lie on disks.

    Raises:
        ConfigError, DatasetError: see `ImageCache`.
    """
    return None if all(part.is_on_disk for part in split.parts) else MixedCache(directory, split)
