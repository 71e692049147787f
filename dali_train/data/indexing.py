"""Building the index of a dataset, once: by the converter, or by ``tools/make_index.py`` for TFRecords of someone else's.

A walk over every shard locates the images and checks labels, framing and image headers, so that training need not.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from dali_train.data.index import INDEX_DTYPE, map_file
from dali_train.data.jpeg import JpegError, is_jpeg, parse_jpeg_header
from dali_train.data.manifest import (
    SPLITS,
    DatasetError,
    Encoding,
    Manifest,
    Shard,
    SplitManifest,
    SplitName,
    index_path,
    text_index_path,
    write_atomically,
)
from dali_train.data.tfrecord import Feature, RecordSpan, TFRecordError, parse_example, walk_records
from dali_train.progress import Progress

T = TypeVar("T")

_NUMBERED_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True, kw_only=True)
class IndexedShard:
    """All that is learnt from one shard. `labels` are as the file has them; `rows["label"]` is filled in later."""

    shard: Shard
    rows: NDArray[np.void]  # INDEX_DTYPE, (N,)
    labels: NDArray[np.int64]  # (N,)
    synsets: dict[int, str]  # label as in the file -> image/class/synset
    record_offsets: NDArray[np.uint64]  # (N + 1,): where each record begins, framing included, and the file's end
    encoding: Encoding

    def text_index(self) -> str:
        """DALI's, see `text_index_path`."""
        starts, ends = self.record_offsets[:-1], self.record_offsets[1:]
        return "".join(f"{start} {size}\n" for start, size in zip(starts.tolist(), (ends - starts).tolist(), strict=True))


def index_shard(path: Path, *, check_crc: bool) -> IndexedShard:
    """Walk one TFRecord file and locate its images. Sizes come from each image's own header, not from features;
    only bare pixels (image/format "RAW") have none, and their features must fit their number of bytes.

    Raises:
        TFRecordError: anything in the file that is not a whole, labelled image, with its place.
    """
    rows, labels, offsets = [], [], []
    synsets: dict[int, str] = {}
    encodings: set[Encoding] = set()
    content = memoryview(map_file(path))
    for record in walk_records(content, path, check_payload=check_crc):
        image = index_record(content, record, path)
        rows.append((image.start, image.size, 0, 0, image.height, image.width))
        labels.append(image.label)
        offsets.append(record.header)
        encodings.add(image.encoding)
        if len(encodings) > 1:
            raise TFRecordError(path, record.header, "the file mixes images with bare pixels (image/format RAW): keep one kind")
        if image.synset is not None and synsets.setdefault(image.label, image.synset) != image.synset:
            raise TFRecordError(
                path, record.header, f"label {image.label} belongs to {synsets[image.label]} before and to {image.synset} here"
            )
    if not rows:
        raise TFRecordError(path, 0, "no record: the file is empty; delete it if it does not belong to the dataset")
    (encoding,) = encodings
    return IndexedShard(
        shard=Shard(
            name=path.name, num_records=len(rows), num_bytes=len(content), crc32c=f"{crc32c(content):08x}" if check_crc else None
        ),
        rows=np.array(rows, dtype=INDEX_DTYPE),
        labels=np.array(labels, dtype=np.int64),
        synsets=synsets,
        record_offsets=np.array([*offsets, len(content)], dtype=np.uint64),
        encoding=encoding,
    )


@dataclass(frozen=True, slots=True)
class IndexedRecord:
    """Where one record's image lies, and what it is."""

    start: int  # of the image within the file, bytes
    size: int  # bytes
    height: int  # pixels
    width: int
    label: int  # as the record has it
    synset: str | None
    encoding: Encoding


def index_record(content: memoryview, record: RecordSpan, path: Path) -> IndexedRecord:
    """Raises TFRecordError: not a whole, labelled image."""
    features = parse_example(content, record, path)
    ((start, end),) = _single(features, "image/encoded", "bytes", path, record).spans
    (label,) = _single(features, "image/class/label", "int64", path, record).integers
    encoding: Encoding = "raw" if _text(content, features.get("image/format")) == "RAW" else "image"
    if encoding == "raw":
        (height,) = _single(features, "image/height", "int64", path, record).integers
        (width,) = _single(features, "image/width", "int64", path, record).integers
        expected = height * width * 3
        if min(height, width) < 1 or end - start != expected:
            raise TFRecordError(
                path, record.header, f"image/encoded has {end - start} bytes, {height} x {width} RGB pixels have {expected}"
            )
    else:
        height, width = _image_size(content[start:end], path, record)
    if max(height, width) > np.iinfo(INDEX_DTYPE["height"]).max:
        raise TFRecordError(path, record.header, f"image of {height} x {width} pixels: the index holds sides up to 65535")
    return IndexedRecord(start, end - start, height, width, label, _text(content, features.get("image/class/synset")), encoding)


def _image_size(encoded: memoryview, path: Path, record: RecordSpan) -> tuple[int, int]:
    """(height, width) in pixels from the image's header, before any EXIF rotation."""
    if is_jpeg(encoded):
        try:
            header = parse_jpeg_header(encoded)
        except JpegError as error:
            raise TFRecordError(path, record.header, f"image/encoded is not a JPEG that can be read: {error}") from error
        return header.height, header.width
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return image.height, image.width
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise TFRecordError(path, record.header, f"image/encoded is not an image that can be read ({error})") from error


def _text(content: memoryview, feature: Feature | None) -> str | None:
    """The feature's single string, None if it is another thing."""
    if feature is None or len(feature.spans) != 1:
        return None
    return bytes(content[slice(*feature.spans[0])]).decode(errors="replace")


def _single(features: dict[str, Feature], name: str, kind: str, path: Path, record: RecordSpan) -> Feature:
    feature = features.get(name)
    if feature is None:
        raise TFRecordError(
            path, record.header, f"feature {name} is missing; the record has {', '.join(sorted(features)) or 'none'}"
        )
    if feature.kind != kind:
        raise TFRecordError(path, record.header, f"feature {name} is a list of {feature.kind}, expected {kind}")
    count = len(feature.spans) + len(feature.integers)
    if count != 1:
        raise TFRecordError(path, record.header, f"feature {name} has {count} values, expected 1")
    return feature


def find_shards(root: Path, split: str) -> list[Path]:
    """A split's shards in order: ``SPLIT-00000-of-00042`` where such names exist, else every file in name order.

    Raises:
        DatasetError: numbered shards of which some are missing, or of two different totals.
    """
    directory = root / split
    if not directory.is_dir():
        return []
    files = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    numbered = [(match, path) for path in files if (match := _NUMBERED_SHARD.search(path.name))]
    if not numbered:
        return files
    totals = {int(match[2]) for match, _ in numbered}
    if len(totals) > 1:
        raise DatasetError(f"{directory} mixes shards of {' and '.join(map(str, sorted(totals)))}: keep one set of them")
    (total,) = totals
    missing = sorted(set(range(total)) - {int(match[1]) for match, _ in numbered})
    if missing:
        names = ", ".join(f"{number:05d}" for number in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise DatasetError(f"{directory} lacks {len(missing)} of {total} shards: {names}")
    return [path for _, path in numbered]


def build_index(
    root: Path,
    *,
    label_base: int = 1,
    num_classes: int | None = None,
    check_crc: bool = True,
    workers: int = 1,
    conversion: dict[str, Any] | None = None,
    class_names: Sequence[str] | None = None,
) -> Manifest:
    """Index every split found below `root`: the columnar index, DALI's text index and ``dataset.json``.

    Everything is read before anything is written, and ``dataset.json`` comes last: an error leaves the directory
    as it was.

    Args:
        label_base: the label of the first class in the records.
        num_classes: how many classes there are; by default as many as the largest label tells.
        check_crc: check every record's CRC, which reads all bytes. Without it only the framing is checked.
        workers: threads; each indexes whole shards.
        conversion: what ``dataset.json`` keeps about how the records were made.
        class_names: names of the classes in order; by default the records' synsets, or the class numbers.

    Raises:
        DatasetError, TFRecordError: the first fault found, with file and place.
    """
    if not root.is_dir():
        raise DatasetError(f"{root}: there is no such directory")
    shards = {split: paths for split in SPLITS if (paths := find_shards(root, split))}
    if not shards:
        raise DatasetError(f"{root} has no shard: expected TFRecord files in {root}/train or {root}/validation")
    indexed = _index_all(shards, check_crc=check_crc, workers=workers)

    largest = max(int(part.labels.max()) for parts in indexed.values() for part in parts)
    if num_classes is None:
        num_classes = max(largest - label_base + 1, 1)
    for split, parts in indexed.items():
        for path, part in zip(shards[split], parts, strict=True):
            _number_classes(path, part, label_base=label_base, num_classes=num_classes)
    if class_names is None:
        class_names = _class_names(indexed, label_base=label_base, num_classes=num_classes)

    return write_index(root, indexed, label_base=label_base, class_names=class_names, conversion=conversion or {})


def write_index(
    root: Path,
    indexed: dict[SplitName, list[IndexedShard]],
    *,
    label_base: int,
    class_names: Sequence[str],
    conversion: dict[str, Any],
) -> Manifest:
    """Write what `build_index` writes, ``dataset.json`` last, for shards whose ``rows["label"]`` are filled in.

    Raises:
        DatasetError: some shards hold images and others bare pixels.
    """
    encodings = {part.encoding: part.shard.name for parts in indexed.values() for part in parts}
    if len(encodings) > 1:
        raise DatasetError(
            f"{root}: {encodings['raw']} holds bare pixels and {encodings['image']} images: make two datasets of them"
        )
    for split, parts in indexed.items():
        for number, part in enumerate(parts):
            part.rows["shard"] = number
            write_atomically(text_index_path(root, split, part.shard.name), part.text_index().encode())
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate([part.rows for part in parts]))
        write_atomically(index_path(root, split), buffer.getvalue())
    (encoding,) = encodings
    manifest = Manifest(
        num_classes=len(class_names),
        class_names=tuple(class_names),
        label_base=label_base,
        splits={
            split: SplitManifest(num_records=sum(p.shard.num_records for p in parts), shards=tuple(p.shard for p in parts))
            for split, parts in indexed.items()
        },
        conversion=conversion,
        encoding=encoding,
    )
    manifest.write(root)
    return manifest


def _index_all(shards: dict[SplitName, list[Path]], *, check_crc: bool, workers: int) -> dict[SplitName, list[IndexedShard]]:
    paths = [path for split in shards.values() for path in split]
    total = sum(path.stat().st_size for path in paths)
    results: dict[Path, IndexedShard] = {}
    with Progress("indexing", total=total, unit="B") as progress:
        for path, part in map_shards(paths, partial(index_shard, check_crc=check_crc), workers=workers):
            results[path] = part
            progress.update(part.shard.num_bytes)
    return {split: [results[path] for path in split_paths] for split, split_paths in shards.items()}


def map_shards(paths: Sequence[Path], work: Callable[[Path], T], *, workers: int) -> Iterator[tuple[Path, T]]:
    """(path, what `work` made of it) in the order in which `workers` threads finish.

    Threads suffice: reading and checksums release the interpreter, and the rest takes 30 us a record.
    """
    with ThreadPoolExecutor(max(1, min(workers, len(paths)))) as pool:
        futures = {pool.submit(work, path): path for path in paths}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _number_classes(path: Path, part: IndexedShard, *, label_base: int, num_classes: int) -> None:
    classes = part.labels - label_base
    wrong = np.flatnonzero((classes < 0) | (classes >= num_classes))
    if len(wrong):
        first = int(wrong[0])
        offset = int(part.record_offsets[first])
        hint = "; labels that start at 0 need --label-base 0" if part.labels[first] == 0 and label_base == 1 else ""
        raise TFRecordError(
            path, offset,
            f"label {part.labels[first]} is out of range: {num_classes} classes from {label_base} "
            f"end at {label_base + num_classes - 1}{hint}",
        )  # fmt: skip
    part.rows["label"] = classes


def _class_names(indexed: dict[SplitName, list[IndexedShard]], *, label_base: int, num_classes: int) -> list[str]:
    names = [f"class {number}" for number in range(num_classes)]
    for parts in indexed.values():
        for part in parts:
            for label, synset in part.synsets.items():
                names[label - label_base] = synset
    return names
