"""A dataset in an object store: its metadata is kept on this machine, its images are fetched as byte ranges."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.errors import DatasetError
from dali_train.files import write_atomically
from dali_train.runtime.object_store import Bucket, ChangedObjectError, MissingObjectError, ObjectStoreError

if TYPE_CHECKING:
    from dali_train.data.dataset.index import Split

RUN_BYTES = 1 << 20  # neighbours are fetched, or read ahead, by one request of up to this
GAP_BYTES = 1 << 16  # so much between two of them is fetched along: framing, and images that nobody asked for
_ATTEMPTS = 3  # at an image whose checksum is wrong


@contextmanager
def dataset_errors() -> Iterator[None]:
    """Raise the errors of an object store as a DatasetError."""
    try:
        yield
    except ObjectStoreError as error:
        raise DatasetError(str(error)) from error


@lru_cache(maxsize=16)
@dataset_errors()
def fetched_metadata(url: str) -> Path:
    """Return the directory on this machine with ``dataset.json`` and the index of the dataset at `url`.

    Directories are named by the content of ``dataset.json``, so a replaced dataset gets a new one, and nothing is
    fetched twice. A running process keeps the version that it started with.

    Raises:
        DatasetError: there is no dataset at `url`, or the store does not answer, or refuses.
    """
    bucket = Bucket(url)
    try:
        manifest = bucket.read_all("dataset.json")
    except MissingObjectError:
        raise DatasetError(
            f"{url} has no dataset.json: name the URL that a converted or indexed dataset's directory was copied to"
        ) from None
    directory = cache_directory() / "datasets" / hashlib.sha256(manifest).hexdigest()[:16]
    try:
        splits = json.loads(manifest)["splits"]
        files = {
            f"index/{split}{suffix}": facts[field]
            for split, facts in splits.items()
            for suffix, field in ((".npy", "index_crc32c"), (".crc.npy", "image_checksums_crc32c"))
            if facts.get(field) is not None
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        files = {}  # Manifest.read says what is wrong with it
    for name, checksum in files.items():
        path = directory / name
        if path.is_file() and f"{crc32c(path.read_bytes()):08x}" == checksum:
            continue
        try:
            content = bucket.read_all(name)
        except MissingObjectError as error:
            raise DatasetError(f"{error}, dataset.json names it: copy the dataset's directory completely") from None
        if f"{crc32c(content):08x}" != checksum:
            raise DatasetError(f"{url}/{name} is not the file that dataset.json was written with: copy both again")
        write_atomically(path, content)
    if not (directory / "dataset.json").exists():
        write_atomically(directory / "dataset.json", manifest)
    return directory


def cache_directory() -> Path:
    """Return this machine's directory for files that can be fetched again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dali_train"


def adjacent(rows: NDArray[np.void], images: NDArray[np.int64]) -> list[list[int]]:
    """Cut `images`, ascending, into runs of adjacent images that are fetched together. `rows` is the split's index."""
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


class RemoteShards:
    """The bytes of a split's images in an object store. Methods may be called from several threads at once.

    Every image is compared with its checksum in the index, if it has one, since stores do not verify ranged reads. Each
    shard is pinned by its size and ETag, so its version does not change.

    Args:
        split: one whose `url` is not None. Where its index has no `checksums`, only the number of bytes is checked.

    Raises:
        DatasetError: by `fetch`: a shard is missing, has changed, or an image is wrong and stays wrong.
    """

    def __init__(self, split: "Split") -> None:
        assert split.url is not None
        self._bucket = Bucket(split.url)
        self._rows, self._shards, self._checksums = split.rows, split.shards, split.checksums
        self._etags: dict[int, str | None] = {}
        self.num_requests = self.num_bytes = 0  # so far; for measurements, not exact when threads race

    def read(self, images: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Return what is stored of each of `images`, read-only, (size,) each. Raises DatasetError: as `fetch`."""
        found = dict(self.fetch(np.unique(images)))
        return [found[image] for image in images.tolist()]

    def image(self, number: int) -> NDArray[np.uint8]:
        """Return what is stored of one image."""
        return self.read(np.array([number]))[0]

    def fetch(self, images: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield (image, its stored bytes, read-only, (size,)) for each of `images`, which are ascending."""
        runs = adjacent(self._rows, images)
        with dataset_errors():
            for run, contents in zip(runs, self._bucket.map(self._read_run, runs), strict=True):
                yield from zip(run, contents, strict=True)

    def _read_run(self, run: list[int]) -> list[NDArray[np.uint8]]:
        rows = self._rows[run]
        shard = int(rows["shard"][0])
        begin, end = int(rows["offset"][0]), int(rows["offset"][-1]) + int(rows["size"][-1])
        for _ in range(_ATTEMPTS):
            content = np.frombuffer(self.content(shard, begin, end), dtype=np.uint8)
            contents = [
                content[start - begin : start - begin + size]
                for start, size in zip(rows["offset"].tolist(), rows["size"].tolist(), strict=True)
            ]
            wrong = None if self._checksums is None else self._first_wrong(run, contents)
            if wrong is None:
                return contents
        assert wrong is not None
        image, found, expected = wrong
        raise DatasetError(
            f"image {image} of {self._bucket.url}/{self._shards[shard].name} came {_ATTEMPTS} times with CRC32C "
            f"{found:08x}, the index says {expected:08x}: copy that shard again, or index the dataset again"
        )

    def _first_wrong(self, run: list[int], contents: list[NDArray[np.uint8]]) -> tuple[int, int, int] | None:
        assert self._checksums is not None
        for image, content, expected in zip(run, contents, self._checksums[run].tolist(), strict=True):
            found = crc32c(content.data)
            if found != expected:
                return image, found, expected
        return None

    @dataset_errors()
    def content(self, shard: int, begin: int, end: int) -> memoryview:
        """Return bytes `begin` to `end` of a shard. Raises DatasetError: as `fetch`."""
        name, expected = self._shards[shard].name, self._shards[shard].num_bytes
        try:
            content, etag, size = self._bucket.read(name, begin, end, self._etags.get(shard))
        except MissingObjectError as error:
            raise DatasetError(f"{error}, dataset.json names it: copy the dataset's directory completely") from error
        except ChangedObjectError as error:
            raise DatasetError(f"{error}: start again with a dataset that stays as it is") from error
        if size != expected:
            raise DatasetError(
                f"{self._bucket.url}/{name} has {size} bytes, the index was made for {expected}: it is another "
                "version, copy shards and index together"
            )
        self._etags.setdefault(shard, etag)
        self.num_requests, self.num_bytes = self.num_requests + 1, self.num_bytes + len(content)
        return content
