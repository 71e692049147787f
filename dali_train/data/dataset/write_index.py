"""Writing the index of a dataset, once: where each image lies in its shard, its class and its size.

A walk over a shard locates its images and checks labels, framing and image headers, so that training need not.
"""

import io
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.dataset.image_file import BadImageError, check_size, image_size
from dali_train.data.dataset.index import INDEX_DTYPE, map_file
from dali_train.data.dataset.label_kind import CLASSES, LABEL_KEY, LabelKind
from dali_train.data.dataset.manifest import (
    IMAGE_KEY,
    SPLITS,
    Encoding,
    Manifest,
    Shard,
    SplitManifest,
    SplitName,
    checksums_path,
    index_path,
    text_index_path,
)
from dali_train.data.dataset.tfrecord import Feature, RecordSpan, TFRecordError, parse_example, walk_records
from dali_train.errors import DatasetError
from dali_train.files import write_atomically

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Features:
    """The names of the features that hold a record's image and its label."""

    image: str = IMAGE_KEY
    label: str = LABEL_KEY

    @classmethod
    def of(cls, manifest: Manifest) -> "Features":
        return cls(image=manifest.image_key, label=manifest.label_key)


DEFAULT_FEATURES = Features()
_MOST_TEXTS = 2  # of a label: captions differ with each image
TEXT_KEY = "image/class/text"
_CLASS = f"the class's number (its name goes into {TEXT_KEY})"
_NAMED = "where names are the labels, `dali-train data convert tfrecord --source DIR --label-key {} --out DATASET`"
_SIDES = ("image/height", "image/width")  # in pixels, of records with raw ones


@dataclass(frozen=True, kw_only=True)
class IndexedShard:
    """The index of one shard. `labels` are those in the file; `rows["label"]` is filled in later."""

    shard: Shard
    rows: NDArray[np.void]  # INDEX_DTYPE, (N,)
    labels: NDArray[np.int64]  # (N,)
    synsets: dict[int, str]  # label as in the file -> image/class/synset
    texts: dict[int, list[str]]  # label as in the file -> its first two different image/class/text, [] without any
    checksums: NDArray[np.uint32] | None  # CRC32C of each image's bytes, (N,); None: they were not read
    record_offsets: NDArray[np.uint64]  # (N + 1,): where each record begins, framing included, and the file's end
    encoding: Encoding


def text_index(record_offsets: NDArray[np.uint64]) -> bytes:
    """Return DALI's text index, see `text_index_path`, of a shard with `IndexedShard.record_offsets`."""
    starts, sizes = record_offsets[:-1].tolist(), np.diff(record_offsets).tolist()
    return "".join(f"{start} {size}\n" for start, size in zip(starts, sizes, strict=True)).encode()


def index_shard(path: Path, *, check_crc: bool, features: Features = DEFAULT_FEATURES) -> IndexedShard:
    """Walk one TFRecord file and locate its images. Sizes come from each image's own header, not from features;
    only raw pixels (image/format "RAW") have none, and their features must fit their number of bytes.

    Raises:
        TFRecordError: anything in the file that is not a complete, labelled image, with its location.
    """
    rows, labels, checksums, offsets = [], [], [], []
    synsets, texts = dict[int, str](), dict[int, list[str]]()
    encodings: set[Encoding] = set()
    content = memoryview(map_file(path))
    for record in walk_records(content, path, check_payload=check_crc):
        row, label, synset, text, encoding = index_record(content, record, path, features)
        rows.append(row)
        labels.append(label)
        if check_crc:
            start, size = row[:2]
            checksums.append(crc32c(content[start : start + size]))
        offsets.append(record.header)
        encodings.add(encoding)
        if len(encodings) > 1:
            raise TFRecordError(
                path, record.header, "the file mixes images with raw pixels (image/format RAW): keep one kind"
            )
        if synset is not None and synsets.setdefault(label, synset) != synset:
            raise TFRecordError(
                path, record.header, f"label {label} belongs to {synsets[label]} before and to {synset} here"
            )
        texts_here = texts.setdefault(label, [])
        if text and text not in texts_here and len(texts_here) < _MOST_TEXTS:
            texts_here.append(text)
    if not rows:
        raise TFRecordError(path, 0, "no record: the file is empty; delete it if it does not belong to the dataset")
    return IndexedShard(
        shard=Shard(
            name=path.name,
            num_records=len(rows),
            num_bytes=len(content),
            crc32c=f"{crc32c(content):08x}" if check_crc else None,
        ),
        rows=np.array(rows, dtype=INDEX_DTYPE),
        labels=np.array(labels, dtype=np.int64),
        synsets=synsets,
        texts=texts,
        checksums=np.array(checksums, dtype=np.uint32) if check_crc else None,
        record_offsets=np.array([*offsets, len(content)], dtype=np.uint64),
        encoding=encoding,
    )


def index_record(
    content: memoryview, record: RecordSpan, path: Path, names: Features = DEFAULT_FEATURES
) -> tuple[tuple[int, ...], int, str | None, str, Encoding]:
    """Return the record's row of the index, still without shard and class, its label, its synset, its class's name in
    words and its encoding.

    Raises:
        TFRecordError: not a complete, labelled image that training can decode, as far as its header shows.
    """
    features = parse_example(content, record, path)
    ((start, end),) = _single(features, names.image, "bytes", path, record, "the image file").spans
    (label,) = _single(features, names.label, "int64", path, record, _CLASS).integers
    encoding: Encoding = "raw" if _text(content, features.get("image/format")) == "RAW" else "image"
    try:
        if encoding == "raw":
            (height,) = _single(features, _SIDES[0], "int64", path, record).integers
            (width,) = _single(features, _SIDES[1], "int64", path, record).integers
            check_size(height, width)
            expected = height * width * 3
            if end - start != expected:
                raise BadImageError(f"has {end - start} bytes, {height} x {width} RGB pixels have {expected}")
        else:
            height, width = image_size(content[start:end])
    except BadImageError as error:
        raise TFRecordError(path, record.header, f"{names.image} {error}") from error
    synset, text = (_text(content, features.get(f"image/class/{name}")) for name in ("synset", "text"))
    return (start, end - start, 0, 0, height, width), label, synset or None, text or "", encoding


def _text(content: memoryview, feature: Feature | None) -> str | None:
    """Return the feature's single string, None if it is another thing."""
    if feature is None or len(feature.spans) != 1:
        return None
    return bytes(content[slice(*feature.spans[0])]).decode(errors="replace")


def _single(
    features: dict[str, Feature], name: str, kind: str, path: Path, record: RecordSpan, what: str = "the number"
) -> Feature:
    feature = features.get(name)
    if feature is None:
        there = ", ".join(sorted(features)) or "none"
        remedy = ": name image and label with --image-key and --label-key of data index" if name not in _SIDES else ""
        remedy += f"; {_NAMED.format(TEXT_KEY)}" if what == _CLASS and TEXT_KEY in features else ""
        raise TFRecordError(path, record.header, f"feature {name} is missing; the record has {there}{remedy}")
    if feature.kind != kind:
        remedy = f"; {_NAMED.format(shlex.quote(name))}" if what == _CLASS and feature.kind == "bytes" else ""
        problem = f"feature {name} is a list of {feature.kind}, expected {kind}: write {what} as {kind}{remedy}"
        raise TFRecordError(path, record.header, problem)
    count = len(feature.spans) + len(feature.integers)
    if count != 1:
        raise TFRecordError(path, record.header, f"feature {name} has {count} values, expected 1")
    return feature


def write_index(
    root: Path,
    indexed: dict[SplitName, list[IndexedShard]],
    *,
    label_base: int,
    class_names: Sequence[str],
    conversion: dict[str, Any] | None = None,
    label_kind: LabelKind = CLASSES,
    features: Features | None = None,
) -> Manifest:
    """Write the columnar index, DALI's text index and ``dataset.json``.

    ``dataset.json`` is removed first and written last, with the checksums of the indexes, so a kill in between leaves
    no dataset instead of a mixture of two.

    Args:
        indexed: the shards of each split, whose ``rows["label"]`` are filled in.
        conversion: what ``dataset.json`` keeps about how the records were made.
        label_kind: of the labels.
        features: those of the records; None: as a conversion calls them.

    Raises:
        DatasetError: some shards hold images and others raw pixels.
    """
    encoding = common_encoding(root, indexed)
    features = features or Features(label=label_kind.label_key)
    (root / "dataset.json").unlink(missing_ok=True)
    splits: dict[str, SplitManifest] = {}
    for split, parts in indexed.items():
        for number, part in enumerate(parts):
            part.rows["shard"] = number
            write_atomically(text_index_path(root, split, part.shard.name), text_index(part.record_offsets))
        known = [part.checksums for part in parts if part.checksums is not None]
        if len(known) < len(parts):
            checksums_path(root, split).unlink(missing_ok=True)
        splits[split] = SplitManifest(
            num_records=sum(part.shard.num_records for part in parts),
            shards=tuple(part.shard for part in parts),
            index_crc32c=write_array(index_path(root, split), np.concatenate([part.rows for part in parts])),
            image_checksums_crc32c=write_array(checksums_path(root, split), np.concatenate(known))
            if len(known) == len(parts)
            else None,
        )
    remove_other_indexes(root, splits)
    manifest = Manifest(
        num_classes=len(class_names),
        class_names=tuple(class_names),
        label_base=label_base,
        splits=splits,
        conversion=conversion or {},
        encoding=encoding,
        image_key=features.image,
        label_key=features.label,
        **label_kind.manifest_fields(),
    )
    manifest.write(root)
    return manifest


def remove_other_indexes(root: Path, splits: Collection[str]) -> None:
    """Remove what an earlier index has of splits that are not among `splits`."""
    for other in {*SPLITS} - {*splits}:
        for path in (
            index_path(root, other),
            checksums_path(root, other),
            *text_index_path(root, other, "*").parent.glob("*.idx"),
        ):
            path.unlink(missing_ok=True)


def write_array(path: Path, array: NDArray[Any]) -> str:
    """Write an array as ``.npy``. Return the file's CRC32C, eight hex digits."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, np.lib.format.header_data_from_array_1_0(array))
    header, content = buffer.getvalue(), np.ascontiguousarray(array).view(np.uint8).data
    write_atomically(path, header, content)  # not joined: of 100 million images an index has 2.4 GB
    return f"{crc32c(content, crc32c(header)):08x}"


def common_encoding(root: Path, indexed: dict[SplitName, list[IndexedShard]]) -> Encoding:
    encodings = {part.encoding: part.shard.name for parts in indexed.values() for part in parts}
    if len(encodings) > 1:
        raise DatasetError(
            f"{root}: {encodings['raw']} holds raw pixels and {encodings['image']} images: make two datasets of them"
        )
    return next(iter(encodings))


def map_shards(shards: Sequence[S], work: Callable[[S], T], *, workers: int) -> Iterator[T]:
    """Yield the result of `work` for each of `shards`, in order. An error is raised in its turn; after that
    no other shard is begun.

    Threads are enough: reading and checksums release the GIL, and the rest takes 30 us per record.
    """
    with ThreadPoolExecutor(max(1, min(workers, len(shards)))) as pool:
        yield from pool.map(work, shards)
