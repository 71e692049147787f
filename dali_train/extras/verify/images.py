"""Verifying a dataset down to its images: each record against its row of the index, and each image by decoding it."""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dali_train.data.dataset.image_file import BadImageError, decode_failures, image_size
from dali_train.data.dataset.index import INDEX_DTYPE, Split, map_file, sizes_of
from dali_train.data.dataset.manifest import (
    SplitName,
    checksums_path,
    dataset_errors,
)
from dali_train.data.dataset.storage import RangedImages
from dali_train.data.dataset.tfrecord import TFRecordError, walk_records
from dali_train.data.dataset.verify import (
    MOST_LISTED,
    Findings,
    check_shards,
    compare_checksum,
    compare_text_index,
    find_duplicates,
    in_shard,
    open_splits,
    unreadable,
)
from dali_train.data.dataset.write_index import Features, index_record, index_shard, map_shards
from dali_train.data.progress import Progress
from dali_train.data.sampling.rng import shuffled
from dali_train.errors import DatasetError
from dali_train.text import plural

_SAMPLE_STREAM = 0x5645_5249_4659  # "VERIFY", apart from what else is drawn
_IMAGES_AT_ONCE = 256  # that a thread checks in place
_MOST_FAULTS = 100  # of a split in place, which may have a million files that are gone


def verify(root: Path | str, *, sample: int | None = None, decode: bool = True, workers: int = 1) -> Findings:
    """Run all comparisons, on everything, or on the records of `sample` images per split.

    Some records are also compared as the package ``tfrecord`` reads them.

    Args:
        decode: whether DALI also decodes the images, which takes most of the time.

    Raises:
        DatasetError: there is no manifest, so nothing can be checked.
    """
    findings = Findings()
    splits = open_splits(root, findings)
    if any(split.files is not None for split in splits.values()):
        _verify_in_place(splits, sample, decode, workers, findings)
        return findings
    if sample is None:
        check_shards(splits, partial(_compare_shard, decode), workers, findings)
    else:
        for split in splits.values():
            _check_sample(split, sample, decode, findings)
    if not findings.problems:  # that package trusts every length that it reads
        for split in splits.values():
            findings.problems += _compare_readers(split)
    return findings


def _verify_in_place(
    splits: Mapping[SplitName, Split], sample: int | None, decode: bool, workers: int, findings: Findings
) -> None:
    """Check images that lie in files of others. Of a split whose index is damaged none are read."""
    readable = {name: split for name, split in splits.items() if split.index_problem() is None}
    checksums = {name: _check_in_place(split, sample, decode, workers, findings) for name, split in readable.items()}
    if not findings.problems:
        findings.problems += _changed_files(splits.values())
    if sample is None and not findings.problems:
        find_duplicates(splits, checksums, findings)


def _compare_readers(split: Split) -> list[str]:
    """Compare the first records of some shards with the results of a reader that is not ours."""
    from tfrecord.reader import tfrecord_loader

    manifest, problems = split.manifest, []
    for shard in range(0, len(split.paths), -(-len(split.paths) // MOST_LISTED)):
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


def _compare_shard(decode: bool, split: Split, number: int, checksums: NDArray[np.uint32], path: Path) -> list[str]:
    images = slice(*split.first_images[number : number + 2])
    rows = split.rows[images]
    try:
        found = index_shard(path, check_crc=True, features=Features.of(split.manifest))
    except TFRecordError as error:
        return [str(error)]
    problems = compare_checksum(path, found.shard.crc32c, split.shards[number])
    if found.encoding != split.manifest.encoding:
        problems.append(f"{path}: holds {found.encoding} records, dataset.json says {split.manifest.encoding}")
    problems += compare_text_index(split, number, path, found.record_offsets)
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
        for row in np.flatnonzero(truth != rows[column])[:MOST_LISTED]:
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
                findings.problems += in_shard(split, shard, compare)
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


def _check_in_place(
    split: Split, sample: int | None, decode: bool, workers: int, findings: Findings
) -> NDArray[np.uint32]:
    """Check all images of an index in place, or a sample, against their rows. Return the checksum of each, (N,)."""
    assert split.checksums is not None
    chosen = np.arange(len(split)) if sample is None else _sampled(split, sample)
    chosen = chosen[np.lexsort((split.rows["offset"][chosen], split.rows["shard"][chosen]))]
    portions = np.array_split(chosen, -(-len(chosen) // _IMAGES_AT_ONCE))
    storage = RangedImages(split)
    with Progress(f"verifying {split.name}", total=len(chosen), unit="images") as progress:
        check = partial(_check_portion, split, storage, decode)
        num_checked, faults = 0, dict.fromkeys(findings.problems)  # in place of a list, which each fault would search
        most = len(faults) + _MOST_FAULTS
        for portion, problems in zip(portions, map_shards(portions, check, workers=workers), strict=True):
            faults |= dict.fromkeys(problems)
            num_checked += len(portion)
            progress.update(len(portion), num_bytes=int(split.rows["size"][portion].sum()))
            if len(faults) >= most and num_checked < len(chosen):
                rest = len(chosen) - num_checked
                faults[f"{split.name}: so many faults that the other {plural(rest, 'image')} were not checked"] = None
                break
        findings.problems[:] = faults
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
                problems.append(unreadable(split.describe(image), error))
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
