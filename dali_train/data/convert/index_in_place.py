"""An index of images where they lie: what a converter lists, with the size and the checksum of each image, and no copy.

The images have the numbers that a conversion would give them, and so the same order, crops and losses. Each is read and
decoded once, in portions by many threads. ``OUT/.indexing`` keeps what is known of finished portions, so that a killed
index goes on where it was, if the files are still the same; it is removed at the end, when ``dataset.json`` is written.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.convert.conversion import OnBad, explain_full_disk, locked, report_bad_images, shuffled_layout
from dali_train.data.convert.image import orientation_of
from dali_train.data.convert.shards import BadImage, partial_path
from dali_train.data.convert.sources import Image, Images, SourceError
from dali_train.data.dataset.build_index import map_shards, write_array
from dali_train.data.dataset.files_in_place import make_table
from dali_train.data.dataset.image_file import (
    BATCH_PIXELS,
    BadImageError,
    DecodeChecker,
    decode_failures,
    image_size,
    is_jpeg,
    open_image,
    parse_jpeg_header,
)
from dali_train.data.dataset.index import INDEX_DTYPE
from dali_train.data.dataset.manifest import (
    InPlace,
    Manifest,
    SplitManifest,
    SplitName,
    checksums_path,
    files_path,
    index_path,
)
from dali_train.data.progress import Progress
from dali_train.errors import DatasetError
from dali_train.files import ForeignFileError, read_json, write_atomically
from dali_train.text import plural

_PORTION = 1000  # images; a kill loses some seconds of work
_MEASURED = np.dtype([("crc32c", "<u4"), ("height", "<u2"), ("width", "<u2")])
_MAX_STATE_BYTES = 1 << 20
_SIDEWAYS = "EXIF orientation not upright, which training ignores: `data convert --apply-orientation` turns them"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an index has of some images, beyond where they are."""

    rows: NDArray[np.void]  # _MEASURED, (N,); 0 for a bad image
    bad: dict[int, str]  # position -> reason
    counts: Counter[str]  # what a conversion would have changed -> images

    def save(self, path: Path) -> None:
        facts = json.dumps({"bad": list(self.bad.items()), "counts": self.counts})
        with partial_path(path).open("wb") as file:
            np.savez(file, rows=self.rows, facts=np.frombuffer(facts.encode(), np.uint8))
        partial_path(path).replace(path)

    @classmethod
    def load(cls, path: Path) -> "Measured | None":
        """Return what an earlier start has saved; None if there is nothing, or a power failure has spoilt it."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                facts = json.loads(arrays["facts"].tobytes())
                return cls(rows=arrays["rows"], bad=dict(facts["bad"]), counts=Counter(facts["counts"]))
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None


def measure(images: Images, numbers: range, *, decode: bool) -> Measured:
    """Read images and return what the index has of them; decode them too, if asked for."""
    rows = np.zeros(len(numbers), dtype=_MEASURED)
    bad: dict[int, str] = {}
    counts: Counter[str] = Counter()
    batch: dict[int, bytes] = {}  # that are decoded together
    pixels: list[int] = []

    def check() -> None:
        sound = [*batch]
        failures = decode_failures([*batch.values()], np.array(pixels, np.int64)) if decode else {}
        bad.update((sound[number], reason) for number, reason in failures.items())
        batch.clear()
        pixels.clear()

    for position, number in enumerate(numbers):
        content = images.read(number)
        assert isinstance(content, bytes)
        try:
            height, width = image_size(content)
            kinds = _differences(content)
        except BadImageError as error:
            bad[position] = str(error)
            continue
        rows[position] = crc32c(content), height, width
        counts.update(kinds)
        batch[position] = content
        pixels.append(height * width)
        if len(batch) == DecodeChecker.BATCH or sum(pixels) >= BATCH_PIXELS:
            check()
    check()
    return Measured(rows=rows, bad=bad, counts=counts)


def _differences(content: bytes) -> list[str]:
    """Return what a conversion would do to an image, or could do, in words for the user."""
    if is_jpeg(content):
        header = parse_jpeg_header(content)
        sideways, kind = header.orientation != 1, "" if header.is_plain else "CMYK JPEG"
    else:
        with open_image(content) as image:
            sideways, kind = orientation_of(image) != 1, str(image.format)
    return [*([f"{kind}, which a conversion re-encodes"] if kind else []), *([_SIDEWAYS] if sideways else [])]


@dataclass(frozen=True, kw_only=True)
class IndexInPlace:
    """What to index, and where to write it."""

    name: str  # of the converter that listed the images
    splits: Mapping[SplitName, Images]
    class_names: Sequence[str]
    source: str  # the directory that all files lie below
    out: Path
    seed: int
    keep_order: bool  # number the images as they lie in their files, not as a conversion would
    decode: bool
    on_bad: OnBad
    workers: int


def index_in_place(task: IndexInPlace) -> list[str]:
    """Write the index, and return lines to print.

    Raises:
        DatasetError: `out` holds something else, or images cannot be read by their range.
        RunError: bad images and ``on_bad`` is fail, or the disk is full.
        SourceError: a file changed meanwhile.
    """
    _check_out(task.out)
    state = task.out / ".indexing"
    task.out.mkdir(parents=True, exist_ok=True)
    with locked(state, shared=False), explain_full_disk(task.out):
        names: dict[str, int] = {}  # of the files -> their numbers
        rows = {split: _rows(task, images, names) for split, images in task.splits.items()}
        table = make_table(task.source, [*names], None)
        _claim(task, state, crc32c(table.data))
        measured = {split: _measure_split(task, split, state) for split in task.splits}
        left_out = {split: _bad_images(task.splits[split], measured[split]) for split in task.splits}
        report_bad_images(task.out, left_out, task.on_bad)
        report = {
            split: {**each.counts, "left out, see quarantine.jsonl": len(each.bad)} for split, each in measured.items()
        }
        _write(task, rows, measured, table, len(names), report)
        shutil.rmtree(state)
    lines = [
        f"{split}: {plural(count, 'image')}: {kind}"
        for split, kinds in report.items()
        for kind, count in kinds.items()
        if count
    ]
    for split, images in task.splits.items():
        num_images = len(images.labels) - len(measured[split].bad)
        lines.append(f"{split}: {num_images:,} images, {len(task.class_names)} classes")
    return [*lines, f"{task.out} indexes {plural(len(names), 'file')} in {task.source}"]


def _check_out(out: Path) -> None:
    """Raises DatasetError: it holds something else than an index in place."""
    if (out / "dataset.json").exists():
        if Manifest.read(out).in_place is None:
            raise DatasetError(f"--out {out}: holds a dataset with shards of its own: name another directory")
        return
    foreign = sorted(path.name for path in out.iterdir() if path.name not in _OWN) if out.exists() else []
    if foreign:
        raise DatasetError(f"--out {out}: holds {', '.join(foreign[:5])}: name a new directory, or an empty one")


_OWN = (".indexing", "index", "quarantine.jsonl")


def _claim(task: IndexInPlace, state: Path, files_crc32c: int) -> None:
    """Keep what an earlier start has found out about the same files, and remove what it has about others."""
    splits = {split: images.identity() for split, images in task.splits.items()}
    identity = json.loads(json.dumps({"splits": splits, "files_crc32c": files_crc32c, "decode": task.decode}))
    try:
        if read_json(state / "task.json", _MAX_STATE_BYTES) == identity:
            return
    except (FileNotFoundError, ForeignFileError):
        pass
    for path in state.glob("*.npz"):
        path.unlink()
    write_atomically(state / "task.json", json.dumps(identity).encode())


def _rows(task: IndexInPlace, images: Images, names: dict[str, int]) -> NDArray[np.void]:
    """Return the rows of the index, in the order of the listing and without sizes in pixels; add files to `names`.

    Raises:
        SourceError: the split has no images, or one is packed.
    """
    rows = np.zeros(len(images.labels), dtype=INDEX_DTYPE)
    if not len(rows):
        raise SourceError(f"{task.source}: has no images")
    for number in range(len(rows)):
        image = images[number]
        if image.is_packed:
            raise SourceError(
                f"{image.location}: is packed, and an image must be a range of bytes of a file to be read in place: "
                f"unpack the file, or convert it with `dali-train data convert {task.name}`"
            )
        name = file_of(image).removeprefix(f"{task.source}/")
        rows[number] = image.offset, image.size, names.setdefault(name, len(names)), image.label, 0, 0
    return rows


def file_of(image: Image) -> str:
    """Return the path of the file that an image is all of, or a range of."""
    return image.file + image.name if image.file.endswith("/") else image.file


def _measure_split(task: IndexInPlace, split: SplitName, state: Path) -> Measured:
    images = task.splits[split]
    num_images = len(images.labels)
    portions = [range(first, min(first + _PORTION, num_images)) for first in range(0, num_images, _PORTION)]

    def measured(numbers: range) -> Measured:
        path = state / f"{split}-{numbers.start}.npz"
        found = Measured.load(path)
        if found is None:
            found = measure(images, numbers, decode=task.decode)
            found.save(path)
        return found

    rows = np.zeros(num_images, dtype=_MEASURED)
    bad: dict[int, str] = {}
    counts: Counter[str] = Counter()
    with Progress(f"indexing {split}", total=num_images, unit="images") as progress:
        for numbers, each in zip(portions, map_shards(portions, measured, workers=task.workers), strict=True):
            rows[numbers.start : numbers.stop] = each.rows
            bad |= {numbers.start + position: reason for position, reason in each.bad.items()}
            counts += each.counts
            progress.update(len(numbers))
    return Measured(rows=rows, bad=bad, counts=counts)


def _bad_images(images: Images, measured: Measured) -> list[BadImage]:
    listed = [(images[number], reason) for number, reason in measured.bad.items()]
    return [BadImage(file=image.location, position=image.offset, reason=reason) for image, reason in listed]


def _write(
    task: IndexInPlace,
    rows: Mapping[SplitName, NDArray[np.void]],
    measured: Mapping[SplitName, Measured],
    table: NDArray[np.void],
    num_files: int,
    report: Mapping[SplitName, Mapping[str, int]],
) -> None:
    """Write the index, ``dataset.json`` last: a kill in between leaves no dataset instead of a mixture of two."""
    (task.out / "dataset.json").unlink(missing_ok=True)
    splits: dict[str, SplitManifest] = {}
    for split, images in task.splits.items():
        num_images, found = len(images.labels), measured[split]
        for side in ("height", "width"):
            rows[split][side] = found.rows[side]
        order = np.arange(num_images) if task.keep_order else shuffled_layout(num_images, 1, seed=task.seed)[0]
        order = order[~np.isin(order, [*found.bad])]
        if not len(order):
            raise SourceError(f"{task.source}: the {split} split has no image that can be decoded")
        splits[split] = SplitManifest(
            num_records=len(order),
            image_bytes=int(rows[split]["size"][order].sum(dtype=np.int64)),
            index_crc32c=write_array(index_path(task.out, split), rows[split][order]),
            image_checksums_crc32c=write_array(checksums_path(task.out, split), found.rows["crc32c"][order]),
        )
    files_crc32c = write_array(files_path(task.out), table)
    options = {"dataset": task.name, "seed": None if task.keep_order else task.seed, "decode_check": task.decode}
    Manifest(
        num_classes=len(task.class_names),
        class_names=tuple(task.class_names),
        label_base=0,
        splits=splits,
        conversion={"options": options, "report": dict(report)},
        in_place=InPlace(source=os.fspath(task.source), num_files=num_files, files_crc32c=files_crc32c),
    ).write(task.out)
