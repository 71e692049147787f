"""An index of images where they lie: what a converter lists, with the size and the checksum of each image, and no copy.

The images have the numbers that a conversion would give them, and so the same order, crops and losses. Each is read and
decoded once, in portions by many threads; an object of a bucket is fetched once, listed and measured. ``OUT/.indexing``
keeps what is known of finished portions, so that a killed index goes on where it was, if the files are still the same;
it is removed at the end, when ``dataset.json`` is written.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.convert.conversion import (
    OnBad,
    check_seed,
    explain_full_disk,
    is_own,
    locked,
    report_bad_images,
    shuffled_layout,
)
from dali_train.data.convert.image import RawImage, orientation_of
from dali_train.data.convert.shards import BadImage, partial_path
from dali_train.data.convert.sources import (
    UNREADABLE_ARRAYS,
    Image,
    Images,
    SourceError,
    Sources,
    loaded_arrays,
    read_range,
)
from dali_train.data.dataset.files_in_place import make_table
from dali_train.data.dataset.image_file import (
    IMAGE_FORMATS,
    BadImageError,
    DecodeChecker,
    decode_failures,
    image_size,
    is_jpeg,
    open_image,
    parse_jpeg_header,
)
from dali_train.data.dataset.index import INDEX_DTYPE, sizes_of
from dali_train.data.dataset.manifest import (
    InPlace,
    Manifest,
    SplitManifest,
    SplitName,
    check_name,
    checksums_path,
    files_path,
    index_path,
)
from dali_train.data.dataset.passed_over import PassedOver
from dali_train.data.dataset.verify import examine_index
from dali_train.data.dataset.write_index import map_shards, remove_other_indexes, write_array
from dali_train.data.progress import SHORT_S, Progress
from dali_train.errors import DatasetError
from dali_train.extras.formats.listing import ListFile, Within, where_it_lies
from dali_train.extras.indexing.foreign_shards import objects_as_files, upload_index
from dali_train.files import remove_tree
from dali_train.runtime.object_store import Bucket, StoredObject
from dali_train.text import plural, printable

_PORTION = 1000  # images; a kill loses some seconds of work
_FORMATS = ("JPEG", "CMYK JPEG", *IMAGE_FORMATS[1:])
# What an index has of an image, beyond where it is, and what a conversion might have changed.
_MEASURED = np.dtype([("crc32c", "<u4"), ("height", "<u2"), ("width", "<u2"), ("format", "u1"), ("sideways", "?")])
_PLACE = np.dtype([("offset", "<u8"), ("size", "<u4"), ("label", "<i4")])
STATE_DIRECTORY = ".indexing"  # in OUT, with
_OWN = ("index", "quarantine.jsonl")  # beside dataset.json


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of some images."""

    rows: NDArray[np.void]  # _MEASURED, (N,); 0 for a bad image
    bad: dict[int, str]  # position -> reason

    def save(self, path: Path, listed: Sequence[Image | PassedOver] = ()) -> None:
        """Write a file for `load`, and for what is `listed` what `listed_in` returns."""
        images = [entry for entry in listed if isinstance(entry, Image)]
        passed_over = Counter(entry for entry in listed if isinstance(entry, PassedOver))
        places = np.array([(image.offset, image.size, image.label) for image in images], dtype=_PLACE)
        facts = json.dumps(
            {
                "bad": list(self.bad.items()),
                "names": [image.name for image in images],
                "passed_over": [[*one, count] for one, count in passed_over.items()],
            }
        )
        with partial_path(path).open("wb") as file:
            np.savez(file, rows=self.rows, places=places, facts=np.frombuffer(facts.encode(), np.uint8))
        partial_path(path).replace(path)

    @classmethod
    def load(cls, path: Path) -> "Measured | None":
        """Return what an earlier start has saved; None if there is nothing, or a power failure has spoilt it."""
        try:
            with loaded_arrays(path) as arrays:
                return cls(rows=arrays["rows"], bad=dict(json.loads(arrays["facts"].tobytes())["bad"]))
        except UNREADABLE_ARRAYS:
            return None


def listed_in(path: Path, file: str) -> list[Image | PassedOver]:
    """Return what was listed in `file` and saved with `Measured.save`, and can be loaded."""
    with loaded_arrays(path) as arrays:
        facts, places = json.loads(arrays["facts"].tobytes()), arrays["places"].tolist()
    listed: list[Image | PassedOver] = []
    listed += [Image(file, name, *place) for name, place in zip(facts["names"], places, strict=True)]
    for place, reason, count in facts["passed_over"]:
        listed += [PassedOver(place, reason)] * count
    return listed


def measure(read: Callable[[int], RawImage], numbers: Sequence[int], *, decode: bool) -> Measured:
    """Read images by their numbers and return what the index has of them; decode them too, if asked for."""
    rows = np.zeros(len(numbers), dtype=_MEASURED)
    bad: dict[int, str] = {}
    for first in range(0, len(numbers), DecodeChecker.BATCH):
        sound: dict[int, bytes] = {}
        for position, number in enumerate(numbers[first : first + DecodeChecker.BATCH], first):
            content = read(number)
            assert isinstance(content, bytes)
            try:
                rows[position] = crc32c(content), *image_size(content), *_kind(content)
                sound[position] = content
            except BadImageError as error:
                bad[position] = str(error)
        if decode:
            positions = [*sound]
            failures = decode_failures([*sound.values()], sizes_of(rows[positions]))
            bad |= {positions[place]: reason for place, reason in failures.items()}
    return Measured(rows=rows, bad=bad)


def _kind(content: bytes) -> tuple[int, bool]:
    """Return the number of an image's format, and whether its EXIF orientation is not upright."""
    if is_jpeg(content):
        header = parse_jpeg_header(content)
        return _FORMATS.index("JPEG" if header.is_plain else "CMYK JPEG"), header.orientation != 1
    with open_image(content) as image:
        return _FORMATS.index(str(image.format)), orientation_of(image) != 1


@dataclass(frozen=True, kw_only=True)
class IndexInPlace:
    """What to index, and where to write it."""

    name: str  # of the converter that lists the images
    load: Callable[[Path, Within], Sources]  # which lists them below a directory
    options: Mapping[str, str | None]  # all that the listing of a file depends on
    class_order: str | None  # see `class_order_of`
    source: Path | str  # a directory, a tar, or the URL of a bucket
    out: Path
    url: str | None  # to upload the index to; `out` is then removed
    seed: int
    keep_order: bool  # number the images as they lie in their files, not as a conversion would
    decode: bool
    on_bad: OnBad
    workers: int


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """Images that were listed, and their files."""

    root: str  # the directory that the names of all files begin with
    source: str  # what it stands for: itself, or a URL
    splits: Mapping[SplitName, Images]
    class_names: Sequence[str]
    objects: Mapping[str, StoredObject] | None = None  # of a bucket
    measured: Mapping[str, tuple[NDArray[np.uint64], Measured]] | None = None  # of these, with the images' offsets


def index_in_place(task: IndexInPlace) -> list[str]:
    """Write the index, upload it if asked for, and return lines to print.

    Raises:
        DatasetError: `out` holds something else, the source's name is not UTF-8, or images cannot be read by their
            range.
        RunError: bad images and ``on_bad`` is fail, the disk is full, or the store does not answer.
        SourceError: a file is not what it should be, or changed meanwhile.
    """
    check_seed(task.seed)
    check_name(str(task.source))
    _check_out(task.out)
    state, is_new = task.out / STATE_DIRECTORY, not task.out.exists()
    try:
        task.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(f"--out {task.out}: cannot be made ({error.strerror}): name another directory") from None
    try:
        with locked(state, shared=False) as discard, explain_full_disk(task.out):
            try:
                index = _index_files if isinstance(task.source, Path) else _index_bucket
                lines = index(task, state)
                if task.url is not None:
                    upload_index(task.out, Bucket(task.url))
            except BaseException:
                if not any(state.glob("*.npz")):  # nothing with which a later start would go on
                    with suppress(OSError):  # which would hide why it failed
                        discard()
                raise
            discard()
    finally:
        with suppress(OSError):
            if is_new and not any(task.out.iterdir()):
                task.out.rmdir()
    if task.url is not None:
        remove_tree(task.out)
    return lines


def _index_files(task: IndexInPlace, state: Path) -> list[str]:
    source = task.source
    assert isinstance(source, Path)
    root = str(source if source.is_dir() else source.parent)
    splits, class_names = task.load(source, where_it_lies)
    for images in splits.values():
        images.keep()
    return _index(task, state, _Listing(root=root, source=root, splits=splits, class_names=class_names))


def _index_bucket(task: IndexInPlace, state: Path) -> list[str]:
    """Fetch one object after the other; each is listed and measured while it is there."""
    bucket = Bucket(str(task.source))
    objects = {name: found for name, found in bucket.listing("").items() if _is_read(name)}
    tables = [(name, found) for name, found in objects.items() if name.endswith("index.json")]  # what MDS's columns are
    measured: dict[str, tuple[NDArray[np.uint64], Measured]] = {}
    with objects_as_files(bucket, objects) as (directory, fetch):
        for name, (size, etag, _) in tables:
            (directory / name).unlink()
            bucket.download(name, directory / name, size, etag=etag)

        def within(path: Path, list_file: ListFile) -> Iterator[Image | PassedOver]:
            name = str(path.relative_to(directory))
            saved = _saved(state, name, objects[name], tables, task.decode, task.options)
            found = Measured.load(saved)
            if found is None:
                with fetch(path):
                    listed = [*list_file(path)]
                    found = _measure_object(task, _by_offset(listed))
                found.save(saved, listed)
            else:
                listed = listed_in(saved, str(path))
            if any(isinstance(entry, Image) and entry.label < -1 for entry in listed):
                raise SourceError(
                    f"{bucket.url}/{name}: its images have names for labels, or several, which are only indexed on a "
                    "disk: copy the files to one, index them, and copy the index"
                )
            measured[str(path)] = np.array([image.offset for image in _by_offset(listed)], np.uint64), found
            yield from listed

        splits, class_names = task.load(directory, within)
        listing = _Listing(
            root=str(directory),
            source=bucket.url,
            splits=splits,
            class_names=class_names,
            objects=objects,
            measured=measured,
        )
        return _index(task, state, listing)


def _by_offset(listed: Sequence[Image | PassedOver]) -> list[Image]:
    """Return the images as they lie in their file, where a tar's links lead back and replaced members ahead."""
    return sorted((entry for entry in listed if isinstance(entry, Image)), key=lambda image: image.offset)


def _measure_object(task: IndexInPlace, images: Sequence[Image]) -> Measured:
    _refuse_packed(task, images)
    parts = np.array_split(np.arange(len(images)), min(task.workers, max(1, len(images))))

    def measured(part: NDArray[np.int64]) -> Measured:
        return measure(lambda number: read_range(images[number]), part.tolist(), decode=task.decode)

    return _joined(map_shards(parts, measured, workers=task.workers))


def _is_read(name: str) -> bool:
    """Return whether an object is a tar, or of MDS."""
    leaf = name.rpartition("/")[2]
    return not leaf.startswith(".") and (leaf.lower().endswith(".tar") or leaf == "index.json" or ".mds" in leaf)


def _joined(parts: Iterator[Measured]) -> Measured:
    rows: list[NDArray[np.void]] = []
    bad: dict[int, str] = {}
    for part in parts:
        first = sum(map(len, rows))
        bad |= {first + position: reason for position, reason in part.bad.items()}
        rows.append(part.rows)
    return Measured(rows=np.concatenate(rows), bad=bad)


def _index(task: IndexInPlace, state: Path, listing: _Listing) -> list[str]:
    names: dict[str, int] = {}  # of the files -> their numbers
    rows = {split: _rows(task, listing, images, names) for split, images in listing.splits.items()}
    objects = None if listing.objects is None else [listing.objects[name] for name in names]
    try:
        table = make_table(listing.root, [*names], objects)
    except OSError as error:
        raise SourceError(f"{printable(str(error.filename))}: cannot be read any more ({error.strerror})") from None
    if task.name == "table":
        table = table[: len(names)]  # it says which images there are: no file that is added beside them is one
    if listing.measured is None:
        files = crc32c(table.data)
        measured = {
            split: _measure_split(
                task, split, images, partial(_saved, state, split, images.identity(), files, task.decode)
            )
            for split, images in listing.splits.items()
        }
    else:
        measured = {split: _look_up(images, listing.measured) for split, images in listing.splits.items()}
    left_out = {split: _bad_images(listing.splits[split], each) for split, each in measured.items()}
    report_bad_images(task.out, left_out, task.on_bad)
    report = {split: _report(each) for split, each in measured.items()}
    _write(task, listing, rows, measured, table, len(names), report)
    indexed = np.unique(np.concatenate([_sound(rows[split]["shard"], each) for split, each in measured.items()]))
    lines = [
        f"{split}: {plural(count, 'image')}: {kind}" for split, kinds in report.items() for kind, count in kinds.items()
    ]
    return [
        *lines,
        *examine_index(task.out).summary(),
        f"{task.out} indexes {plural(len(indexed), 'file')} in {listing.source}",
    ]


def _report(measured: Measured) -> dict[str, int]:
    """Return what a conversion would have done -> to how many images."""
    sound = _sound(measured.rows, measured)
    counts = np.bincount(sound["format"], minlength=len(_FORMATS)).tolist()
    found = {
        **{
            f"{name}, which a conversion re-encodes": count
            for name, count in zip(_FORMATS[1:], counts[1:], strict=True)
        },
        "EXIF orientation not upright, which training ignores and a conversion with --apply-orientation turns": int(
            sound["sideways"].sum()
        ),
        "left out, see quarantine.jsonl": len(measured.bad),
    }
    return {kind: count for kind, count in found.items() if count}


def _sound(values: NDArray[Any], measured: Measured) -> NDArray[Any]:
    """Return those of the values of images, (N,), that are not of a bad one."""
    return np.delete(values, [*measured.bad])


def _check_out(out: Path) -> None:
    """Raises DatasetError: it holds something else than an index in place."""
    if (out / "dataset.json").exists():
        if Manifest.read(out).in_place is None:
            raise DatasetError(f"--out {out}: holds a dataset with shards of its own: name another directory")
        return
    paths = out.iterdir() if out.exists() else ()
    foreign = sorted(path.name for path in paths if path.name not in _OWN and not is_own(path, out / STATE_DIRECTORY))
    if foreign:
        raise DatasetError(f"--out {out}: holds {', '.join(foreign[:5])}: name a new directory, or an empty one")


def _saved(state: Path, *facts: object) -> Path:
    """Return the file for a portion, which a later start only finds if `facts` are still the same."""
    return state / f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}.npz"


def _rows(task: IndexInPlace, listing: _Listing, images: Images, names: dict[str, int]) -> NDArray[np.void]:
    """Return the rows of the index, in the order of the listing and without sizes in pixels; add files to `names`.

    Raises:
        SourceError: the split has no images, or one is packed.
    """
    rows = np.zeros(len(images.labels), dtype=INDEX_DTYPE)
    if not len(rows):
        raise SourceError(f"{listing.source}: has no images")
    with Progress("finding files", total=len(rows), unit="images", delay_s=SHORT_S) as progress:
        for first in range(0, len(rows), _PORTION):
            portion = range(first, min(first + _PORTION, len(rows)))
            for number in portion:
                image = images[number]
                _refuse_packed(task, [image])
                name = file_of(image).removeprefix(f"{listing.root}/")
                rows[number] = image.offset, image.size, names.setdefault(name, len(names)), image.label, 0, 0
            progress.update(len(portion))
    return rows


def _refuse_packed(task: IndexInPlace, images: Sequence[Image]) -> None:
    for image in images:
        if image.is_packed:
            raise SourceError(
                f"{image.location}: is packed, and an image must be a range of bytes of a file to be read in place: "
                f"unpack the file, or convert it with `dali-train data convert {task.name}`"
            )


def file_of(image: Image) -> str:
    """Return the path of the file that an image is all of, or a range of."""
    return image.file + image.name if image.file.endswith("/") else image.file


def _measure_split(task: IndexInPlace, split: SplitName, images: Images, saved: Callable[[int], Path]) -> Measured:
    """Measure a split in portions; `saved` names the file for the one that begins with an image."""
    num_images = len(images.labels)
    portions = [range(first, min(first + _PORTION, num_images)) for first in range(0, num_images, _PORTION)]
    with Progress(f"indexing {split}", total=num_images, unit="images") as progress:

        def measured(numbers: range) -> Measured:
            path = saved(numbers.start)
            found = Measured.load(path)
            if found is None:
                found = measure(images.read, numbers, decode=task.decode)
                found.save(path)
            progress.update(len(numbers))
            return found

        return _joined(map_shards(portions, measured, workers=task.workers))


def _look_up(images: Images, measured: Mapping[str, tuple[NDArray[np.uint64], Measured]]) -> Measured:
    """Return what was found when the files were listed."""
    rows, bad = np.zeros(len(images.labels), dtype=_MEASURED), {}
    for number in range(len(rows)):
        image = images[number]
        offsets, found = measured[image.file]
        position = int(np.searchsorted(offsets, np.uint64(image.offset)))
        rows[number] = found.rows[position]
        if position in found.bad:
            bad[number] = found.bad[position]
    return Measured(rows=rows, bad=bad)


def _bad_images(images: Images, measured: Measured) -> list[BadImage]:
    listed = [(images[number], reason) for number, reason in measured.bad.items()]
    return [BadImage(file=image.location, position=image.offset, reason=reason) for image, reason in listed]


def _write(
    task: IndexInPlace,
    listing: _Listing,
    rows: Mapping[SplitName, NDArray[np.void]],
    measured: Mapping[SplitName, Measured],
    table: NDArray[np.void],
    num_files: int,
    report: Mapping[SplitName, Mapping[str, int]],
) -> None:
    """Write the index, ``dataset.json`` last: a kill in between leaves no dataset instead of a mixture of two."""
    (task.out / "dataset.json").unlink(missing_ok=True)
    splits: dict[str, SplitManifest] = {}
    for split, found in measured.items():
        for side in ("height", "width"):
            rows[split][side] = found.rows[side]
        num_images = len(found.rows)
        as_they_lie = np.lexsort((rows[split]["offset"], rows[split]["shard"]))
        order = as_they_lie if task.keep_order else shuffled_layout(num_images, 1, seed=task.seed)[0]
        order = order[~np.isin(order, [*found.bad])]
        if not len(order):
            raise SourceError(f"{listing.source}: the {split} split has no image that can be decoded")
        splits[split] = SplitManifest(
            num_records=len(order),
            image_bytes=int(rows[split]["size"][order].sum(dtype=np.int64)),
            index_crc32c=write_array(index_path(task.out, split), rows[split][order]),
            image_checksums_crc32c=write_array(checksums_path(task.out, split), found.rows["crc32c"][order]),
        )
    remove_other_indexes(task.out, splits)
    files_crc32c = write_array(files_path(task.out), table)
    label_kind = next(iter(listing.splits.values())).label_kind
    options = {"dataset": task.name, "seed": None if task.keep_order else task.seed, "decode_check": task.decode}
    if task.class_order is not None:
        options["class_order"] = task.class_order
    Manifest(
        num_classes=len(listing.class_names),
        class_names=tuple(listing.class_names),
        label_base=0,
        splits=splits,
        conversion={"options": options, "report": dict(report)},
        in_place=InPlace(
            source=listing.source,
            num_files=num_files,
            files_crc32c=files_crc32c,
            labels_from={
                os.path.relpath(path, listing.root): digest
                for images in listing.splits.values()
                for path, digest in images.labels_from.items()
            },
        ),
        **label_kind.manifest_fields(),
    ).write(task.out)
