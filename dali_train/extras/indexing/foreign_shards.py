"""Indexing TFRecords that others have written: ``dali-train data index``.

A walk over every shard locates the images and checks labels, framing and image headers, so that training need not.
Shards are found in the layouts in use and linked into ours. Those in an object store are fetched one by one, read and
discarded.
"""

import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from dali_train.data.dataset.index import map_array
from dali_train.data.dataset.manifest import (
    MAX_CLASSES,
    SPLITS,
    Manifest,
    SplitName,
    SplitWord,
    before_split_word,
    check_name,
    index_path,
    read_class_names,
    split_of_folder,
    split_word,
    splits_of_words,
)
from dali_train.data.dataset.packed_files import not_a_directory
from dali_train.data.dataset.passed_over import (
    HIDDEN,
    TEST_SPLIT,
    PassedOver,
    is_hidden,
    warn_missing,
    warn_passed_over,
)
from dali_train.data.dataset.tfrecord import TFRecordError
from dali_train.data.dataset.write_index import (
    DEFAULT_FEATURES,
    Features,
    IndexedShard,
    common_encoding,
    index_shard,
    map_shards,
    write_index,
)
from dali_train.data.progress import Progress
from dali_train.errors import DatasetError, NoDatasetError, RunError
from dali_train.extras.formats.listing import compare_names
from dali_train.files import NO_SYMLINKS, temporary_directory
from dali_train.runtime.object_store import Bucket, MissingObjectError, StoredObject
from dali_train.text import printable, shortened

_log = logging.getLogger(__name__)


def build_index(
    root: Path,
    *,
    out: Path | None = None,
    label_base: int = 1,
    num_classes: int | None = None,
    class_names: Path | None = None,
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
        class_names: a file with their names in the order of their labels; by default they are those in the records.
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
    given = read_class_names(class_names) if class_names is not None else []
    num_classes = len(given) or num_classes
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
    names = _class_names(shards, indexed, label_base=label_base, num_classes=num_classes)
    if class_names is not None:
        pairs = enumerate(zip(given, names, strict=True))  # without a name in the records it is "class N"
        theirs = [name if other == f"class {number}" else other for number, (name, other) in pairs]
        compare_names(class_names, given, theirs)
        names = given
    common_encoding(root, indexed)  # before anything is written
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


def unused_classes(root: Path) -> list[int]:
    """Return the numbers of the classes without images in any split."""
    manifest = Manifest.read(root)
    used = np.zeros(manifest.num_classes, dtype=np.bool_)
    for split in manifest.splits:
        used[map_array(index_path(root, split))["label"]] = True
    return np.flatnonzero(~used).tolist()


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


def _class_names(
    shards: Mapping[SplitName, Sequence[Path]],
    indexed: Mapping[SplitName, Sequence[IndexedShard]],
    *,
    label_base: int,
    num_classes: int,
) -> list[str]:
    """Return the synsets of the classes, else their names in words, else their numbers.

    Raises:
        TFRecordError: two shards have different synsets for a label.
        DatasetError: as `_names_in_words`.
    """
    synsets = dict[int, str]()
    for split, parts in indexed.items():
        for path, part in zip(shards[split], parts, strict=True):
            for label, synset in part.synsets.items():
                if synsets.setdefault(label, synset) != synset:
                    raise TFRecordError(
                        path, 0, f"label {label} belongs to {synset} here and to {synsets[label]} in another shard"
                    )
    names = synsets or _names_in_words(shards, indexed)
    return [names.get(label_base + number, f"class {number}") for number in range(num_classes)]


def _names_in_words(
    shards: Mapping[SplitName, Sequence[Path]], indexed: Mapping[SplitName, Sequence[IndexedShard]]
) -> Mapping[int, str]:
    """Return the image/class/text of each label; nothing, with a warning, if they are no names of classes but captions,
    or if a label has none.

    Raises:
        DatasetError: they are names in each split, and those of one split are others.
    """
    texts: dict[int, dict[str, Path]] = defaultdict(dict)
    in_a_split = None
    for split, parts in indexed.items():
        of_split: dict[int, dict[str, Path]] = defaultdict(dict)
        for path, part in zip(shards[split], parts, strict=True):
            for label, here in part.texts.items():
                for known in (of_split[label], texts[label]):
                    for text in here:
                        known.setdefault(text, path)
        in_a_split = in_a_split or _contradiction(of_split)
    contradiction = in_a_split or _contradiction(texts)
    if contradiction is None:
        return {label: next(iter(here)) for label, here in texts.items()} if all(texts.values()) else {}
    if in_a_split is None:
        raise DatasetError(
            f"image/class/text: {contradiction}: the shards number the classes differently: write them with one "
            "numbering, or leave those of one split out"
        )
    _log.warning("image/class/text: %s: the classes are called by their numbers", contradiction)
    return {}


def _contradiction(texts: Mapping[int, Mapping[str, Path]]) -> str | None:
    """Return, for a message, the first label with two texts, else the first text with two labels.

    Args:
        texts: label -> image/class/text -> the first shard with it.
    """
    label_of: dict[str, int] = {}
    for label, here in texts.items():
        if len(here) > 1:
            (first, path), (second, other) = [*here.items()][:2]
            return f"label {label} is {_shown(first)} in {path} and {_shown(second)} in {other}"
    for label, here in texts.items():
        for text, path in here.items():
            before = label_of.setdefault(text, label)
            if before != label:
                return f"{_shown(text)} is label {before} in {texts[before][text]} and label {label} in {path}"
    return None


def _shown(text: str) -> str:
    return repr(shortened(printable(text), 60))


_NUMBERED_SHARD = re.compile(r"-(\d+)-of-(\d+)(?:\.tfrec(?:ord)?s?)?$", re.IGNORECASE)


def find_splits(root: Path) -> dict[SplitName, list[Path]]:
    """Find the shards of each split in order, in ``ROOT/train`` and ``ROOT/validation``, ``ROOT/val`` or, where there
    is neither, ``ROOT/test``; or as ``ROOT/train-*`` and so on; or as ``ROOT/NAME-train.tfrecord-*`` and so on, as
    TensorFlow Datasets has them. Files of others are passed over, with a warning.

    Raises:
        DatasetError: no shards, a name that is not UTF-8, the same split in two places, or `_in_order`'s errors.
    """
    if not root.is_dir():
        plain = (
            "is a file that is not indexed: name a directory, a tar (.tar) or a table (.csv, .tsv); `dali-train data "
            "convert --help` lists what else is read"
        )
        raise DatasetError(f"{root}: {not_a_directory(root, plain)}")
    passed_over: Counter[PassedOver] = Counter()
    flat = [
        path for path in _files(root, Counter()) if _NUMBERED_SHARD.search(path.name) or "tfrec" in path.name.lower()
    ]
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()]
    candidates: dict[SplitWord, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        if word := split_of_folder(folder.name):
            candidates[word][str(folder)] = _only_shards(folder, passed_over)
    for path in flat:
        if word := split_word(path.name):
            dataset = before_split_word(path.name)
            candidates[word][str(root / f"{dataset}{word}*")].append(path)
        else:
            passed_over[PassedOver(root.name, "of no split")] += 1
    there = {word for word, places in candidates.items() if any(places.values())}
    splits: dict[SplitName, list[Path]] = {}
    for word, split in splits_of_words(there).items():
        locations = {location: paths for location, paths in candidates.pop(word).items() if paths}
        # An earlier run may have left a hard link to the same file.
        if len({frozenset(path.resolve() for path in paths) for paths in locations.values()}) > 1:
            raise DatasetError(f"{root}: the {split} split is in {' and in '.join(locations)}: keep one of them")
        if locations:
            location, paths = next(iter(locations.items()))
            for path in paths:
                check_name(path.name)
            if with_records := _with_records(location, _in_order(location, paths, passed_over), passed_over):
                splits[split] = with_records
    for places in candidates.values():
        passed_over[PassedOver("", TEST_SPLIT)] += sum(map(len, places.values()))
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
        elif path.name.startswith("_") and not path.is_dir():
            passed_over[PassedOver(directory.name, "with _ before its name, as Spark's _SUCCESS")] += 1
        elif path.is_file():
            files.append(path)
        elif not path.is_dir():
            passed_over[PassedOver(directory.name, "link to nothing, FIFO or device")] += 1
    return files


def _only_shards(directory: Path, passed_over: Counter[PassedOver]) -> list[Path]:
    """Return the TFRecord files of a split's folder: those that are called so or numbered, else all files."""
    files = _files(directory, passed_over)
    shards = [path for path in files if _NUMBERED_SHARD.search(path.name) or ".tfrec" in path.name.lower()]
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


def _with_records(location: str, paths: list[Path], passed_over: Counter[PassedOver]) -> list[Path]:
    """Return the shards but those without any record, which Beam writes, too."""
    found = [path for path in paths if path.stat().st_size]
    passed_over[PassedOver(Path(location).name, "without a record (0 bytes)")] += len(paths) - len(found)
    return found


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
    """Upload the index in a directory, and the list of images that it leaves out; dataset.json last. Then what an
    earlier index has of a split that is no more is deleted."""
    index = [path for pattern in ("index/*", "idx_files/*/*", "quarantine.jsonl") for path in directory.glob(pattern)]
    for path in (*index, directory / "dataset.json"):
        bucket.upload(str(path.relative_to(directory)), path)
    others = {*SPLITS} - {*Manifest.read(directory).splits}
    of_others = re.compile(rf"index/({'|'.join(others)})(\.crc)?\.npy|idx_files/({'|'.join(others)})/[^/]+\.idx")
    old = [name for prefix in ("index/", "idx_files/") for name in bucket.sizes(prefix) if of_others.fullmatch(name)]
    if old:
        bucket.delete(old)


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
