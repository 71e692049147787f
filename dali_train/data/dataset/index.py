"""A dataset on disk: ``dataset.json`` and the columnar index.

One row of the index describes one image: its shard, the byte range of the encoded image, its label and its size in
pixels. With it a slice of a memory map is the JPEG, and training parses nothing. `write_index` makes the index.
"""

import csv
import mmap
import os
import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.config import DataConfig, SampleConfig, View
from dali_train.config.check import Extra
from dali_train.config.sections import is_url
from dali_train.data.dataset.files_in_place import SourceFiles, is_table
from dali_train.data.dataset.label_kind import LabelKind
from dali_train.data.dataset.manifest import (
    InPlace,
    Manifest,
    Shard,
    SplitName,
    checksums_path,
    copy_again,
    dataset_errors,
    files_path,
    index_path,
    metadata_directory,
    text_index_path,
)
from dali_train.data.dataset.tfrecord import TFRecordError, parse_example, walk_records
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.data.sampling.order import SampleOrder
from dali_train.errors import ConfigError, DatasetError
from dali_train.files import (
    NO_SHARED_MAP,
    ForeignFileError,
    json_field,
    open_regular,
    read_json,
    read_limited,
    temporary_directory,
)
from dali_train.runtime.object_store import Bucket, ObjectStoreError, is_remote
from dali_train.text import printable

# One row per image. `offset` and `size` are bytes of the encoded image within its shard, or its file of an index in
# place; `label` counts from 0.
INDEX_DTYPE = np.dtype(
    [("offset", "<u8"), ("size", "<u4"), ("shard", "<u4"), ("label", "<i4"), ("height", "<u2"), ("width", "<u2")]
)
_MAX_TEXT_INDEX_BYTES = 1 << 28  # of one shard
_VALIDATION_FILE = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")  # counted from 1
_LARGEST_LABELS = 10_000_000  # bytes; those of ReaL have 0.6 million
_LARGEST_EXCLUDED = 1_000_000_000  # bytes
_ROWS_AT_ONCE = 1 << 20  # of an index: a check makes some arrays of 8 bytes a row


class Split:
    """One split of an indexed dataset, opened for reading.

    `rows` is the memory-mapped index (``INDEX_DTYPE``), `checksums` the CRC32C of each image's bytes, (N,) uint32, None
    if the index has none. `paths` are the shards' files, numbered as in the rows; in an object store only names. An
    index in place has `files` instead of shards. `url` is where either lie in an object store, None on a disk;
    `is_on_disk` is also False if another storage has them. `kept` is which images take part in training, (N,), None if
    all do, and `num_images` their number. `label_kind` is what the labels stand for. `location` is `root` as given.

    Args:
        root: the dataset's directory, or its URL in an object store; for another storage ``SCHEME://DIRECTORY``, the
            directory that has the index, while the storage of that scheme has the shards.
        local: whether the shards lie below `root`. If not, only the index can be read.
        strict: whether the index's content is checked. `verify` leaves it out, since it compares every row itself.
        exclude: a file of images that do not take part, see `kept_images`; None: all do.

    Raises:
        ConfigError: see `kept_images` and `Manifest.label_kind`.
        DatasetError: a part is missing, the index does not belong to ``dataset.json``, a row is invalid, or a shard
            does not match the index.
    """

    source_name = ""  # of a split that is a part of another

    def __init__(
        self,
        root: Path | str,
        name: SplitName,
        *,
        local: bool = True,
        strict: bool = True,
        exclude: Path | str | None = None,
    ) -> None:
        self.location = str(root)
        self.root = metadata_directory(root)
        self.dataset_name = Path(root).resolve().name
        self._root_url = str(root).rstrip("/") if is_remote(str(root)) else None
        self.url = self._root_url and f"{self._root_url}/{name}"
        self.is_on_disk = not is_url(str(root))
        reads_images, local = local, local and self.is_on_disk
        self.name = name
        self.manifest = Manifest.read(root)
        split = self.manifest.splits.get(name)
        if split is None:
            raise DatasetError(f"{root} has no {name} split, only {', '.join(self.manifest.splits) or 'none'}")
        self._remedy = f"run `dali-train data index {shlex.quote(str(root))}` again"
        if self._root_url is not None:
            self._remedy = copy_again(str(root))
        self.num_bytes = split.num_bytes
        self.dataset_bytes = sum(each.num_bytes for each in self.manifest.splits.values())
        self.label_kind = self._label_kind()
        self.rows: NDArray[np.void] = self._open_array(index_path(self.root, name), split.num_records, INDEX_DTYPE)
        self.checksums: NDArray[np.uint32] | None = None
        if split.image_checksums_crc32c is not None:
            self.checksums = self._open_array(checksums_path(self.root, name), len(self), np.dtype("<u4"))
        self.files = None if self.manifest.in_place is None else self._open_files(self.manifest.in_place)
        self.shards: tuple[Shard, ...] = split.shards
        self.paths = [self.root / name / shard.name for shard in self.shards]
        # Of each shard, and the end: (N + 1,).
        self.first_images = np.cumsum([0, *(shard.num_records for shard in self.shards)])
        if strict:
            self._check_rows()
        if self.files is not None and local:
            assert self.checksums is not None
            self.files.check(self.rows, self.checksums)
        index_time = index_path(self.root, name).stat().st_mtime_ns
        for number, path in enumerate(self.paths if local else ()):
            if self._check_file(path, self.shards[number]) > index_time:
                self._check_ends(number)
        self._leave_out(exclude, reads_images=reads_images)

    def _leave_out(self, path: Path | str | None, *, reads_images: bool) -> None:
        """Set `kept` by a list for data.exclude, if there is one; if it names files, some are compared, which may read
        images.

        Raises:
            ConfigError: see `excluded_images`; or the files are not those of this split.
        """
        self.kept: NDArray[np.bool_] | None = None
        if path is None:
            return
        excluded = excluded_images(path, len(self))
        self.kept = _without(excluded, len(self))
        named = {image: file for image, file in excluded.items() if file}
        if named and reads_images:
            CHECK_EXCLUDED.load()(self, path, named)

    @property
    def num_classes(self) -> int:
        return self.manifest.num_classes

    def order(self, config: SampleConfig) -> SampleOrder:
        """Return a new order of the training images."""
        return SampleOrder.of(config, self.rows["label"], self.kept)

    def micro_batches(self, config: SampleConfig, views: Sequence[View] = ()) -> MicroBatches:
        """Return what the micro-batches of a training on this split are, see `MicroBatches`."""
        return MicroBatches(self.rows, config, views, self.order(config))

    def count_classes(self, labels: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return how many of these labels of the index stand for each class, (classes,)."""
        return self.label_kind.count_classes(labels, self.num_classes)

    def label_text(self, label: int, names: Sequence[str] = ()) -> str:
        """Return the names of the classes that a label of the index stands for.

        Args:
            names: of the classes, instead of the dataset's.
        """
        names = names or self.manifest.class_names
        return ", ".join(names[number] for number in self.label_kind.classes_of(label)) or "no class"

    @property
    def num_images(self) -> int:
        """The number of images that take part in training: positions of an epoch."""
        return len(self) if self.kept is None else int(np.count_nonzero(self.kept))

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Images of each class that take part, (classes,)."""
        labels = self.rows["label"]
        return self.count_classes(labels if self.kept is None else labels[self.kept])

    def __len__(self) -> int:
        return len(self.rows)

    def locate(self, image: int) -> tuple["Split", int]:
        """Return the split of a single dataset that has image number `image`, and the image's number there."""
        return self, image

    def describe(self, image: int) -> str:
        """Return the location of image number `image`, for error messages: the file where it is all of one."""
        row = self.rows[image]
        if self.files is not None and row["size"] == self.files.num_bytes[row["shard"]]:
            return self.shard_location(int(row["shard"]))
        return f"image {image} ({self.shard_location(int(row['shard']))}, {row['size']} bytes at byte {row['offset']})"

    def file_names(self) -> Iterator[str]:
        """Yield the name that every image's file had before the conversion (image/filename), or has in place.

        Raises:
            DatasetError: the records have none, or the images lie in an object store, where each costs a request.
            TFRecordError: a shard is damaged.
        """
        if self.files is not None:
            yield from map(self.files.name, self.rows["shard"].tolist())
            return
        if self.url is not None:
            raise DatasetError(f"{self.url}: names of images are only read from a disk: copy this split to one")
        for path in self.paths:
            content = memoryview(map_file(path))
            for record in walk_records(content, path, check_payload=False):
                feature = parse_example(content, record, path).get("image/filename")
                if feature is None or len(feature.spans) != 1:
                    raise DatasetError(f"{path}: at byte {record.header}: the record has no image/filename")
                yield bytes(content[slice(*feature.spans[0])]).decode(errors="replace")

    def shard_location(self, shard: int) -> str:
        """Return the path or the URL of a shard, or of a file of an index in place."""
        if self.files is not None:
            return printable(self.files.path(shard))
        return str(self.paths[shard]) if self.url is None else f"{self.url}/{self.shards[shard].name}"

    def _shown(self, path: Path) -> str:
        """Return the name of a metadata file, which may have been fetched from an object store, for messages."""
        return str(path) if self._root_url is None else f"{self._root_url}/{path.relative_to(self.root)}"

    @contextmanager
    def shard_file(self, shard: int) -> Iterator[Path]:
        """Yield a shard as a file: its own, or a temporary copy from the object store.

        Raises:
            DatasetError: it is missing or cannot be fetched, or has another size than dataset.json says.
        """
        if self.url is None:
            self._check_file(self.paths[shard], self.shards[shard])
            yield self.paths[shard]
            return
        expected = self.shards[shard]
        with temporary_directory() as directory:
            path, bucket = directory / expected.name, Bucket(self.url)
            with dataset_errors():
                num_bytes = bucket.size(expected.name)
                bucket.download(expected.name, path, num_bytes)
            if num_bytes != expected.num_bytes:
                raise DatasetError(
                    f"{self.shard_location(shard)}: has {num_bytes} bytes, dataset.json says {expected.num_bytes}"
                )
            yield path

    def text_index(self, shard: int) -> bytes:
        """Return DALI's text index of a shard. Raises OSError, ObjectStoreError: it cannot be read."""
        path = text_index_path(self.root, self.name, self.shards[shard].name)
        if self._root_url is None:
            return read_limited(path, _MAX_TEXT_INDEX_BYTES)
        return Bucket(self._root_url).read_all(str(path.relative_to(self.root)))

    def record_offsets(self, shard: int) -> NDArray[np.int64]:
        """Return where the records of a shard begin, (num_records,), from DALI's text index.

        Raises:
            DatasetError: it does not fit.
        """
        path = text_index_path(self.root, self.name, self.shards[shard].name)
        try:
            numbers = np.array(self.text_index(shard).split(), dtype=np.int64)
        except (OSError, ObjectStoreError, ValueError, OverflowError) as error:
            raise DatasetError(f"{self._shown(path)} is missing or cannot be read ({error}): {self._remedy}") from error
        expected = self.shards[shard].num_records
        if len(numbers) != 2 * expected or (numbers < 0).any():
            raise DatasetError(
                f"{self._shown(path)} has {len(numbers) / 2:g} records, dataset.json says {expected}: {self._remedy}"
            )
        return numbers[::2]

    def index_problem(self) -> str | None:
        """Return how the index differs from the one that belongs to ``dataset.json``, or None.

        The labels or places of another index may be wrong.
        """
        split = self.manifest.splits[self.name]
        expected_of = {
            index_path(self.root, self.name): split.index_crc32c,
            checksums_path(self.root, self.name): split.image_checksums_crc32c,
        }
        if self.manifest.in_place is not None:
            expected_of[files_path(self.root)] = self.manifest.in_place.files_crc32c
        for path, expected in expected_of.items():
            if expected is not None and (found := f"{crc32c(map_file(path)):08x}") != expected:
                return (
                    f"{self._shown(path)} has CRC32C {found}, dataset.json says {expected}: they were not written "
                    "together"
                )
        return None

    def _label_kind(self) -> LabelKind:
        try:
            return self.manifest.label_kind
        except DatasetError as error:
            raise DatasetError(f"{self._shown(self.root / 'dataset.json')}: {error}: {self._remedy}") from None

    def _open_files(self, in_place: InPlace) -> SourceFiles:
        path, source = files_path(self.root), in_place.source
        if self._root_url is None and not is_remote(source):
            source = str((self.root / source).resolve())
        self.url = source if is_remote(source) else None
        table = self._open_array(path, None, None)
        if not is_table(table.dtype) or len(table) < in_place.num_files:
            raise DatasetError(f"{self._shown(path)} is not a table of {in_place.num_files} files: {self._remedy}")
        self._remedy = f"index {printable(source)} again"
        return SourceFiles(source, table, in_place.num_files, self._remedy, in_place.labels_from)

    def _open_array(self, path: Path, num_rows: int | None, dtype: np.dtype[Any] | None) -> NDArray[Any]:
        """Map an array of that many rows, or of any."""
        try:
            open_regular(path).close()
            rows = map_array(path)
        except (
            Exception
        ) as error:  # numpy parses the header as Python, with whatever errors a tokenizer and literals have
            reason = (str(error).splitlines() or [type(error).__name__])[0]  # NumPy explains a long header in several
            raise DatasetError(f"{self._shown(path)} cannot be read ({reason}): {self._remedy}") from error
        if rows.ndim != 1 or (dtype is not None and (rows.dtype != dtype or len(rows) != num_rows)):
            size = len(rows) if rows.ndim else 0
            raise DatasetError(f"{self._shown(path)} has {size} rows, dataset.json says {num_rows}: {self._remedy}")
        return rows

    def _check_rows(self) -> None:
        """Check that no row leads out of its file or to a class that does not exist: 30 ms for a million rows."""
        problem = self.index_problem()
        if problem is not None:
            raise DatasetError(f"{problem}; {self._remedy}")
        for first in range(0, len(self), _ROWS_AT_ONCE):
            self._check_some_rows(first, self.rows[first : first + _ROWS_AT_ONCE])

    def _check_some_rows(self, first: int, rows: NDArray[np.void]) -> None:
        """Check `rows`, which begin with row `first`."""
        if self.files is not None:
            outside = rows["shard"] >= len(self.files)
            num_bytes = self.files.num_bytes[np.where(outside, 0, rows["shard"])]
        else:
            numbers = np.arange(first, first + len(rows))
            shards = np.searchsorted(self.first_images, numbers, side="right") - 1
            outside = rows["shard"] != shards
            num_bytes = np.array([shard.num_bytes for shard in self.shards], np.uint64)[shards]
        # Raw pixels are no longer and no shorter than their size says; an encoded image says its size itself.
        pixels = rows["height"].astype(np.uint64) * rows["width"]
        misfits = (rows["size"] != 3 * pixels) & (self.manifest.encoding == "raw")
        wrong = {
            "shard": outside,
            "label": (rows["label"] < 0) | (rows["label"] >= self.manifest.num_labels),
            "offset": rows["offset"] > num_bytes,
            "size": (rows["size"] == 0) | (rows["size"] > num_bytes - np.minimum(rows["offset"], num_bytes)),
            "height": (rows["height"] == 0) | misfits,
            "width": rows["width"] == 0,
        }
        for column, faults in wrong.items():
            if faults.any():
                at = int(faults.argmax())
                row, place = first + at, ""
                if self.files is None:
                    shard = int(np.searchsorted(self.first_images, row, side="right")) - 1
                    place = f" (record {row - self.first_images[shard]} of {self.shards[shard].name})"
                raise DatasetError(
                    f"{self._shown(index_path(self.root, self.name))}: row {row}{place} has {column} "
                    f"{rows[column][at]}, which cannot be with {self.num_classes} classes and "
                    f"{num_bytes[at]} bytes: {self._remedy}"
                )

    def _check_file(self, path: Path, shard: Shard) -> int:
        """Return a shard's time of change in ns. Raises DatasetError: it is missing, no file, or has another size."""
        try:
            status = path.stat()
        except FileNotFoundError:
            raise DatasetError(
                f"{path} is missing, dataset.json names it: restore the shard, or {self._remedy}"
            ) from None
        if not stat.S_ISREG(status.st_mode):
            raise DatasetError(f"{path} is not a regular file: restore the shard, or {self._remedy}")
        if status.st_size != shard.num_bytes:
            raise DatasetError(
                f"{path} has {status.st_size} bytes, the index was made for {shard.num_bytes}: restore the shard, or "
                f"{self._remedy}"
            )
        return status.st_mtime_ns

    def _check_ends(self, number: int) -> None:
        """Compare the first and the last record of a shard with their rows.

        This is for shards newer than the index: either copied without their times, which is harmless, or rewritten. In
        a rewritten shard of the same size, the last record hardly ever begins at the same byte; `verify` compares all.
        """
        path, offsets = self.paths[number], self.record_offsets(number)
        content = memoryview(map_file(path))
        for record in (0, len(offsets) - 1):
            row = self.rows[int(self.first_images[number]) + record]
            try:
                span = next(walk_records(content, path, check_payload=False, start_at=int(offsets[record])))
                features = parse_example(content, span, path)
                fits = features[self.manifest.image_key].spans == ((row["offset"], row["offset"] + row["size"]),)
                fits &= features[self.manifest.label_key].integers == (row["label"] + self.manifest.label_base,)
            except (TFRecordError, StopIteration, KeyError):
                fits = False
            if not fits:
                raise DatasetError(
                    f"{path} is newer than {index_path(self.root, self.name)}, and its record {record} is not what "
                    f"the index says: the shard was written anew, {self._remedy}"
                )


CHECK_EXCLUDED = Extra[Callable[[Split, Path | str, dict[int, str]], None]](
    "dali_train.extras.image_names:check_excluded", "data.exclude"
)


class KindOfDataset(Protocol):
    """The module of what stands for a dataset where the section data says so, see `OneDataset.kind`."""

    def open_split(self, data: DataConfig, name: SplitName, *, local: bool) -> Split: ...

    def read_manifest(self, data: DataConfig) -> Manifest: ...

    def recipe_settings(self, data: DataConfig) -> dict[str, Any]:
        """Return the settings of a recipe that say what is trained on."""
        ...

    def describe_uses(self, config: SampleConfig, steps: int) -> list[str]:
        """Return a line for each source: its share, and what `steps` have of it."""
        ...


def kind_of_dataset(data: DataConfig) -> KindOfDataset | None:
    """Return what stands for the dataset; None: a `Split` of data.root."""
    return None if data.kind is None else data.kind.load()


def open_split(data: DataConfig, name: SplitName, *, local: bool = True) -> Split:
    """Return the split that a run with these settings trains on or evaluates. Who has a directory instead of settings,
    such as a command on one dataset, opens a `Split`.

    Args:
        local: see `Split`.

    Raises:
        ConfigError, DatasetError: see `Split`; or the sources of `data` do not go together.
    """
    if (kind := kind_of_dataset(data)) is not None:
        return kind.open_split(data, name, local=local)
    exclude = data.exclude if name == "train" else None
    return Split(data.root, name, local=local, exclude=exclude)


def read_manifest(data: DataConfig) -> Manifest:
    """Return the manifest of what a run with these settings is trained on. Raises DatasetError: see `Manifest.read`."""
    if (kind := kind_of_dataset(data)) is not None:
        return kind.read_manifest(data)
    return Manifest.read(data.root)


def read_labels(path: Path, split: Split) -> NDArray[np.int64]:
    """Return the labels of each image of ImageNet's validation split in a file like ReaL's, (images, most): a list of
    lists, of the images in the order of their files' names; -1 where an image has fewer than `most`.

    ReaL: Beyer et al., "Are we done with ImageNet?" (arXiv 2006.07159); real.json is in
    google-research/reassessed-imagenet.

    Raises:
        ConfigError: it is no such file, or an image is not among ImageNet's.
        DatasetError: see `Split.file_names`.
    """
    try:
        content = b'{"labels": ' + read_limited(path, _LARGEST_LABELS) + b"}"
        lists = json_field(read_json(content, 2 * _LARGEST_LABELS, name=path), "labels", list)
        for one in lists:
            if not isinstance(one, list) or any(type(x) is not int or not 0 <= x < split.num_classes for x in one):
                raise ForeignFileError(f"{path} has {one!r:.100}, which are not among {split.num_classes} classes")
        lists = [[*dict.fromkeys(one)] for one in lists]  # a class that is given twice counts once
    except (OSError, ForeignFileError, TypeError) as error:
        raise ConfigError(f"data.eval_sets: {error}: use a list of lists of labels such as ReaL's real.json") from None
    labels = np.full((len(split), max(map(len, lists), default=0)), -1)
    for image, name in enumerate(split.file_names()):
        found = _VALIDATION_FILE.search(name)
        if found is None or not 1 <= int(found[1]) <= len(lists):
            raise ConfigError(
                f"data.eval_sets: {path} has labels of ILSVRC2012_val_00000001 to {len(lists):08d}, and the file of "
                f"image {image} of {split.root} is {printable(name)}: use it for ImageNet's validation images"
            )
        own = lists[int(found[1]) - 1]
        labels[image, : len(own)] = own
    if not (labels >= 0).any():
        raise ConfigError(f"data.eval_sets: {path} has no label of an image of {split.root}: use another file")
    return labels


def kept_images(path: Path | str, num_images: int) -> NDArray[np.bool_]:
    """Return which of `num_images` images a file does not exclude, (num_images,). Raises ConfigError: see
    `excluded_images`."""
    return _without(excluded_images(path, num_images), num_images)


def _without(excluded: Collection[int], num_images: int) -> NDArray[np.bool_]:
    kept = np.ones(num_images, dtype=np.bool_)
    kept[list(excluded)] = False
    return kept


def excluded_images(path: Path | str, num_images: int) -> dict[int, str]:
    """Return the images that a file excludes, and the file of each if the list has a column of that name, else "".

    The file has an image's number in each line, or in the first column of a CSV file, whose heading is passed over.

    Raises:
        ConfigError: it cannot be read, has anything else, or leaves no image.
    """
    use = f"use the numbers of images from 0 to {num_images - 1}, one a line or in the first column"
    try:
        lines = read_limited(Path(path), _LARGEST_EXCLUDED).decode().splitlines()
    except (OSError, ForeignFileError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.exclude is {path}, which cannot be read ({error}): {use}") from None
    found: dict[int, str] = {}
    of_file = None  # the column
    for number, row in enumerate(csv.reader(lines), 1):
        cell, *others = (text.strip() for text in row or [""])
        if number == 1 and cell and not re.search(r"\d", cell):
            of_file = others.index("file") if "file" in others else None
            continue
        if not cell:
            continue
        if not cell.isascii() or not cell.isdecimal() or int(cell) >= num_images:
            raise ConfigError(f"data.exclude is {path}, whose line {number} begins with {printable(cell)!r:.40}: {use}")
        found[int(cell)] = others[of_file] if of_file is not None and of_file < len(others) else ""
    if len(found) == num_images:
        raise ConfigError(f"data.exclude is {path}, which leaves none of {num_images} images: exclude fewer")
    return found


def sizes_of(rows: NDArray[np.void]) -> NDArray[np.int32]:
    """Return the height and width of each image by its row of an index, (n, 2)."""
    return np.stack([rows["height"], rows["width"]], axis=-1).astype(np.int32)


def map_file(path: Path) -> mmap.mmap | bytes:
    """Return the file's content, mapped read-only; an empty file cannot be mapped and is empty bytes."""
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return b""
        # Nothing is written, so private pages are the shared ones, and more file systems have them.
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def map_array(path: Path) -> NDArray[Any]:
    """Map an array of ``numpy.save``, read-only. Raises ValueError, OSError and more: it is none, or cannot be read."""
    try:
        rows = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        if error.errno not in NO_SHARED_MAP:
            raise
        rows = np.lib.format.open_memmap(path, mode="c")  # private pages, which NumPy counts as writable
        rows.flags.writeable = False
    return rows.view(np.ndarray)  # of which an element takes 0.1 us; a memmap is Python's class, and takes 3
