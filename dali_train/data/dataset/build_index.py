"""Building the index of a dataset once: by the converter, or by ``dali-train data index`` for existing TFRecords.

A walk over every shard locates the images and checks labels, framing and image headers, so that training need not.
Shards are found in the layouts in use and linked into ours. Those in an object store are fetched one by one, read and
discarded.
"""

import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.dataset.image_file import BadImageError, check_size, image_size
from dali_train.data.dataset.index import INDEX_DTYPE, map_array, map_file
from dali_train.data.dataset.manifest import (
    IMAGE_KEY,
    LABEL_KEY,
    MAX_CLASSES,
    SPLITS,
    Encoding,
    Manifest,
    Shard,
    SplitManifest,
    SplitName,
    check_name,
    checksums_path,
    index_path,
    split_of_folder,
    text_index_path,
)
from dali_train.data.dataset.passed_over import HIDDEN, PassedOver, is_hidden, warn_missing, warn_passed_over
from dali_train.data.dataset.tfrecord import Feature, RecordSpan, TFRecordError, parse_example, walk_records
from dali_train.data.progress import Progress
from dali_train.errors import DatasetError, NoDatasetError, RunError
from dali_train.files import NO_SYMLINKS, temporary_directory, write_atomically
from dali_train.runtime.object_store import Bucket, MissingObjectError, StoredObject

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


@dataclass(frozen=True, kw_only=True)
class IndexedShard:
    """The index of one shard. `labels` are those in the file; `rows["label"]` is filled in later."""

    shard: Shard
    rows: NDArray[np.void]  # INDEX_DTYPE, (N,)
    labels: NDArray[np.int64]  # (N,)
    synsets: dict[int, str]  # label as in the file -> image/class/synset
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
    synsets: dict[int, str] = {}
    encodings: set[Encoding] = set()
    content = memoryview(map_file(path))
    for record in walk_records(content, path, check_payload=check_crc):
        row, label, synset, encoding = index_record(content, record, path, features)
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
        checksums=np.array(checksums, dtype=np.uint32) if check_crc else None,
        record_offsets=np.array([*offsets, len(content)], dtype=np.uint64),
        encoding=encoding,
    )


def index_record(
    content: memoryview, record: RecordSpan, path: Path, names: Features = DEFAULT_FEATURES
) -> tuple[tuple[int, ...], int, str | None, Encoding]:
    """Return the record's row of the index, still without shard and class, its label, its synset and its encoding.

    Raises:
        TFRecordError: not a complete, labelled image that training can decode, as far as its header shows.
    """
    features = parse_example(content, record, path)
    ((start, end),) = _single(features, names.image, "bytes", path, record).spans
    (label,) = _single(features, names.label, "int64", path, record).integers
    encoding: Encoding = "raw" if _text(content, features.get("image/format")) == "RAW" else "image"
    try:
        if encoding == "raw":
            (height,) = _single(features, "image/height", "int64", path, record).integers
            (width,) = _single(features, "image/width", "int64", path, record).integers
            check_size(height, width)
            expected = height * width * 3
            if end - start != expected:
                raise BadImageError(f"has {end - start} bytes, {height} x {width} RGB pixels have {expected}")
        else:
            height, width = image_size(content[start:end])
    except BadImageError as error:
        raise TFRecordError(path, record.header, f"{names.image} {error}") from error
    synset = _text(content, features.get("image/class/synset")) or None
    return (start, end - start, 0, 0, height, width), label, synset, encoding


def _text(content: memoryview, feature: Feature | None) -> str | None:
    """Return the feature's single string, None if it is another thing."""
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


def build_index(
    root: Path,
    *,
    out: Path | None = None,
    label_base: int = 1,
    num_classes: int | None = None,
    features: Features = DEFAULT_FEATURES,
    check_crc: bool = True,
    workers: int = 1,
    fetch: Callable[[Path], AbstractContextManager[Path]] = nullcontext,
    shows_progress: bool = True,
) -> Manifest:
    """Index every split found below `root`: the columnar index, DALI's text index and ``dataset.json``.

    Everything is read before anything is written: an error leaves the directory unchanged. Shards outside ``train`` and
    ``validation`` of the dataset's directory are linked there.

    Args:
        out: directory of the dataset, for shards in a directory that cannot be written; by default `root`.
        label_base: the label of the first class in the records.
        num_classes: how many classes there are; by default the largest label decides.
        features: the names of the features to read.
        check_crc: check every record's CRC, which reads all bytes. Without it only the framing is checked.
        workers: threads; each indexes one shard at a time.
        fetch: called with each shard's path; the file is read within.
        shows_progress: on stderr.

    Raises:
        DatasetError, TFRecordError: the first fault found, with file and location.
    """
    if num_classes is not None and not 1 <= num_classes <= MAX_CLASSES:
        raise DatasetError(f"--num-classes is {num_classes}: use 1 to {MAX_CLASSES:,}")
    if abs(label_base) > np.iinfo(np.int32).max:
        raise DatasetError(f"--label-base is {label_base}: use the smallest label of the records, usually 0 or 1")
    out = root if out is None else out
    shards = find_splits(root)

    def index(path: Path) -> IndexedShard:
        with fetch(path):
            return index_shard(path, check_crc=check_crc, features=features)

    total = sum(path.stat().st_size for paths in shards.values() for path in paths)
    with Progress("indexing", total=total, unit="B") if shows_progress else nullcontext() as progress:
        indexed = _index_all(shards, index, progress, workers=workers)
    if num_classes is None:
        num_classes = _count_classes(shards, indexed, label_base)
    for split, parts in indexed.items():
        for path, part in zip(shards[split], parts, strict=True):
            _number_classes(path, part, label_base=label_base, num_classes=num_classes)
    names = _class_names(indexed, label_base=label_base, num_classes=num_classes)
    _common_encoding(root, indexed)  # before anything is written
    link_shards(out, shards)
    conversion = _conversion_of(out, indexed) or _conversion_of(root, indexed)
    return write_index(out, indexed, label_base=label_base, class_names=names, conversion=conversion, features=features)


def _conversion_of(root: Path, indexed: Mapping[SplitName, Sequence[IndexedShard]]) -> dict[str, Any]:
    """Return what the ``dataset.json`` of `root` says about how these same shards were made, such as whether
    photographs were turned upright, which predicting asks; nothing if it is missing or of other shards."""
    try:
        earlier = Manifest.read(root)
    except DatasetError:
        return {}
    old = [(split, shard) for split, facts in earlier.splits.items() for shard in facts.shards]
    new = [(split, part.shard) for split, parts in indexed.items() for part in parts]
    same = len(old) == len(new) and all(
        (split, one.name, one.num_records, one.num_bytes) == (its_split, other.name, other.num_records, other.num_bytes)
        and (one.crc32c == other.crc32c or None in (one.crc32c, other.crc32c))  # None: not all of it was read
        for (split, one), (its_split, other) in zip(old, new, strict=False)
    )
    return earlier.conversion if same else {}


def write_index(
    root: Path,
    indexed: dict[SplitName, list[IndexedShard]],
    *,
    label_base: int,
    class_names: Sequence[str],
    conversion: dict[str, Any] | None = None,
    features: Features = DEFAULT_FEATURES,
) -> Manifest:
    """Write the files of `build_index`, for shards whose ``rows["label"]`` are filled in.

    ``dataset.json`` is removed first and written last, with the checksums of the indexes, so a kill in between leaves
    no dataset instead of a mixture of two.

    Args:
        conversion: what ``dataset.json`` keeps about how the records were made.

    Raises:
        DatasetError: some shards hold images and others raw pixels.
    """
    encoding = _common_encoding(root, indexed)
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
    manifest = Manifest(
        num_classes=len(class_names),
        class_names=tuple(class_names),
        label_base=label_base,
        splits=splits,
        conversion=conversion or {},
        encoding=encoding,
        image_key=features.image,
        label_key=features.label,
    )
    manifest.write(root)
    return manifest


def write_array(path: Path, array: NDArray[Any]) -> str:
    """Write an array as ``.npy``. Return the file's CRC32C, eight hex digits."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_atomically(path, buffer.getvalue())
    return f"{crc32c(buffer.getbuffer()):08x}"


def unused_classes(root: Path) -> list[int]:
    """Return the numbers of the classes without images in any split."""
    manifest = Manifest.read(root)
    used = np.zeros(manifest.num_classes, dtype=np.bool_)
    for split in manifest.splits:
        used[map_array(index_path(root, split))["label"]] = True
    return np.flatnonzero(~used).tolist()


def _common_encoding(root: Path, indexed: dict[SplitName, list[IndexedShard]]) -> Encoding:
    encodings = {part.encoding: part.shard.name for parts in indexed.values() for part in parts}
    if len(encodings) > 1:
        raise DatasetError(
            f"{root}: {encodings['raw']} holds raw pixels and {encodings['image']} images: make two datasets of them"
        )
    return next(iter(encodings))


def _index_all(
    shards: dict[SplitName, list[Path]],
    index: Callable[[Path], IndexedShard],
    progress: Progress | None,
    *,
    workers: int,
) -> dict[SplitName, list[IndexedShard]]:
    indexed: dict[SplitName, list[IndexedShard]] = {split: [] for split in shards}
    for split, paths in shards.items():
        for part in map_shards(paths, index, workers=workers):
            indexed[split].append(part)
            if progress is not None:
                progress.update(part.shard.num_bytes)
    return indexed


def map_shards(shards: Sequence[S], work: Callable[[S], T], *, workers: int) -> Iterator[T]:
    """Yield the result of `work` for each of `shards`, in order. An error is raised in its turn; after that
    no other shard is begun.

    Threads are enough: reading and checksums release the GIL, and the rest takes 30 us per record.
    """
    with ThreadPoolExecutor(max(1, min(workers, len(shards)))) as pool:
        yield from pool.map(work, shards)


def _count_classes(
    shards: dict[SplitName, list[Path]], indexed: dict[SplitName, list[IndexedShard]], label_base: int
) -> int:
    """Return one more than the largest class number. Raises TFRecordError: a label that implies absurdly many."""
    largest = 0
    for split, parts in indexed.items():
        for path, part in zip(shards[split], parts, strict=True):
            record = int(part.labels.argmax())
            label = int(part.labels[record])
            if label - label_base >= MAX_CLASSES:
                offset = int(part.record_offsets[record])
                raise TFRecordError(
                    path, offset, f"label {label} would make more than {MAX_CLASSES:,} classes: not a class number"
                )
            largest = max(largest, label - label_base)
    return largest + 1


def _number_classes(path: Path, part: IndexedShard, *, label_base: int, num_classes: int) -> None:
    # Compared before anything is subtracted: labels may be any 64-bit number.
    wrong = np.flatnonzero((part.labels < label_base) | (part.labels >= label_base + num_classes))
    if len(wrong):
        first = int(wrong[0])
        offset = int(part.record_offsets[first])
        hint = "; labels that start at 0 need --label-base 0" if part.labels[first] == 0 and label_base == 1 else ""
        raise TFRecordError(
            path,
            offset,
            f"label {part.labels[first]} is out of range: {num_classes} classes from {label_base} "
            f"end at {label_base + num_classes - 1}{hint}",
        )
    part.rows["label"] = part.labels - label_base


def _class_names(indexed: dict[SplitName, list[IndexedShard]], *, label_base: int, num_classes: int) -> list[str]:
    names = [f"class {number}" for number in range(num_classes)]
    for parts in indexed.values():
        for part in parts:
            for label, synset in part.synsets.items():
                names[label - label_base] = synset
    return names


# The folders of a split, or the beginnings of its files' names where all lie in one folder, are called by this.
_WORDS: dict[SplitName, str] = {"train": "train", "validation": "val"}
_NUMBERED_SHARD = re.compile(r"-(\d+)-of-(\d+)(?:\.tfrec(?:ord)?s?)?$")


def find_splits(root: Path) -> dict[SplitName, list[Path]]:
    """Find the shards of each split in order, in ``ROOT/train`` and ``ROOT/validation`` or ``ROOT/val``, or as
    ``ROOT/train-*`` and ``ROOT/validation-*`` or ``ROOT/val-*``. Files of others are passed over, with a warning.

    Raises:
        DatasetError: no shards, a name that is not UTF-8, the same split in two places, or `_in_order`'s errors.
    """
    if not root.is_dir():
        raise DatasetError(f"{root}: this directory does not exist")
    passed_over: Counter[PassedOver] = Counter()
    flat = [path for path in _files(root, Counter()) if _NUMBERED_SHARD.search(path.name) or "tfrec" in path.name]
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()]
    splits: dict[SplitName, list[Path]] = {}
    for split, word in _WORDS.items():
        candidates: dict[str, list[Path]] = defaultdict(list)
        for folder in folders:
            if split_of_folder(folder.name) == word:
                candidates[str(folder)] = _only_shards(folder, passed_over)
        for path in flat:
            prefix, dash, _ = path.name.partition("-")
            if dash and split_of_folder(prefix) == word:
                candidates[str(root / f"{prefix}-*")].append(path)
        locations = {location: paths for location, paths in candidates.items() if paths}
        # An earlier run may have left a hard link to the same file.
        if len({frozenset(path.resolve() for path in paths) for paths in locations.values()}) > 1:
            raise DatasetError(f"{root}: the {split} split is in {' and in '.join(locations)}: keep one of them")
        if locations:
            location, paths = next(iter(locations.items()))
            for path in paths:
                check_name(path.name)
            splits[split] = _in_order(location, paths, passed_over)
    for folder in folders:
        if splits and split_of_folder(folder.name) == "test":
            passed_over[PassedOver(folder.name, "in a test split, which is not read")] += len(_files(folder, Counter()))
    warn_passed_over(root, +passed_over)
    if not splits:
        expected = f"expected TFRecord files in {root}/train or {root}/validation, or as {root}/train-*"
        raise NoDatasetError(f"{root} has no shard, {expected}", root, indexing=True)
    return splits


def link_shards(root: Path, shards: dict[SplitName, list[Path]]) -> None:
    """Make each shard appear as ``ROOT/SPLIT/NAME``: those elsewhere are linked.

    Raises:
        DatasetError: other files are in the way.
    """
    for split, paths in shards.items():
        directory = root / split
        if directory == paths[0].parent:
            continue
        names = {path.name for path in paths}
        unexpected = sorted({path.name for path in directory.iterdir()} - names) if directory.is_dir() else []
        if unexpected:
            raise DatasetError(
                f"{directory} holds {', '.join(unexpected[:5])}, which is not of this dataset: use an empty --out"
            )
        directory.mkdir(parents=True, exist_ok=True)
        for path in paths:
            link = directory / path.name
            if link.exists() and link.samefile(path):
                continue
            if link.exists() or link.is_symlink():
                raise DatasetError(f"{link} is there already and is not {path}: use an empty --out")
            # Within one directory tree the links survive a move of it.
            inside = path.absolute().is_relative_to(root.absolute())
            try:
                link.symlink_to(os.path.relpath(path.absolute(), directory.absolute()) if inside else path.resolve())
            except OSError as error:
                if error.errno not in NO_SYMLINKS:
                    raise
                raise DatasetError(
                    f"{directory}: its file system has no symbolic links ({error.strerror}), which lead to shards "
                    "elsewhere: name an --out on another file system, or move the shards there"
                ) from error


def _files(directory: Path, passed_over: Counter[PassedOver]) -> list[Path]:
    """Return the files in a directory by name, and count what else is there, other than folders."""
    files = []
    for path in sorted(directory.iterdir()):
        if is_hidden(path.name):
            passed_over[PassedOver(directory.name, HIDDEN)] += 1
        elif path.is_file():
            files.append(path)
        elif not path.is_dir():
            passed_over[PassedOver(directory.name, "link to nothing, FIFO or device")] += 1
    return files


def _only_shards(directory: Path, passed_over: Counter[PassedOver]) -> list[Path]:
    """Return the TFRecord files of a split's folder: those that are called so or numbered, else all files."""
    files = _files(directory, passed_over)
    shards = [path for path in files if _NUMBERED_SHARD.search(path.name) or ".tfrec" in path.name]
    for path in files if shards else []:
        if path not in shards:
            passed_over[PassedOver.by_suffix(directory.name, path.name)] += 1
    return shards or files


def _in_order(location: str, files: list[Path], passed_over: Counter[PassedOver]) -> list[Path]:
    """``SPLIT-00000-of-00042`` where such names exist, else every file in the order of the names.

    Raises:
        DatasetError: numbered shards of which some are missing, or of two different totals.
    """
    numbered = {path: match for path in files if (match := _NUMBERED_SHARD.search(path.name))}
    if not numbered:
        warn_missing(location, [path.name for path in files])
        return files
    totals = {int(match[2]) for match in numbered.values()}
    if len(totals) > 1:
        raise DatasetError(f"{location} mixes shards of {' and '.join(map(str, sorted(totals)))}: keep one set of them")
    (total,) = totals
    there = {int(match[1]) for match in numbered.values()}
    first = 1 if total in there else 0  # some count from 1
    missing = sorted({*range(first, first + total)} - there)
    if missing:
        width = len(next(iter(numbered.values()))[1])
        names = ", ".join(f"{number:0{width}d}" for number in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise DatasetError(f"{location} lacks {len(missing)} of {total} shards: {names}")
    passed_over[PassedOver(Path(location).name, "without a number, beside shards that have one")] += len(files) - len(
        numbered
    )
    return sorted(numbered, key=lambda path: int(numbered[path][1]))


Fetch = Callable[[Path], AbstractContextManager[Path]]


@contextmanager
def bucket_as_directory(url: str) -> Iterator[tuple[Path, Fetch]]:
    """Yield a directory that looks like the dataset at `url`, see `objects_as_files`. At the end the index written
    there is uploaded to `url`, dataset.json last.

    Raises:
        DatasetError, RunError: also those that are raised within, with the URL in place of the directory.
    """
    if url.startswith("http"):
        raise DatasetError(f"{url}: a server of this kind is only read; index the dataset where it can be written")
    bucket = Bucket(url)
    objects = {name: found for split in SPLITS for name, found in bucket.listing(f"{split}/").items()}
    if not objects:
        raise DatasetError(f"{url} has no objects in train/ or validation/, where a dataset has its shards")
    with objects_as_files(bucket, objects) as (directory, fetch):
        with suppress(MissingObjectError):  # an earlier index, see `_conversion_of`
            (directory / "dataset.json").write_bytes(bucket.read_all("dataset.json"))
        yield directory, fetch
        upload_index(directory, bucket)


def upload_index(directory: Path, bucket: Bucket) -> None:
    """Upload the index in a directory, and the list of images that it leaves out; dataset.json last."""
    index = [path for pattern in ("index/*", "idx_files/*/*", "quarantine.jsonl") for path in directory.glob(pattern)]
    for path in (*index, directory / "dataset.json"):
        bucket.upload(str(path.relative_to(directory)), path)


@contextmanager
def objects_as_files(bucket: Bucket, objects: Mapping[str, StoredObject]) -> Iterator[tuple[Path, Fetch]]:
    """Yield a directory with a file for each of these objects, and a function that fetches one: a file has its object's
    content only while it is fetched, and only the version that was listed.

    Raises:
        DatasetError, RunError: those that are raised within, with the URL in place of the directory.
    """
    with temporary_directory() as directory:

        @contextmanager
        def fetch(path: Path) -> Iterator[Path]:
            name = str(path.relative_to(directory))
            size, etag, _ = objects[name]
            path.unlink()
            bucket.download(name, path, size, etag=etag)
            yield path
            path.unlink()  # not made shorter: it may still be mapped
            _stand_in(path, size)

        try:
            for name, found in objects.items():
                _stand_in(directory / name, found.num_bytes)
            yield directory, fetch
        except (DatasetError, RunError) as error:
            kind = DatasetError if isinstance(error, DatasetError) else RunError
            raise kind(str(error).replace(str(directory), bucket.url)) from error


def _stand_in(path: Path, size: int) -> None:
    """Make a sparse file of this size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)
