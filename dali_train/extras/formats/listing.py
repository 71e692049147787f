"""What converters from many files with numeric labels share: splits, labels, class names, and unpacking.

Some files' images can only be unpacked together: the row groups of Parquet files, compressed shards. They are asked for
in random order, so each such block is unpacked once, with its first image, into a temporary file.
"""

import logging
import os
import re
import tempfile
import threading
from argparse import Namespace
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dali_train.data.convert.archives import Archive, Directory
from dali_train.data.convert.image import RawImage
from dali_train.data.convert.sources import (
    Image,
    ImageFiles,
    Images,
    SourceError,
    Sources,
    hold_out,
    printable_name,
    read_range,
)
from dali_train.data.dataset.image_file import BadImageError
from dali_train.data.dataset.manifest import (
    MAX_CLASSES,
    SplitName,
    SplitWord,
    read_class_names,
    split_word,
    splits_of_words,
)
from dali_train.data.dataset.packed_files import how_packed
from dali_train.data.dataset.passed_over import TEST_SPLIT, PassedOver, warn_missing
from dali_train.data.progress import Progress
from dali_train.errors import RunError
from dali_train.text import printable, shortened

_log = logging.getLogger(__name__)
_MOST_OPENED = 100  # of files that are not read, to say why
Listed = Iterable[Image | PassedOver]
ListFile = Callable[[Path], Listed]
"""Yields the images of one file, and what is passed over in it."""

Within = Callable[[Path, ListFile], Listed]
"""Lists one file while its content is there."""


def sources_of(
    options: Namespace,
    ending: str,
    list_file: ListFile,
    names: Sequence[str] = (),
    read: Callable[[Image], RawImage] = read_range,
    resolve: Callable[[Mapping[SplitName, Images]], Sequence[str]] = lambda splits: (),
) -> Sources:
    """Return the splits and the class names of what `list_file` finds in each file whose name ends in `ending`.

    Args:
        options: ``source``, ``validation_fraction``, ``group_by``, ``class_names`` and ``seed``, see `DATASETS`.
        names: those of the classes where ``class_names`` has none; without any, the labels as text.
        resolve: `LabelSets.resolve`, for a format whose images may have names for labels, or several.

    Raises:
        SourceError: no files, no images in them, or an image whose label has no name.
    """
    return with_names(options, list_splits(options.source, ending, list_file, read), names, resolve)


def with_names(
    options: Namespace,
    splits: Mapping[SplitName, Images],
    names: Sequence[str],
    resolve: Callable[[Mapping[SplitName, Images]], Sequence[str]],
) -> Sources:
    """Return the splits and the class names, as `sources_of`, of images that are listed already."""
    names = resolve(splits) or names
    if options.class_names is not None:
        theirs, names = names, read_class_names(options.class_names)
        compare_names(options.class_names, names, theirs)
    largest = {split: _largest_classes(images) for split, images in splits.items()}
    if not names:
        names = [str(label) for label in range(1 + max(int(classes.max()) for classes in largest.values()))]
    for split, images in splits.items():
        nameless = np.flatnonzero(largest[split] >= len(names))
        if len(nameless):
            image = images[int(nameless[0])]
            raise SourceError(
                f"{image.location}: its label is {largest[split][nameless[0]]}, and there are "
                f"{len(names)} class names, for labels from 0: give a file with a name for each to --class-names"
            )
    return hold_out(splits, options.validation_fraction, seed=options.seed, group_by=options.group_by), names


def compare_names(path: Path, names: Sequence[str], theirs: Sequence[str]) -> None:
    """Log the first difference between `names`, which are those in the file `path`, and `theirs`, which the dataset's
    files have themselves: classes may be renamed.

    Raises:
        SourceError: they are the same names in another order.
    """
    pairs = enumerate(zip(names, theirs, strict=False))
    different = next(((label, name, other) for label, (name, other) in pairs if name != other), None)
    if different is None:
        return
    label, name, other = different
    text = f"--class-names {path} has {shortened(printable(name), 60)} for label {label}, and the files say "
    text += shortened(printable(other), 60)
    if sorted(names) == sorted(theirs):
        raise SourceError(f"{text}: put its lines in the order of the labels")
    _log.warning("%s: they are called as in %s", text, path.name)


def _largest_classes(images: Images) -> NDArray[np.int32]:
    """Return the largest class of each image, (N,); -1 where there is none."""
    if images.label_kind.is_class:
        return images.labels
    labels, numbers = np.unique(images.labels, return_inverse=True)
    largest = [max(images.label_kind.classes_of(label), default=-1) for label in labels.tolist()]
    return np.array(largest, dtype=np.int32)[numbers]


def list_splits(
    source: Path, ending: str, list_file: ListFile, read: Callable[[Image], RawImage] = read_range
) -> dict[SplitName, Images]:
    """Return the splits that `list_file` finds in the files below `source` whose names end in `ending`, sorted.

    The last of the words train, val (valid, validation) and test in a file's path below `source` is its split; without
    any such word all files are for training. Where there is no other, test is the validation split. All other files
    are passed over, unless `list_file` says which (MDS's shards, by their index.json).

    Raises:
        SourceError: no files, no images in them, or files of no split beside others.
    """
    if not os.access(source, os.F_OK):
        raise SourceError(f"--source {source}: does not exist: name a directory of *{ending}, or one such file")
    files: dict[SplitWord | None, list[Path]] = {}
    others: list[PassedOver] = []
    unread: list[Path] = []
    for entry in Directory(source).walk() if source.is_dir() else [Image("", "", 0, 0)]:
        if isinstance(entry, PassedOver):
            others.append(entry)
        elif (source / entry.name).name.lower().endswith(ending):
            files.setdefault(split_word(entry.name), []).append(source / entry.name)
        elif not ending.endswith(".json"):
            others.append(PassedOver.by_suffix(entry.name.rpartition("/")[0], (source / entry.name).name))
            unread.append(source / entry.name)
    if not files:
        for path in unread[:_MOST_OPENED]:
            if packed := how_packed(path):
                raise SourceError(f"--source {source}: has no *{ending}, and {printable_name(path.name)} {packed}")
        there = sorted({one.reason for one in others})
        raise SourceError(
            f"--source {source}: has no *{ending}"
            + (f", but files {', '.join(there[:5])}" if there else "")
            + ": name the directory that holds them, or one such file"
        )
    _refuse_packed_beside(unread, ending)
    if None in files and len(files) > 1:
        raise SourceError(
            f"{printable_name(str(files[None][0]))}: train, val or test is in the names of other files, but not in "
            "this one: rename it, or move it out of --source"
        )
    used = splits_of_words([word for word in files if word is not None])
    chosen: dict[SplitName, list[Path]] = {split: files[word] for word, split in used.items()}
    if None in files:
        chosen["train"] = files[None]
    for paths in chosen.values():
        _refuse_two_configurations(source, paths)
        warn_missing(source, [path.name for path in paths])
    others += [PassedOver("", TEST_SPLIT)] * (len(files.get("test", ())) if "val" in used else 0)
    splits: dict[SplitName, Images] = {}
    with Progress(f"listing {source}", total=sum(map(len, chosen.values())), unit="files") as progress:
        for split, paths in chosen.items():
            listed = ImageFiles(partial(_list_files, others, paths, list_file, progress), read)
            splits[split] = Images(listed, source if source.is_dir() else source.parent)
            others = []  # shown once, with the first split
            if not len(splits[split].labels):
                more = ", nor have the others" if paths[1:] else ""
                raise SourceError(
                    f"{paths[0]}: has no images{more}: fetch it, or name what holds images{seen(splits[split])}"
                )
    return splits


def _refuse_packed_beside(unread: Collection[Path], ending: str) -> None:
    """Raises SourceError: a file would be read if it were unpacked, and has not been, as those beside it have."""
    for path in unread:
        if path.stem.lower().endswith(ending) and not path.with_suffix("").exists() and (packed := how_packed(path)):
            raise SourceError(f"{printable_name(str(path))}: {packed}, as the files beside it are, or move it away")


_NUMBER = re.compile(r"\d+(?![a-z\d])", re.IGNORECASE)  # of a file; 22k is part of a name
_HASH = r"(?<![a-z\d])(?=[a-f]*\d)(?=\d*[a-f])[a-f\d]{8,}(?:-[a-f\d]{4,})*(?![a-z\d])"
_NO_NUMBER = re.compile(rf"-of-\d+|{_HASH}", re.IGNORECASE)


def _refuse_two_configurations(source: Path, paths: Iterable[Path]) -> None:
    """Raises SourceError: in one directory two of the files, all of one split, have one number and different names."""
    first: dict[tuple[Path, tuple[str, ...]], tuple[str, Path]] = {}
    for path in paths:
        name = _NO_NUMBER.sub("", path.name)
        numbers = tuple(number.lstrip("0") for number in _NUMBER.findall(name))
        name = _NUMBER.sub("", name)
        other_name, other = first.setdefault((path.parent, numbers), (name, path)) if numbers else (name, path)
        if name != other_name:
            raise SourceError(
                f"{source}: {printable_name(other.name)} and {printable_name(path.name)} are both files of one split, "
                "as configurations of a repository on the Hub have them, and an image of both would count twice: move "
                "those of one into another directory, or if they are parts of one dataset, number them alike"
            )


def seen(images: Images) -> str:
    """Return what is there instead of images."""
    reasons = sorted({one.reason for one in images.passed_over})
    return f" (there are files {', '.join(reasons[:5])})" if reasons else ""


def _list_files(
    others: Iterable[PassedOver], paths: Iterable[Path], list_file: ListFile, progress: Progress
) -> Iterator[Image | PassedOver]:
    yield from others
    for path in paths:
        yield from list_file(path)
        progress.update(1)


def where_it_lies(path: Path, list_file: ListFile) -> Listed:
    """List a file on a disk: the usual `Within`."""
    return list_file(path)


def open_plain(path: Path) -> Archive:
    """Open a tar whose images are read in place. Raises SourceError: it is compressed."""
    packed = how_packed(path)
    if packed:
        raise SourceError(f"{path}: images are read in place, and it {packed}")
    return Archive(path)


def find_column(path: Path, columns: Mapping[str, str], option: str, key: str | None, usual: Sequence[str]) -> str:
    """Return the column that `key`, the value of `option`, names, else the first of the `usual`.

    Args:
        columns: name -> type, for people.

    Raises:
        SourceError: `path` has none.
    """
    matching = [name for name in ((key,) if key else usual) if name in columns]
    if not matching:
        there = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
        raise SourceError(f"{path}: has no column {key or ' or '.join(usual)}, but {there}: name one with {option}")
    return matching[0]


def warn_columns(source: Path, columns: Collection[str], image: str, label: str, said: set[str]) -> None:
    """Log which columns are used for what, and which are not used; what is in `said` not again."""
    text = f"images from {image}, labels from {label}"
    unused = ", ".join(name for name in columns if name not in (image, label))
    text += f", not used: {unused}" if unused else ""
    if text not in said:
        said.add(text)
        _log.warning("%s: %s", source, shortened(printable(text), 300))


def checked_label(label: object, location: str) -> int:
    """Return `label`. Raises SourceError: it is not a whole number from 0 on, or larger than any class's."""
    if type(label) is not int or not 0 <= label < MAX_CLASSES:
        text = repr(label)
        raise SourceError(
            f"{location}: its label is {text if len(text) < 60 else text[:56] + '...'}: labels are whole numbers "
            f"from 0 to {MAX_CLASSES - 1:,}, or names; correct it, or leave the file out"
        )
    return label


def import_pyarrow() -> Any:
    """Return the module pyarrow, with pyarrow.parquet. Raises SourceError: it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise SourceError(
            "Parquet and compressed MDS are read with pyarrow, which is missing: pip install 'dali-train[parquet]'"
        ) from error
    return pyarrow


@dataclass
class _Block:
    """Images that are unpacked together."""

    first: int  # number of the first image in the file, with which its name ends
    num_images: int
    unpack: Callable[[], Iterable[bytes]]
    ends: "array[int] | None" = None  # where the images begin and end in the temporary file; None: not unpacked yet


class PackedBlocks:
    """Reads images of packed blocks, and others in place. The temporary file vanishes with the process."""

    def __init__(self, directory: Path) -> None:
        """It lies where TMPDIR says, else in `directory`, which need not exist before there are images."""
        self._directory = Path(os.environ.get("TMPDIR") or directory)
        self._file: IO[bytes] | None = None
        self._size = 0
        self._blocks: dict[tuple[str, int], _Block] = {}
        # Held while unpacking, so that only one block is in memory however many workers there are.
        self._lock = threading.Lock()

    def add(
        self,
        path: Path,
        kind: str,
        labels: Sequence[int],
        unpack: Callable[[], Iterable[bytes]],
        sizes: Sequence[int],
        *,
        first: int = 0,
        position: int = 0,
    ) -> Iterator[Image]:
        """Yield the images of a block that begins at byte `position` of the file. They are named `{kind} {number}`,
        counting from `first`."""
        file = str(path)
        if (file, position) in self._blocks:
            raise SourceError(f"{path}: damaged: two of its blocks begin at byte {position}: fetch it again")
        self._blocks[file, position] = _Block(first, len(labels), unpack)
        for number, (label, size) in enumerate(zip(labels, sizes, strict=True), first):
            yield Image(file, f"{kind} {number}", position, size, label, is_packed=True)

    def read(self, image: Image) -> bytes:
        """Raises BadImageError: there are no bytes. SourceError: a block has fewer images than were listed, or more."""
        block = self._blocks.get((image.file, image.offset))
        if block is None:
            return read_range(image)
        ends = block.ends or self._unpack(block, image)
        assert self._file is not None
        number = int(image.name.rpartition(" ")[2]) - block.first
        begin, end = ends[number], ends[number + 1]
        if begin == end:
            raise BadImageError("is null, or has no bytes")
        return os.pread(self._file.fileno(), end - begin, begin)

    def _unpack(self, block: _Block, image: Image) -> "array[int]":
        with self._lock:
            if block.ends is None:  # else another thread has done it meanwhile
                ends = self._append(block.unpack())
                if len(ends) != block.num_images + 1:
                    problem = f"{len(ends) - 1} images follow, {block.num_images} when the conversion began"
                    raise SourceError(f"{image.location}: {problem}")
                block.ends = ends
            return block.ends

    def _append(self, images: Iterable[bytes]) -> "array[int]":
        """Return the offsets between which the images are. Raises RunError: the directory is full or not writable."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115  open as long as the source
            self._file.seek(self._size)  # behind the last complete block
            ends = array("Q", [self._size])
            for image in images:
                self._file.write(image)
                ends.append(ends[-1] + len(image))
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"{self._directory}: the source cannot be unpacked here ({error.strerror}): make as much space as it "
                "takes, or name another directory in TMPDIR, and start the same command again"
            ) from error
        self._size = ends[-1]
        return ends
