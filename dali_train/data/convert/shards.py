"""Writing shards: complete and flushed under their final names, each with a note of what went into it.

Many threads write; a few others wait for the disk. Threads, not processes: decoding, checksums, reading and writing all
release the interpreter, and a thread costs no memory of its own. What remains under the interpreter's lock is about
60 us per image.
"""

import json
import os
import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.convert.image import EncodingOptions, MemoryBudget, StoredImage, prepare, reencode
from dali_train.data.convert.sources import Images, loaded_arrays
from dali_train.data.dataset.image_file import BATCH_PIXELS, BadImageError, DecodeChecker
from dali_train.data.dataset.index import INDEX_DTYPE
from dali_train.data.dataset.label_kind import LABEL_BASE
from dali_train.data.dataset.manifest import Encoding, Shard
from dali_train.data.dataset.tfrecord import Buffer, Value, encode_example, frame_record
from dali_train.data.dataset.write_index import IndexedShard
from dali_train.data.progress import Progress

_FLUSHERS = 4
_DECODED_BYTES = 300_000_000  # of images that are decoded at one time, whatever the number of workers

# Images of a source and what becomes of them; each record has 5 pieces, and the system writes up to 1,024 at once.
Batch = list[tuple[int, StoredImage | BadImageError]]


class StoppedError(Exception):
    """Another worker failed, or the user interrupted."""


@dataclass(frozen=True, kw_only=True)
class BadImage:
    """An image that was left out, and its location in the source."""

    file: str
    position: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """The content of a shard, kept next to the shards until the dataset is complete."""

    indexed: IndexedShard
    bad: tuple[BadImage, ...]  # left out
    counts: Counter[str]  # "re-encoded: CMYK JPEG" and the like -> images

    def save(self, path: Path) -> None:
        """Not flushed: a note that a power failure takes, or spoils, costs the work of one shard."""
        facts = {
            "shard": asdict(self.indexed.shard),
            "encoding": self.indexed.encoding,
            "bad": [asdict(bad) for bad in self.bad],
            "counts": self.counts,
        }
        partial = partial_path(path)
        assert self.indexed.checksums is not None
        with partial.open("wb") as file:
            np.savez(
                file,
                rows=self.indexed.rows,
                record_offsets=self.indexed.record_offsets,
                checksums=self.indexed.checksums,
                facts=np.frombuffer(json.dumps(facts).encode(), np.uint8),
            )
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "WrittenShard":
        """Raises one of `UNREADABLE_ARRAYS`: there is none, or it cannot be used."""
        with loaded_arrays(path) as arrays:
            facts = json.loads(arrays["facts"].tobytes())
            rows = arrays["rows"]
            indexed = IndexedShard(
                shard=Shard(**facts["shard"]),
                rows=rows,
                labels=rows["label"].astype(np.int64) + LABEL_BASE,
                synsets={},
                texts={},
                checksums=arrays["checksums"],
                record_offsets=arrays["record_offsets"],
                encoding=facts["encoding"],
            )
            bad = tuple(BadImage(**bad) for bad in facts["bad"])
            return cls(indexed=indexed, bad=bad, counts=Counter(facts["counts"]))


@dataclass(frozen=True)
class ShardWriter:
    """Writes shards, several at once in as many threads."""

    images: Images
    encoding: EncodingOptions
    class_names: Sequence[str]
    progress: Progress
    stop: threading.Event = field(default_factory=threading.Event)  # set: all threads end with StoppedError
    _budget: MemoryBudget = field(default_factory=lambda: MemoryBudget(_DECODED_BYTES))
    _local: threading.local = field(default_factory=threading.local)  # each thread's DecodeChecker

    def write(self, path: Path, numbers: NDArray[np.uint32]) -> WrittenShard:
        """Write the good ones of the images `numbers`, in this order, to `partial_path(path)`; `publish` does the rest.

        Raises:
            OSError: the disk is full, or another fault of the system.
            StoppedError: asked to stop.
        """
        rows, offsets, checksums, bad = [], [0], [], []
        counts: Counter[str] = Counter()
        encoding: Encoding = "image"
        crc = offset = 0
        with partial_path(path).open("wb", buffering=0) as file:
            for batch in self._batches(numbers):
                pieces: list[Buffer] = []
                for image, stored in batch:
                    if isinstance(stored, BadImageError):
                        listed = self.images[image]
                        bad.append(BadImage(file=listed.location, position=listed.offset, reason=str(stored)))
                        continue
                    record = frame_record(encode_example(stored.content, self._features(image, stored)))
                    start = offset + len(record[0]) + len(record[1])
                    rows.append((start, len(stored.content), 0, self.images.labels[image], stored.height, stored.width))
                    checksums.append(crc32c(stored.content))
                    offset += sum(map(len, record))
                    offsets.append(offset)
                    encoding = "raw" if stored.is_raw else "image"  # the same for all images of a source
                    if stored.reencoded is not None:
                        counts[f"re-encoded: {stored.reencoded}"] += 1
                    if stored.rotated:
                        counts["EXIF orientation not upright"] += 1
                    if stored.turned:
                        counts["turned upright, as their EXIF orientation says"] += 1
                    pieces += record
                for piece in pieces:
                    crc = crc32c(piece, crc)
                _write_all(file.fileno(), pieces)
                self.progress.update(len(batch), num_bytes=sum(map(len, pieces)))
        table = np.array(rows, dtype=INDEX_DTYPE)
        indexed = IndexedShard(
            shard=Shard(name=path.name, num_records=len(rows), num_bytes=offset, crc32c=f"{crc:08x}"),
            rows=table,
            labels=table["label"].astype(np.int64) + LABEL_BASE,
            synsets={},
            texts={},
            checksums=np.array(checksums, dtype=np.uint32),
            record_offsets=np.array(offsets, dtype=np.uint64),
            encoding=encoding,
        )
        return WrittenShard(indexed=indexed, bad=tuple(bad), counts=counts)

    def _features(self, image: int, stored: StoredImage) -> dict[str, Value]:
        label = int(self.images.labels[image])
        return {
            "image/format": stored.format,
            **self.images.label_kind.features(label, self.class_names),
            "image/filename": stored.name or self.images.name(image),
            "image/height": stored.height,
            "image/width": stored.width,
        }

    def _batches(self, numbers: NDArray[np.uint32]) -> Iterator[Batch]:
        """Yield the images as they are to be stored, in order. A batch is decoded and written as one."""
        batch: Batch = []
        pixels = 0
        for image in numbers.tolist():
            if self.stop.is_set():
                raise StoppedError
            try:
                stored: StoredImage | BadImageError = prepare(self.images.read(image), self.encoding, self._budget)
            except BadImageError as error:
                stored = error
            size = stored.height * stored.width if isinstance(stored, StoredImage) else 0
            if len(batch) == DecodeChecker.BATCH or pixels + size > BATCH_PIXELS:
                yield self._checked(batch, pixels)
                batch, pixels = [], 0
            batch.append((image, stored))
            pixels += size
        yield self._checked(batch, pixels)

    def _checked(self, batch: Batch, pixels: int) -> Batch:
        """Return `batch`, of `pixels` in all, without those that do not decode."""
        unchecked = [n for n, (_, stored) in enumerate(batch) if isinstance(stored, StoredImage) and stored.unchecked]
        if not unchecked or not self.encoding.decode_check:
            return batch
        if not hasattr(self._local, "checker"):
            self._local.checker = DecodeChecker()
        images = [stored for _, stored in (batch[n] for n in unchecked) if isinstance(stored, StoredImage)]
        contents = [image.content for image in images]
        sizes = np.array([(image.height, image.width) for image in images], np.int32)
        with self._budget.held(3 * pixels):  # one byte a pixel comes out, the decoder's own buffers come on top
            failures = self._local.checker.failures(contents, sizes)
        for failure in failures:
            number = unchecked[failure]
            try:  # PIL may read all of an image that DALI refuses
                rescued: StoredImage | BadImageError = reencode(contents[failure], self.encoding, self._budget)
            except BadImageError as error:
                rescued = error
            batch[number] = batch[number][0], rescued
        return batch


def partial_path(path: Path) -> Path:
    """Return where this process writes a file that is to become `path`: another one may be writing the same."""
    return path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}.partial")


def publish(path: Path) -> None:
    """Give a written shard its final name once it is on the disk. Raises OSError: the disk is full after all."""
    with partial_path(path).open("rb") as file:
        os.fsync(file.fileno())
    partial_path(path).replace(path)


def _write_all(descriptor: int, pieces: Sequence[Buffer]) -> None:
    """Write with one system call for all, and no copy of an image."""
    missing = sum(map(len, pieces)) - os.writev(descriptor, pieces)
    if missing:  # cut short, by a disk that becomes full or a signal
        rest = memoryview(b"".join(pieces))[-missing:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def write_shards(
    jobs: Sequence[tuple[Path, NDArray[np.uint32]]],
    writer: ShardWriter,
    *,
    finish: Callable[[Path, WrittenShard], None],
    workers: int,
) -> None:
    """Write each job's images to its path.

    Args:
        finish: called when a shard lies flushed under its final name, from any thread.

    Raises:
        The first error of any thread; all others have ended by then.
    """

    def write(path: Path, images: NDArray[np.uint32]) -> Future[None]:
        return flushers.submit(flush, path, writer.write(path, images))

    def flush(path: Path, shard: WrittenShard) -> None:
        publish(path)
        finish(path, shard)

    with ThreadPoolExecutor(_FLUSHERS) as flushers, ThreadPoolExecutor(workers) as pool:
        pending: set[Future[Any]] = {pool.submit(write, *job) for job in jobs}
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                pending |= {flushing for future in done if (flushing := future.result()) is not None}
        except BaseException:
            writer.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
