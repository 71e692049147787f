"""Verifying a dataset: records against checksums, index against records, manifest against files, and each image by
decoding it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.dataset.build_index import Features, index_record, index_shard, map_shards, text_index
from dali_train.data.dataset.image_file import BadImageError, decode_failures, image_size
from dali_train.data.dataset.index import INDEX_DTYPE, Split, map_file, sizes_of
from dali_train.data.dataset.manifest import (
    SPLITS,
    Manifest,
    Shard,
    SplitName,
    checksums_path,
    dataset_errors,
    text_index_path,
)
from dali_train.data.dataset.storage import RangedImages, open_shards
from dali_train.data.dataset.tfrecord import TFRecordError, walk_records
from dali_train.data.progress import Progress
from dali_train.data.sampling.rng import shuffled
from dali_train.errors import DatasetError
from dali_train.runtime.object_store import Bucket, ObjectStoreError
from dali_train.text import span

_MOST_LISTED = 10  # of one kind
_SAMPLE_STREAM = 0x5645_5249_4659  # "VERIFY", apart from what else is drawn


@dataclass
class Findings:
    """The result of a check. Problems make the dataset unusable; notes are for the user to judge."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    images_per_class: dict[SplitName, NDArray[np.int64]] = field(default_factory=dict)  # (num_classes,)

    def summary(self) -> list[str]:
        """Return lines to print: counts, then notes, then problems."""
        counts = [
            f"{split}: {counts.sum():,} images in {len(counts)} classes, {span(counts.min(), counts.max())} per class"
            for split, counts in self.images_per_class.items()
        ]
        return [*counts, *(f"note: {note}" for note in self.notes), *(f"fault: {problem}" for problem in self.problems)]


def verify(
    root: Path | str, *, sample: int | None = None, decode: bool = True, parse: bool = True, workers: int = 1
) -> Findings:
    """Run all comparisons, on everything, or on the records of `sample` images per split.

    Args:
        decode: whether DALI also decodes the images that are parsed, which takes most of the time.
        parse: whether each record is parsed and compared with its row of the index, and some of them also as the
            package ``tfrecord`` reads them. Without it each shard is compared as a whole with its checksum, which is
            enough for a dataset just written here: checksum and index were made of what was to be written. Parsing
            takes six times as long (1,000 photographs, two threads: 0.18 s instead of 0.03), under the interpreter's
            lock.

    Raises:
        DatasetError: there is no manifest, so nothing can be checked.
    """
    manifest = Manifest.read(root)
    findings = Findings()
    splits: dict[SplitName, Split] = {}
    in_place: dict[SplitName, NDArray[np.uint32]] = {}  # the checksums of each image
    for name in SPLITS:
        if name not in manifest.splits:
            continue
        try:
            splits[name] = split = Split(root, name, local=False, strict=False)  # shards are looked at one by one
        except DatasetError as error:
            findings.problems.append(str(error))
            continue
        problem = split.index_problem()
        if problem is not None:
            findings.problems.append(problem)
        if split.files is not None:
            if problem is None:
                _check_classes(split, findings)
                in_place[name] = _check_in_place(split, sample, decode, workers, findings)
            continue
        expected = np.repeat(np.arange(len(split.shards)), np.diff(split.first_images))
        wrong = np.flatnonzero(split.rows["shard"] != expected)
        if len(wrong):  # then no row can be looked up
            row = wrong[0]
            found = f"has shard {split.rows['shard'][row]}, by dataset.json it is in {expected[row]}"
            findings.problems.append(f"{name}: row {row} of the index {found}")
            del splits[name]
        else:
            _check_classes(split, findings)
        unexpected = sorted(_names(root, name) - {path.name for path in split.paths})
        if unexpected:
            findings.problems.append(
                f"{root}/{name}: {len(unexpected)} files that dataset.json does not name: {_abbreviate(unexpected)}"
            )
    if manifest.in_place is not None:
        if not findings.problems:
            findings.problems += _changed_files(splits.values())
        if sample is None and not findings.problems:
            _find_duplicates(splits, in_place, findings)
        return findings
    if sample is None:
        checksums = {name: _check_all(split, decode, parse, workers, findings) for name, split in splits.items()}
        _find_duplicates(splits, checksums, findings)
    else:
        for split in splits.values():
            _check_sample(split, sample, decode, findings)
    if parse and not findings.problems:  # that package trusts every length that it reads
        for split in splits.values():
            findings.problems += _compare_readers(split)
    return findings


def _names(root: Path | str, split: SplitName) -> set[str]:
    """Return the names of the files of a split; of an HTTP server, which lists nothing, none."""
    if isinstance(root, Path):
        return {path.name for path in (root / split).iterdir()}
    if root.startswith("http"):
        return set()
    with dataset_errors():
        return {name.removeprefix(f"{split}/") for name in Bucket(root).sizes(f"{split}/")}


def _compare_readers(split: Split) -> list[str]:
    """Compare the first records of some shards with the results of a reader that is not ours."""
    from tfrecord.reader import tfrecord_loader

    manifest, problems = split.manifest, []
    for shard in range(0, len(split.paths), -(-len(split.paths) // _MOST_LISTED)):
        first, end = split.first_images[shard : shard + 2].tolist()
        with split.shard_file(shard) as path:
            content = memoryview(map_file(path))
            records = tfrecord_loader(str(path), None, [manifest.image_key, manifest.label_key])
            for record, (row, theirs) in enumerate(zip(split.rows[first : min(end, first + 4)], records, strict=False)):
                ours = content[int(row["offset"]) : int(row["offset"]) + int(row["size"])]
                if theirs[manifest.image_key] != ours or theirs[manifest.label_key].tolist() != [
                    row["label"] + manifest.label_base
                ]:
                    problems.append(
                        f"{split.shard_location(shard)}: record {record} has another image or label as "
                        "the package tfrecord reads it"
                    )
    return problems


def _check_classes(split: Split, findings: Findings) -> None:
    labels = split.rows["label"]
    if labels.min() < 0 or labels.max() >= split.num_classes:
        findings.problems.append(
            f"{split.name}: the index has labels {labels.min()} to {labels.max()}, there are {split.num_classes} "
            "classes from 0"
        )
        return
    counts = np.bincount(labels, minlength=split.num_classes)
    findings.images_per_class[split.name] = counts
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        names = [split.manifest.class_names[number] for number in empty]
        findings.notes.append(f"{split.name}: {len(empty)} classes without images: {_abbreviate(names)}")


def _check_all(split: Split, decode: bool, parse: bool, workers: int, findings: Findings) -> NDArray[np.uint32]:
    """Check every shard; returns the checksum of each image's bytes, (N,), 0 where a shard cannot be read."""
    checksums = np.zeros(len(split), dtype=np.uint32)

    def check(shard: int) -> list[str]:
        if parse:
            return _in_shard(split, shard, partial(_compare_shard, split, shard, decode, checksums))
        return _in_shard(split, shard, partial(_compare_bytes, split, shard, checksums))

    with Progress(f"verifying {split.name}", total=len(split), unit="images") as progress:
        found = map_shards(range(len(split.shards)), check, workers=workers)
        for shard, problems in zip(split.shards, found, strict=True):
            findings.problems += problems
            progress.update(shard.num_records, num_bytes=shard.num_bytes)
    return checksums


def _in_shard(split: Split, shard: int, compare: Callable[[Path], list[str]]) -> list[str]:
    """Return the problems that `compare` finds in a shard's file, or why there is none."""
    try:
        with split.shard_file(shard) as path:
            problems = compare(path)
    except DatasetError as error:
        return [str(error)]
    except OSError as error:  # the others are checked all the same
        return [_unreadable(split.shard_location(shard), error)]
    return [problem.replace(str(path), split.shard_location(shard)) for problem in problems]


def _unreadable(location: str, error: OSError) -> str:
    return f"{location}: cannot be read ({error.strerror}): check its permissions and its disk"


def _compare_bytes(split: Split, number: int, checksums: NDArray[np.uint32], path: Path) -> list[str]:
    """Compare a shard as a whole with its checksum, and take the checksums of its images from their file."""
    content = memoryview(map_file(path))
    problems = _compare_checksum(path, f"{crc32c(content):08x}", split.shards[number])
    if not problems:
        headers = [record.header for record in walk_records(content, path, check_payload=False)]
        problems = _compare_text_index(split, number, path, np.array([*headers, len(content)], dtype=np.uint64))
    if split.checksums is not None:
        images = slice(*split.first_images[number : number + 2])
        checksums[images] = split.checksums[images]
    return problems


def _compare_checksum(path: Path, found: str | None, shard: Shard) -> list[str]:
    if shard.crc32c in (found, None):
        return []
    return [f"{path}: has CRC32C {found}, dataset.json says {shard.crc32c}"]


def _compare_text_index(split: Split, number: int, path: Path, record_offsets: NDArray[np.uint64]) -> list[str]:
    with suppress(OSError, ObjectStoreError):
        if split.text_index(number) == text_index(record_offsets):
            return []
    return [f"{text_index_path(split.root, split.name, path.name)}: is missing or does not fit its shard"]


def _compare_shard(split: Split, number: int, decode: bool, checksums: NDArray[np.uint32], path: Path) -> list[str]:
    images = slice(*split.first_images[number : number + 2])
    rows = split.rows[images]
    try:
        found = index_shard(path, check_crc=True, features=Features.of(split.manifest))
    except TFRecordError as error:
        return [str(error)]
    problems = _compare_checksum(path, found.shard.crc32c, split.shards[number])
    if found.encoding != split.manifest.encoding:
        problems.append(f"{path}: holds {found.encoding} records, dataset.json says {split.manifest.encoding}")
    problems += _compare_text_index(split, number, path, found.record_offsets)
    content, decode = memoryview(map_file(path)), decode and found.encoding == "image"
    assert found.checksums is not None
    if len(rows) == len(found.rows):
        checksums[images] = found.checksums
        records, labels = np.arange(len(rows)), found.labels - split.manifest.label_base
        problems += _check_images(path, content, records, rows, found.rows, labels, decode)
    else:
        problems.append(f"{path}: has {len(found.rows)} records, the index {len(rows)}")
    if split.checksums is not None and not np.array_equal(split.checksums[images], found.checksums):
        problems.append(f"{path}: an image's CRC32C is not the one in {checksums_path(split.root, split.name)}")
    return problems


def _images(content: memoryview, rows: NDArray[np.void]) -> list[memoryview]:
    spans = zip(rows["offset"].tolist(), rows["size"].tolist(), strict=True)
    return [content[start : start + size] for start, size in spans]


def _check_images(
    path: Path,
    content: memoryview,
    records: NDArray[np.int64],
    rows: NDArray[np.void],
    found: NDArray[np.void],
    labels: NDArray[np.int64],
    decode: bool,
) -> list[str]:
    """Compare rows of the index with what was `found` of the same `records` of a shard, whose `labels` are apart, and
    name the images that DALI does not decode."""
    problems = []
    for column in ("offset", "size", "label", "height", "width"):
        truth = labels if column == "label" else found[column]
        for row in np.flatnonzero(truth != rows[column])[:_MOST_LISTED]:
            index = f"the index says {rows[column][row]}"
            problems.append(f"{path}: record {records[row]} has {column} {truth[row]}, {index}")
    if not decode:
        return problems
    for number, reason in decode_failures(_images(content, found), sizes_of(found)).items():
        row = found[number]
        location = f"record {records[number]}, {row['size']} bytes at byte {row['offset']}"
        problems.append(f"{path}: the image of {location} {reason}")
    return problems


def _check_sample(split: Split, sample: int, decode: bool, findings: Findings) -> None:
    """Check the records of some images, found through DALI's text index, against their rows of the index."""
    chosen = _sampled(split, sample)
    with Progress(f"verifying {split.name}", total=len(chosen), unit="images") as progress:
        for shard, (first, end) in enumerate(pairwise(split.first_images.tolist())):
            images = chosen[(chosen >= first) & (chosen < end)]
            if len(images):
                compare = partial(_compare_records, split, shard, images - first, decode)
                findings.problems += _in_shard(split, shard, compare)
                progress.update(len(images))


def _sampled(split: Split, sample: int) -> NDArray[np.int64]:
    order = shuffled(np.random.Philox(key=[0, _SAMPLE_STREAM]), len(split))
    return np.sort(order[: min(sample, len(split))]).astype(np.int64)


def _compare_records(split: Split, shard: int, records: NDArray[np.int64], decode: bool, path: Path) -> list[str]:
    manifest, offsets = split.manifest, split.record_offsets(shard)[records].tolist()
    content = memoryview(map_file(path))
    problems, sound, rows, labels = [], [], [], []
    for record, offset in zip(records.tolist(), offsets, strict=True):
        try:
            span = next(walk_records(content, path, check_payload=True, start_at=offset))
            row, label, *_ = index_record(content, span, path, Features.of(manifest))
        except (TFRecordError, StopIteration) as error:
            problems.append(str(error) or f"{path}: no record at byte {offset}, where its text index has one")
            continue
        sound.append(record)
        rows.append(row)
        labels.append(label - manifest.label_base)
    places, truth = np.array(sound, dtype=np.int64), np.array(rows, dtype=INDEX_DTYPE)
    indexed = split.rows[places + split.first_images[shard]]
    decode = decode and manifest.encoding == "image"
    return problems + _check_images(path, content, places, indexed, truth, np.array(labels), decode)


_IN_PLACE = 256  # images that a thread checks at one time


def _check_in_place(
    split: Split, sample: int | None, decode: bool, workers: int, findings: Findings
) -> NDArray[np.uint32]:
    """Check all images of an index in place, or a sample, against their rows. Return the checksum of each, (N,)."""
    assert split.checksums is not None
    chosen = np.arange(len(split)) if sample is None else _sampled(split, sample)
    chosen = chosen[np.lexsort((split.rows["offset"][chosen], split.rows["shard"][chosen]))]
    portions = np.array_split(chosen, -(-len(chosen) // _IN_PLACE))
    storage = RangedImages(split)
    with Progress(f"verifying {split.name}", total=len(chosen), unit="images") as progress:
        check = partial(_check_portion, split, storage, decode)
        for portion, problems in zip(portions, map_shards(portions, check, workers=workers), strict=True):
            findings.problems += [problem for problem in problems if problem not in findings.problems]
            progress.update(len(portion), num_bytes=int(split.rows["size"][portion].sum()))
    return split.checksums


def _changed_files(splits: Iterable[Split]) -> list[str]:
    """Return what reading the images has not found: a file that was added or has grown, or one of those not read."""
    for split in splits:
        assert split.files is not None and split.checksums is not None
        try:
            if split.url is None:
                split.files.check(split.rows, split.checksums)
            elif not split.url.startswith("http"):  # such a server lists nothing
                with dataset_errors():
                    split.files.check_listing()
        except DatasetError as error:
            return [str(error)]  # the files are those of all splits
    return []


def _check_portion(split: Split, storage: RangedImages, decode: bool, images: NDArray[np.int64]) -> list[str]:
    contents: dict[int, NDArray[np.uint8]] = {}
    problems: list[str] = []
    try:
        contents = dict(storage.fetch(images))
    except (DatasetError, OSError):
        for image in images:  # again one by one, to name all that are wrong
            try:
                contents |= dict(storage.fetch(image[None]))
            except DatasetError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(_unreadable(split.describe(image), error))
    sizes = {}
    for image, content in contents.items():
        indexed = int(split.rows[image]["height"]), int(split.rows[image]["width"])
        try:
            sizes[image] = image_size(content.data)
            if sizes[image] != indexed:
                problems.append(f"{split.describe(image)} has {sizes[image]} pixels, the index says {indexed}")
        except BadImageError as error:
            problems.append(f"{split.describe(image)} {error}")
    if decode:
        sound, expected = [*sizes], np.array([*sizes.values()], np.int32).reshape(-1, 2)
        for number, reason in decode_failures([contents[image].data for image in sound], expected).items():
            problems.append(f"{split.describe(sound[number])} {reason}")
    return problems


def _find_duplicates(
    splits: dict[SplitName, Split], checksums: dict[SplitName, NDArray[np.uint32]], findings: Findings
) -> None:
    """Find images with equal bytes: under one label they only waste time, under two labels at least one is wrong."""
    names = [name for name in splits if name in findings.images_per_class]  # the others' labels name no class
    if not names:
        return
    shards = {name: open_shards(splits[name]) for name in names}
    starts = np.cumsum([0, *(len(splits[name]) for name in names)])
    sizes = np.concatenate([splits[name].rows["size"] for name in names])
    keys = np.concatenate([checksums[name] for name in names]).astype(np.uint64) << np.uint64(32) | sizes

    def find(image: int) -> tuple[Split, int]:
        part = int(np.searchsorted(starts, image, side="right")) - 1
        return splits[names[part]], image - int(starts[part])

    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero((keys[order][1:] == keys[order][:-1]) & (keys[order][1:] >> np.uint64(32) > 0))
    num_equal = 0
    duplicates: dict[str, list[str]] = {"under two labels": [], "in two splits": []}
    for position in same.tolist():
        (split, image), (other, twin) = find(int(order[position])), find(int(order[position + 1]))
        # The checksum only proposes: 32 bits and a size agree by chance once in some hundred such datasets.
        if not np.array_equal(shards[split.name].image(image), shards[other.name].image(twin)):
            continue
        num_equal += 1
        if split.rows["label"][image] != other.rows["label"][twin]:
            duplicates["under two labels"].append(f"{_describe_image(split, image)} = {_describe_image(other, twin)}")
        elif split is not other:
            duplicates["in two splits"].append(f"{_describe_image(split, image)} = {_describe_image(other, twin)}")
    if num_equal:
        findings.notes.append(f"{num_equal} images have the same bytes as another one")
    for kind, pairs in duplicates.items():
        if pairs:
            findings.notes.append(f"{len(pairs)} duplicates {kind}: {_abbreviate(pairs)}")


def _describe_image(split: Split, image: int) -> str:
    return f"{split.name} image {image} ({split.manifest.class_names[int(split.rows['label'][image])]})"


def _abbreviate(items: Sequence[str]) -> str:
    return ", ".join(items[:_MOST_LISTED]) + (", ..." if len(items) > _MOST_LISTED else "")
