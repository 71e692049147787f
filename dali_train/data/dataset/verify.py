"""Verifying the files of a dataset: manifest against files, shards against checksums, index against shards.

This is what a conversion does at its end; extras/verify also parses each record and decodes each image.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.config.check import Extra, load_all
from dali_train.data.dataset.index import Split, map_file
from dali_train.data.dataset.manifest import (
    SPLITS,
    Manifest,
    Shard,
    SplitName,
    dataset_errors,
    text_index_path,
)
from dali_train.data.dataset.storage import open_shards, stored_image
from dali_train.data.dataset.tfrecord import walk_records
from dali_train.data.dataset.write_index import map_shards, text_index
from dali_train.data.progress import Progress
from dali_train.errors import DatasetError, RunError
from dali_train.files import is_still_open
from dali_train.runtime.object_store import Bucket, ObjectStoreError
from dali_train.text import span

MOST_LISTED = 10  # of one kind
_MOST_PAIRS = 3  # of equal images, whose names may be long
FILE_NAMES = Extra[Callable[[Split, NDArray[np.int64]], list[str]]]("dali_train.extras.image_names:file_names")
_MOST_COMPARED = 100  # of them: in an object store each costs two requests


@dataclass
class Findings:
    """The result of a check. Problems make the dataset unusable; notes are for the user to judge."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)  # also notes, about images with equal bytes
    images_per_class: dict[SplitName, NDArray[np.int64]] = field(default_factory=dict)  # (num_classes,)
    num_images: dict[SplitName, int] = field(default_factory=dict)  # less than the sum of those if some have several

    def summary(self) -> list[str]:
        """Return lines to print: counts, then notes, then problems."""
        counts = [
            f"{split}: {self.num_images[split]:,} images in {len(counts)} classes, "
            f"{span(counts.min(), counts.max())} per class"
            for split, counts in self.images_per_class.items()
        ]
        notes = [f"note: {note}" for note in (*self.notes, *self.duplicates)]
        return [*counts, *notes, *(f"fault: {problem}" for problem in self.problems)]


Compare = Callable[[Split, int, NDArray[np.uint32], Path], list[str]]
"""Returns the problems of a shard, given its split, its number, the array for the checksum of each image of the split,
(N,), and the shard's file."""


def verify_shards(root: Path | str, *, already: Collection[str] = (), workers: int = 1) -> Findings:
    """Compare each shard as a whole with its checksum, and find images that are there twice.

    It is enough for a dataset just written here: checksum and index were made of what was to be written. Parsing each
    record takes six times as long (1,000 photographs, two threads: 0.18 s instead of 0.03), under the interpreter's
    lock.

    Args:
        already: names of shards that this process has compared with their checksums.

    Raises:
        DatasetError: there is no manifest, so nothing can be checked.
    """
    findings = Findings()
    splits = open_splits(root, findings)
    check_shards(splits, partial(_compare_bytes, already), workers, findings)
    return findings


def examine_index(root: Path | str) -> Findings:
    """Count the images of each class, and find those that are there twice, by the checksums in an index that has just
    been written; the records or files are not compared with it.

    Raises:
        DatasetError: a file has changed since, or cannot be read.
    """
    findings = Findings()
    splits = open_splits(root, findings)
    checksums = {name: split.checksums for name, split in splits.items() if split.checksums is not None}
    find_duplicates({name: splits[name] for name in checksums}, checksums, findings)
    return findings


def open_splits(root: Path | str, findings: Findings) -> dict[SplitName, Split]:
    """Return the splits whose rows can be looked up, and add what is wrong with their indexes and files to `findings`.

    Raises:
        DatasetError: there is no manifest.
    """
    manifest = Manifest.read(root)
    splits: dict[SplitName, Split] = {}
    for name in SPLITS:
        if name not in manifest.splits:
            continue
        try:
            split = Split(root, name, local=False, strict=False)  # shards are looked at one by one
        except DatasetError as error:
            findings.problems.append(str(error))
            continue
        problem = split.index_problem()
        if problem is not None:
            findings.problems.append(problem)
        if split.files is not None:
            splits[name] = split
            if problem is None:
                _check_classes(split, findings)
            continue
        expected = np.repeat(np.arange(len(split.shards)), np.diff(split.first_images))
        wrong = np.flatnonzero(split.rows["shard"] != expected)
        if len(wrong):  # then no row can be looked up
            row = wrong[0]
            found = f"has shard {split.rows['shard'][row]}, by dataset.json it is in {expected[row]}"
            findings.problems.append(f"{name}: row {row} of the index {found}")
        else:
            splits[name] = split
            _check_classes(split, findings)
        unexpected = sorted(_names(root, name) - {path.name for path in split.paths})
        if unexpected:
            findings.problems.append(
                f"{root}/{name}: {len(unexpected)} files that dataset.json does not name: {_abbreviate(unexpected)}"
            )
    return splits


def check_shards(splits: Mapping[SplitName, Split], compare: Compare, workers: int, findings: Findings) -> None:
    """Compare every shard, and then all images by their checksums."""
    checksums = {name: _check_all(split, compare, workers, findings) for name, split in splits.items()}
    find_duplicates(splits, checksums, findings)


def _names(root: Path | str, split: SplitName) -> set[str]:
    """Return the names of the files of a split; of an HTTP server, which lists nothing, none."""
    if isinstance(root, Path):
        return {path.name for path in (root / split).iterdir() if not is_still_open(path.name)}
    if root.startswith("http"):
        return set()
    with dataset_errors():
        return {name.removeprefix(f"{split}/") for name in Bucket(root).sizes(f"{split}/")}


def _check_classes(split: Split, findings: Findings) -> None:
    labels = split.rows["label"]
    if labels.min() < 0 or labels.max() >= split.manifest.num_labels:
        findings.problems.append(
            f"{split.name}: the index has labels {labels.min()} to {labels.max()}, but dataset.json has "
            f"{split.manifest.num_labels} labels, counted from 0"
        )
        return
    counts = split.count_classes(labels)
    findings.images_per_class[split.name] = counts
    findings.num_images[split.name] = len(split)
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        names = [split.manifest.class_names[number] for number in empty]
        findings.notes.append(f"{split.name}: {len(empty)} classes without images: {_abbreviate(names)}")


def _check_all(split: Split, compare: Compare, workers: int, findings: Findings) -> NDArray[np.uint32]:
    """Check every shard; returns the checksum of each image's bytes, (N,), 0 where a shard cannot be read."""
    checksums = np.zeros(len(split), dtype=np.uint32)

    def check(shard: int) -> list[str]:
        return in_shard(split, shard, partial(compare, split, shard, checksums))

    with Progress(f"verifying {split.name}", total=len(split), unit="images") as progress:
        found = map_shards(range(len(split.shards)), check, workers=workers)
        for shard, problems in zip(split.shards, found, strict=True):
            findings.problems += problems
            progress.update(shard.num_records, num_bytes=shard.num_bytes)
    return checksums


def in_shard(split: Split, shard: int, compare: Callable[[Path], list[str]]) -> list[str]:
    """Return the problems that `compare` finds in a shard's file, or why there is none."""
    try:
        with split.shard_file(shard) as path:
            problems = compare(path)
    except DatasetError as error:
        return [str(error)]
    except OSError as error:  # the others are checked all the same
        return [unreadable(split.shard_location(shard), error)]
    return [problem.replace(str(path), split.shard_location(shard)) for problem in problems]


def unreadable(location: str, error: OSError) -> str:
    return f"{location}: cannot be read ({error.strerror}): check its permissions and its disk"


def _compare_bytes(
    already: Collection[str], split: Split, number: int, checksums: NDArray[np.uint32], path: Path
) -> list[str]:
    """Compare a shard as a whole with its checksum, and take the checksums of its images from their file."""
    problems: list[str] = []
    if path.name in already:
        split.record_offsets(number)  # raises DatasetError, which `in_shard` returns
    else:
        content = memoryview(map_file(path))
        problems = compare_checksum(path, f"{crc32c(content):08x}", split.shards[number])
        if not problems:
            headers = [record.header for record in walk_records(content, path, check_payload=False)]
            problems = compare_text_index(split, number, path, np.array([*headers, len(content)], dtype=np.uint64))
    if split.checksums is not None:
        images = slice(*split.first_images[number : number + 2])
        checksums[images] = split.checksums[images]
    return problems


def compare_checksum(path: Path, found: str | None, shard: Shard) -> list[str]:
    if shard.crc32c in (found, None):
        return []
    return [f"{path}: has CRC32C {found}, dataset.json says {shard.crc32c}"]


def compare_text_index(split: Split, number: int, path: Path, record_offsets: NDArray[np.uint64]) -> list[str]:
    with suppress(OSError, ObjectStoreError):
        if split.text_index(number) == text_index(record_offsets):
            return []
    return [f"{text_index_path(split.root, split.name, path.name)}: is missing or does not fit its shard"]


def find_duplicates(
    splits: Mapping[SplitName, Split], checksums: Mapping[SplitName, NDArray[np.uint32]], findings: Findings
) -> None:
    """Find images with equal bytes: under one label they only waste time, under two labels at least one is wrong.

    A checksum and a size only propose: they agree by chance once in some hundred datasets like ImageNet. Of each kind
    the bytes of the first `_MOST_COMPARED` pairs are compared.
    """
    names = [name for name in splits if name in findings.images_per_class]  # the others' labels name no class
    if not names:
        return
    rows = [splits[name].rows for name in names]
    labels, sizes = (np.concatenate([part[column] for part in rows]) for column in ("label", "size"))
    keys = np.concatenate([checksums[name] for name in names]).astype(np.uint64) << np.uint64(32) | sizes
    starts = np.cumsum([0, *map(len, rows)])
    parts = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
    kinds = {"": _equal_pairs(keys, parts)}
    if all(splits[name].label_kind.is_class for name in names):
        kinds["under two labels"] = _equal_pairs(keys, labels, differ=True)
    kinds["in two splits"] = _equal_pairs(keys, parts, differ=True)
    shards = {name: open_shards(splits[name]) for name in names}

    def find(image: int) -> tuple[SplitName, int]:
        part = int(np.searchsorted(starts, image, side="right")) - 1
        return names[part], image - int(starts[part])

    def content(place: tuple[SplitName, int]) -> NDArray[np.uint8]:
        return stored_image(shards[place[0]], place[1])

    for kind, pairs in kinds.items():
        compared = [(find(one), find(other)) for one, other in pairs[:_MOST_COMPARED].tolist()]
        equal = [(one, other) for one, other in compared if np.array_equal(content(one), content(other))]
        count = len(equal) + len(pairs) - len(compared)
        if count and not kind:
            findings.duplicates.append(f"{count:,} images have the same bytes as another one")
        elif count:
            shown = [" = ".join(_describe_image(splits[name], at) for name, at in pair) for pair in equal[:_MOST_PAIRS]]
            more = ", ..." if count > len(shown) else ""
            findings.duplicates.append(f"{count:,} duplicates {kind}: {', '.join(shown)}{more}")


def _equal_pairs(
    keys: NDArray[np.uint64], column: NDArray[np.integer[Any]], *, differ: bool = False
) -> NDArray[np.int64]:
    """Return, for each image but the first of those with one key, the first and itself, (pairs, 2).

    Args:
        column: a value of each image, by which those with one key are in order.
        differ: only the images whose value is another than the first one's.
    """
    order = np.lexsort((column, keys))
    is_first = np.diff(keys[order], prepend=~keys[order][:1]) != 0
    first = order[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]]
    chosen = ~is_first & (keys[order] >> np.uint64(32) > 0)
    if differ:
        chosen &= column[first] != column[order]
    return np.stack([first, order], axis=1)[chosen]


def _describe_image(split: Split, image: int) -> str:
    where = f"image {image}{_name(split, image)}" if split.files is None else split.describe(image)
    return f"{split.name} {where} ({split.label_text(int(split.rows['label'][image]))})"


def _name(split: Split, image: int) -> str:
    """Return the name of an image in a record behind a comma; nothing where the record has none, or is damaged."""
    with suppress(DatasetError, RunError):
        for file_names in load_all([FILE_NAMES]):
            return "".join(f", {name}" for name in file_names(split, np.array([image])) if name)
    return ""


def _abbreviate(items: Sequence[str]) -> str:
    return ", ".join(items[:MOST_LISTED]) + (", ..." if len(items) > MOST_LISTED else "")
