"""Storages, which return the bytes of images: memory-mapped shards; or byte ranges that are read, verified and kept
until they are used, of objects in a store or of any files. To add a storage, write a class with the members of
`Storage`, and add a row to `STORAGES`.
"""

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import BinaryIO, Protocol

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.config import DataConfig
from dali_train.config.sections import is_url
from dali_train.data.dataset.files_in_place import SourceFiles
from dali_train.data.dataset.image_file import for_dali
from dali_train.data.dataset.index import Split, map_file, sizes_of
from dali_train.data.dataset.manifest import dataset_errors
from dali_train.data.dataset.open_files import OPEN_FILES
from dali_train.data.dataset.reading_process import ReadingProcess
from dali_train.data.dataset.tfrecord import Buffer
from dali_train.errors import ConfigError, DatasetError
from dali_train.runtime.object_store import SCHEMES, Bucket, ChangedObjectError, MissingObjectError

logger = logging.getLogger("dali_train")

ImageBytes = NDArray[np.uint8]
RUN_BYTES = 1 << 20  # neighbours are fetched, or read ahead, by one request of up to this
GAP_BYTES = 1 << 16  # so much between two of them is fetched along: framing, and images that nobody asked for
_MANY_SPANS = 8  # that another process reads; fewer are read here
_ATTEMPTS = 3  # at an image from a store whose checksum is wrong


class Cache(Protocol):
    """Keeps images of an object store on a disk of this node."""

    def load(self, image: int) -> ImageBytes | None: ...

    def store(self, image: int, content: ImageBytes) -> None: ...


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

    def content(self, shard: int, begin: int, end: int) -> memoryview:
        """Return bytes `begin` to `end` of a shard, for what an index does not have, such as the names of images."""

    def prefetch(self, images: NDArray[np.int64]) -> None:
        """Fetch `images`, which are ascending, so that a `read` some seconds later does not wait. May block.

        Raises:
            OSError: the storage does not answer; reading ahead stops with a warning and training continues without it.
            DatasetError: a shard differs from the index; the run ends.
        """


class MappedFiles:
    """Memory-mapped files: a read copies nothing, and the decoder waits for the disk.

    `prefetch` reads the same bytes into the page cache instead of advising the kernel (madvise or posix_fadvise with
    WILLNEED). The kernel limits one advice to the device's largest request (force_page_cache_ra in Linux'
    mm/readahead.c), Lustre's client ignores advice (its llite sets ra_pages and io_pages to 0), and Python's
    mmap.madvise holds the GIL. Reading works everywhere.

    Rewriting a shard while it is in use kills the process, as with any mapped file.

    Raises:
        DatasetError: there are more shards than this process may have open files.
    """

    portion_bytes = 8 << 20
    keeps_windows = True  # in the page cache

    def __init__(self, split: Split) -> None:
        shortage = OPEN_FILES.reserve(len(split.paths))  # a mapped shard holds a descriptor
        if shortage:
            raise DatasetError(
                f"{split.root} cannot be mapped: {shortage}; raise that limit, or convert to fewer shards"
            )
        self._rows, self._paths = split.rows, split.paths
        self._maps: list[NDArray[np.uint8] | None] = [None] * len(split.paths)
        self.reading = ReadingProcess()
        weakref.finalize(self, OPEN_FILES.release, len(split.paths))

    def read(self, images: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Return the stored bytes of each of `images` as a read-only view, (size,): encoded images or raw pixels."""
        rows = self._rows[images]
        # Plain integers at once: one element of a structured array costs a microsecond, and a micro-batch has hundreds.
        spans = zip(rows["shard"].tolist(), rows["offset"].tolist(), rows["size"].tolist(), strict=True)
        return [self._map(shard)[offset : offset + size] for shard, offset, size in spans]

    def content(self, shard: int, begin: int, end: int) -> memoryview:
        """Return bytes `begin` to `end` of a shard."""
        return self._map(shard)[begin:end].data

    def _map(self, shard: int) -> NDArray[np.uint8]:
        content = self._maps[shard]
        if content is None:
            content = self._maps[shard] = np.frombuffer(map_file(self._paths[shard]), dtype=np.uint8)
        return content

    def prefetch(self, images: NDArray[np.int64]) -> None:
        """Read `images` into the page cache."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for shard, begin, end in spans_of(self._rows, adjacent(self._rows, images)):
            ranges.setdefault(os.fspath(self._paths[shard]), []).append((begin, end))
        self.reading.read_into_page_cache(ranges)


def adjacent(rows: NDArray[np.void], images: NDArray[np.int64]) -> list[list[int]]:
    """Cut `images` into runs of adjacent images that are fetched together. `rows` is the split's index."""
    images = images[np.lexsort((rows["offset"][images], rows["shard"][images]))]  # in place they may be shuffled
    rows = rows[images]
    spans = zip(rows["shard"].tolist(), rows["offset"].tolist(), rows["size"].tolist(), strict=True)
    runs: list[list[int]] = []
    first = end = shard = -1
    for image, (its_shard, start, size) in zip(images.tolist(), spans, strict=True):
        if its_shard != shard or start - end > GAP_BYTES or start + size - first > RUN_BYTES:
            runs.append([])
            first, shard = start, its_shard
        runs[-1].append(image)
        end = start + size
    return runs


Span = tuple[int, int, int]
"""The number of a file, first byte and end."""


def spans_of(rows: NDArray[np.void], runs: Sequence[Sequence[int]]) -> list[Span]:
    """Return the bytes from the first to the last image of each run of `adjacent`."""
    firsts, lasts = (rows[[run[place] for run in runs]] for place in (0, -1))
    ends = lasts["offset"] + lasts["size"]
    return [*zip(firsts["shard"].tolist(), firsts["offset"].tolist(), ends.tolist(), strict=True)]


class Ranges(Protocol):
    """Byte ranges of the files of a split, for `RangedImages`."""

    portion_bytes: int  # as of a `Storage`
    num_attempts: int  # at an image whose checksum is wrong
    remedy: str  # for it

    def content(self, file: int, begin: int, end: int) -> Buffer:
        """Return bytes `begin` to `end` of a file. Raises DatasetError: it is missing or has changed."""

    def contents(self, spans: Sequence[Span]) -> Iterator[Buffer]:
        """Yield what `content` returns for each of `spans`."""


class FileRanges:
    """Files on a disk. They may be as many as there are images, too many to be mapped, or open, at the same time."""

    portion_bytes, num_attempts = RUN_BYTES, 1
    remedy = "restore the file, or index the dataset again"

    def __init__(self, files: SourceFiles) -> None:
        self._files, self._reading = files, ReadingProcess()
        self._has_warned = False

    def content(self, file: int, begin: int, end: int) -> bytes:
        return self._files.read(file, begin, end)

    def contents(self, spans: Sequence[Span]) -> Iterator[Buffer]:
        whole = None
        if len(spans) >= _MANY_SPANS:
            try:
                whole = self._reading.fetch([(self._files.path(file), begin, end) for file, begin, end in spans])
            except OSError as error:
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning("files are read in this process from now on, which is slower: %s", error.strerror)
        if whole is None:  # or a file cannot be read: this says why
            yield from (self.content(*span) for span in spans)
            return
        place = 0
        for _, begin, end in spans:
            yield whole[place : place + end - begin]
            place += end - begin


class BucketRanges:
    """Objects in a store. Each is pinned by its size and ETag, so that its version does not change."""

    portion_bytes = 8 << 20  # four portions in flight are hundreds of images of 110 kB
    num_attempts = _ATTEMPTS  # since stores do not verify ranged reads
    remedy = "copy that shard again, or index the dataset again"

    def __init__(self, split: Split) -> None:
        assert split.url is not None
        self._bucket, self._split = Bucket(split.url), split
        self._etags: dict[int, str | None] = {}
        self.num_requests = self.num_bytes = 0  # so far; for measurements, not exact when threads race

    @dataset_errors()
    def content(self, file: int, begin: int, end: int) -> memoryview:
        files = self._split.files
        name = self._split.shards[file].name if files is None else files.name(file)
        expected = self._split.shards[file].num_bytes if files is None else int(files.num_bytes[file])
        try:
            content, etag, size = self._bucket.read(name, begin, end, self._etags.get(file))
        except MissingObjectError as error:
            remedy = "copy the dataset's directory completely" if files is None else files.remedy
            raise DatasetError(f"{error}, dataset.json names it: {remedy}") from error
        except ChangedObjectError as error:
            raise DatasetError(f"{error}: start again with a dataset that stays as it is") from error
        if size != expected:
            remedy = "copy shards and index together" if files is None else files.remedy
            raise DatasetError(
                f"{self._bucket.url}/{name} has {size} bytes, the index was made for {expected}: it is another "
                f"version, {remedy}"
            )
        if files is not None and file not in self._etags:
            files.check_object(file, etag)
        self._etags.setdefault(file, etag)
        self.num_requests, self.num_bytes = self.num_requests + 1, self.num_bytes + len(content)
        return content

    def contents(self, spans: Sequence[Span]) -> Iterator[Buffer]:
        return self._bucket.map(lambda span: self.content(*span), spans)


class _Fetch:
    """A call that fetches images, which others may wait for."""

    def __init__(self) -> None:
        self.arrived = threading.Condition()
        self.error: BaseException | None = None


class _Image:
    """An image that is being fetched, or waits to be read. There may be 100,000 of them: a Future takes 2 kB."""

    __slots__ = ("_content", "_fetch", "num_reads")

    def __init__(self, fetch: _Fetch) -> None:
        self._fetch = fetch
        self._content: ImageBytes | None = None
        self.num_reads = 1  # to come

    def arrive(self, content: ImageBytes) -> None:
        with self._fetch.arrived:
            self._content = content
            self._fetch.arrived.notify_all()

    def result(self) -> ImageBytes:
        """Wait for the image. Raises what its fetch raised."""
        if self._content is None:
            with self._fetch.arrived:
                self._fetch.arrived.wait_for(lambda: self._content is not None or self._fetch.error is not None)
        if self._content is None:
            assert self._fetch.error is not None
            raise self._fetch.error
        return self._content


class RangedImages:
    """The images of a split in an object store, or of an index in place. Methods may be called from several threads at
    once.

    Every image is compared with its checksum in the index, if it has one. Prefetched images wait in memory until they
    have been read as many times as they were prefetched; each keeps the portion with which it came from a disk.

    Args:
        split: one that is not memory-mapped. Where its index has no `checksums`, only the number of bytes is checked.
        staged_bytes: limit of the memory for waiting images. Beyond it images are only put into the cache; without a
            cache, the oldest waiting images are dropped, and read again when they are needed.

    Raises:
        DatasetError: by `fetch`: a file is missing, has changed, or an image is wrong and stays wrong.
    """

    def __init__(self, split: Split, cache: Cache | None = None, *, staged_bytes: int = 0) -> None:
        self._split, self._rows, self._checksums = split, split.rows, split.checksums
        self.ranges: Ranges
        if split.url is not None:
            self.ranges = BucketRanges(split)
        else:
            assert split.files is not None
            self.ranges = FileRanges(split.files)
        self.portion_bytes = self.ranges.portion_bytes
        self._cache, self._most_bytes = cache, staged_bytes
        self._staged: OrderedDict[int, _Image] = OrderedDict()
        self._num_staged_bytes = 0
        self._changing = threading.Lock()

    @property
    def keeps_windows(self) -> bool:
        """Whether whole windows of a block order may be prefetched: only if they can wait on a disk, or in its page
        cache."""
        return self._cache is not None or self._split.url is None

    def prefetch(self, images: NDArray[np.int64]) -> None:
        """Fetch `images`, which are distinct, into memory or into the cache."""
        mine, fetch = dict[int, _Image](), _Fetch()
        with self._changing:
            for image, size in zip(images.tolist(), self._rows["size"][images].tolist(), strict=True):
                if image in self._staged:
                    self._staged[image].num_reads += 1
                else:
                    mine[image] = self._staged[image] = _Image(fetch)
                    self._num_staged_bytes += size
        self._bring(mine, fetch)
        self._drop_surplus(mine)

    def read(self, images: NDArray[np.int64]) -> list[ImageBytes]:
        """Return the stored bytes of each of `images`, read-only, (size,) each.

        Raises:
            DatasetError: a shard is missing or has changed, or an image's checksum is wrong repeatedly.
        """
        found, missing, fetch = dict[int, _Image](), dict[int, _Image](), _Fetch()
        with self._changing:
            for image in dict.fromkeys(images.tolist()):
                found[image] = self._take(image) or missing.setdefault(image, _Image(fetch))
        self._bring(missing, fetch)
        return [found[image].result() for image in images.tolist()]

    def _take(self, image: int) -> _Image | None:
        staged = self._staged.get(image)
        if staged is not None:
            staged.num_reads -= 1
            if not staged.num_reads:
                self._drop(image)
        return staged

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

    def _bring(self, images: dict[int, _Image], fetch: _Fetch) -> None:
        """Have each of `images`, which wait for `fetch`, arrive from the cache or from the store."""
        try:
            missing = []
            for image, waiting in images.items():
                content = self._cache.load(image) if self._cache is not None else None
                if content is not None:
                    waiting.arrive(content)
                else:
                    missing.append(image)
            for image, content in self.fetch(np.array(sorted(missing), dtype=np.int64)):
                if self._cache is not None:
                    self._cache.store(image, content)
                images[image].arrive(content)
        except BaseException as error:
            with fetch.arrived:
                fetch.error = error
                fetch.arrived.notify_all()
            raise

    def fetch(self, images: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield (image, its stored bytes, read-only, (size,)) for each of `images`, by their places in the files."""
        runs = adjacent(self._rows, images)
        spans = spans_of(self._rows, runs)
        with dataset_errors():
            for run, span, content in zip(runs, spans, self.ranges.contents(spans), strict=True):
                yield from zip(run, self._checked(run, span, content), strict=True)

    def _checked(self, run: list[int], span: Span, content: Buffer) -> list[NDArray[np.uint8]]:
        """Cut the content of a run into its images, each of which must have the checksum of the index."""
        for attempt in range(self.ranges.num_attempts):
            contents = self._cut(run, span, content if attempt == 0 else self.ranges.content(*span))
            wrong = None if self._checksums is None else self._first_wrong(run, contents)
            if wrong is None:
                return contents
        assert wrong is not None
        image, found, expected = wrong
        num_attempts = self.ranges.num_attempts
        came = "has" if num_attempts == 1 else f"came {num_attempts} times with"
        raise DatasetError(
            f"{self._split.describe(image)} {came} CRC32C {found:08x}, the index says {expected:08x}: "
            f"{self.ranges.remedy}"
        )

    def _cut(self, run: list[int], span: Span, content: Buffer) -> list[NDArray[np.uint8]]:
        whole = np.frombuffer(content, dtype=np.uint8)
        whole.flags.writeable = False
        if len(run) == 1:
            return [whole]
        rows, begin = self._rows[run], span[1]
        places = zip(rows["offset"].tolist(), rows["size"].tolist(), strict=True)
        return [whole[start - begin : start - begin + size] for start, size in places]

    def _first_wrong(self, run: list[int], contents: list[NDArray[np.uint8]]) -> tuple[int, int, int] | None:
        assert self._checksums is not None
        for image, content, expected in zip(run, contents, self._checksums[run].tolist(), strict=True):
            found = crc32c(content.data)
            if found != expected:
                return image, found, expected
        return None

    def content(self, shard: int, begin: int, end: int) -> memoryview:
        """Return bytes `begin` to `end` of a shard. Raises DatasetError: as `fetch`."""
        return memoryview(self.ranges.content(shard, begin, end))


def _ranged_images(split: Split, data: DataConfig, cache: Cache | None) -> RangedImages:
    return RangedImages(split, cache, staged_bytes=max(32, data.read_ahead_mb) * 1_000_000)


STORAGES: dict[str, Callable[[Split, DataConfig, Cache | None], Storage]] = {
    "file": lambda split, data, cache: (
        MappedFiles(split) if split.files is None else _ranged_images(split, data, cache)
    ),
    **dict.fromkeys(SCHEMES, _ranged_images),
}
"""Functions that open a storage, by the scheme of a dataset's URL; a path without a scheme is a file."""


@singledispatch
def open_storage(split: Split, data: DataConfig, cache: Cache | None = None) -> Storage:
    """Return the storage with the images of `split`, by where it lies: a set of data.eval_sets need not lie where
    data.root does. Other kinds of split register theirs.

    Args:
        data: how much is read ahead.
        cache: of this node, for images of an object store.

    Raises:
        ConfigError: as `storage_of`.
    """
    return storage_of(split.location)(split, data, cache)


@dataclass(frozen=True)
class DatasetLocation:
    """Where to read the dataset from. A copy is not removed while this object exists."""

    data: DataConfig  # with the directories of copies in the place of what was copied
    in_use: tuple[BinaryIO, ...] = ()  # hold the locks of copies


def storage_of(location: str) -> Callable[[Split, DataConfig, Cache | None], Storage]:
    """Return the row of `STORAGES` for a dataset's directory or URL.

    Raises:
        ConfigError: the URL's scheme is unknown.
    """
    scheme = location.partition("://")[0] if is_url(location) else "file"
    if scheme not in STORAGES:
        raise ConfigError(f"{location}: there is no storage for {scheme}://, use one of {', '.join(STORAGES)}")
    return STORAGES[scheme]


def read_stored(storage: Storage, split: Split, images: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
    """Return each image as stored: encoded bytes as DALI takes them, (size,), or pixels of raw records, (height, width,
    3)."""
    contents = storage.read(images)
    if split.manifest.encoding == "image":
        return [for_dali(content) for content in contents]
    sizes = sizes_of(split.rows[images]).tolist()
    return [pixels.reshape(height, width, 3) for pixels, (height, width) in zip(contents, sizes, strict=True)]


def stored_image(storage: Storage, number: int) -> NDArray[np.uint8]:
    """Return the stored bytes of one image, (size,)."""
    return storage.read(np.array([number]))[0]


def open_shards(split: Split) -> Storage:
    """Return the images of a split outside of a run, from where they lie.

    Raises:
        DatasetError: see `MappedFiles`.
    """
    return open_storage(split, DataConfig(root=".", read_ahead_mb=0))  # the split has its own place
