"""The common part of converters from many files with numeric labels: splits, labels and class names."""

import logging
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dali_train.data.convert.archive import Archive, Directory, FileRanges, Member, SourceError, printable
from dali_train.data.convert.sources import ImageFiles, JoinedSources, Source, Sources, hold_out
from dali_train.data.dataset.manifest import MAX_CLASSES, SplitName, read_class_names
from dali_train.data.progress import Progress

_SPLIT_WORD = re.compile(r"(?<![a-z])(train|val|test)(?:ing|id|idation)?(?![a-z])", re.IGNORECASE)
_log = logging.getLogger(__name__)


def sources_of(
    options: Namespace, ending: str, list_file: Callable[[Path], Iterable[Source]], names: Sequence[str] = ()
) -> Sources:
    """Return the splits and the class names of what `list_file` finds in each file whose name ends in `ending`.

    Args:
        options: ``source``, ``validation_fraction``, ``class_names`` and ``seed``, see `DATASETS`.
        names: those of the classes where ``class_names`` has none; without any, the labels as text.

    Raises:
        SourceError: no files, no images in them, or an image whose label has no name.
    """
    splits = list_splits(options.source, ending, list_file)
    if options.class_names is not None:
        names = read_class_names(options.class_names)
    if not names:
        names = [str(label) for label in range(1 + max(int(source.labels.max()) for source in splits.values()))]
    for source in splits.values():
        nameless = np.flatnonzero(source.labels >= len(names))
        if len(nameless):
            raise SourceError(
                f"{source.locate(int(nameless[0]))[0]}: its label is {source.labels[nameless[0]]}, and there are "
                f"{len(names)} class names, for labels from 0: give a file with a name for each to --class-names"
            )
    return hold_out(splits, options.validation_fraction, seed=options.seed), names


def list_splits(source: Path, ending: str, list_file: Callable[[Path], Iterable[Source]]) -> dict[SplitName, Source]:
    """Return the splits that `list_file` finds in the files below `source` whose names end in `ending`, sorted.

    The last of the words train, val (valid, validation) and test in a file's path below `source` is its split; without
    any such word all files are for training. Where there is no other, test is the validation split.

    Raises:
        SourceError: no files, no images in them, or files of no split beside others.
    """
    if not os.access(source, os.F_OK):
        raise SourceError(f"--source {source}: does not exist: name a directory of *{ending}, or one such file")
    files: dict[str, list[Path]] = {}
    names = [member.name for member in Directory(source).members()] if source.is_dir() else [""]
    for name in names:
        if (source / name).name.endswith(ending):
            words = _SPLIT_WORD.findall(name)
            files.setdefault(words[-1].lower() if words else "", []).append(source / name)
    if not files:
        raise SourceError(f"--source {source}: has no *{ending}: name the directory that holds them, or one such file")
    if "" in files and len(files) > 1:
        raise SourceError(
            f"{printable(str(files[''][0]))}: train, val or test stands in the names of other files, not in this one: "
            "rename it, or move it out of --source"
        )
    chosen: dict[SplitName, list[Path]] = {
        "train": files.get("train", []) + files.get("", []),
        "validation": files.get("val") or files.get("test", []),
    }
    if "val" in files and "test" in files:
        _log.warning("%s: %d files of the test split are left out", source, len(files["test"]))
    sources: dict[SplitName, Source] = {}
    with Progress(f"listing {source}", total=sum(map(len, chosen.values())), unit="files") as progress:
        for split, paths in chosen.items():
            parts: list[Source] = []
            for path in paths:
                parts += list_file(path)
                progress.update(1)
            if paths and not sum(len(part.labels) for part in parts):
                raise SourceError(f"{paths[0]}: has no images{', nor have the others' if paths[1:] else ''}: fetch it")
            if paths:
                sources[split] = JoinedSources(source if source.is_dir() else source.parent, parts)
    return sources


def list_archive(path: Path, images: Callable[[Archive], Iterable[tuple[Member, int]]]) -> list[Source]:
    """Return what `images` finds in a tar, to be read in place. Raises SourceError: it is gzipped, or by `images`."""
    archive = Archive(path)
    if archive.is_gzipped:
        raise SourceError(f"{path}: is gzipped, and images are read in place: gunzip it first")
    return [ImageFiles(FileRanges(path), images(archive))]


def find_column(path: Path, columns: Mapping[str, str], option: str, key: str | None, usual: Sequence[str]) -> str:
    """Return the column that `key`, the value of `option`, names, else the first of the `usual`.

    Args:
        columns: name -> type, for people.

    Raises:
        SourceError: `path` has none.
    """
    found = [name for name in ((key,) if key else usual) if name in columns]
    if not found:
        there = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
        raise SourceError(f"{path}: has no column {key or ' or '.join(usual)}, but {there}: name one with {option}")
    return found[0]


def checked_label(label: object, place: str) -> int:
    """Return `label`. Raises SourceError: it is not a whole number from 0 on, or larger than any class's."""
    if type(label) is not int or not 0 <= label < MAX_CLASSES:
        text = repr(label)
        raise SourceError(
            f"{place}: its label is {text if len(text) < 60 else text[:56] + '...'}: labels are whole numbers from 0 "
            f"to {MAX_CLASSES - 1:,}; correct it, or leave the file out"
        )
    return label
