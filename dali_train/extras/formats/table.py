"""A table of image files and labels: CSV with a heading, as Kaggle and most labelling tools write it.

::

    file,label,split
    images/0001.jpg,cat,train
    images/0002.jpg,dog,val

With ``--label-separator ";"`` a cell may have several labels, ``cat;dog``, or none, and an image several rows. With
``--multi-hot`` every other column is a class::

    file,cat,dog
    images/0001.jpg,1,0
"""

import csv
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dali_train.data.convert.sources import Directory, Image, ImageFiles, Images, SourceError, Sources, hold_out
from dali_train.data.dataset.image_file import IMAGE_SUFFIXES
from dali_train.data.dataset.manifest import (
    SplitName,
    SplitWord,
    number_classes,
    order_classes,
    read_class_names,
    split_word,
    splits_of_words,
)
from dali_train.data.dataset.packed_files import how_packed
from dali_train.data.dataset.passed_over import TEST_SPLIT, PassedOver
from dali_train.extras.formats.label_sets import LabelSets
from dali_train.extras.formats.listing import Within, find_column, where_it_lies

_FILE_COLUMNS = ("file", "filename", "file_name", "path", "filepath", "image", "image_path", "image_id", "id")
_LABEL_COLUMNS = ("label", "class", "class_name", "category", "target", "breed", "species")
_SPLIT_COLUMNS = ("split", "set", "subset")


def table(options: Namespace, within: Within = where_it_lies) -> Sources:
    """Return the splits and the class names of the files that ``options.source`` names, each below its directory.

    Classes are numbered by their names, whole numbers by their value. A column ``split`` with train, val and test
    divides the images as these folders would.

    Raises:
        SourceError: no table, a column that is not there, a file that is missing, named twice or lies elsewhere, a row
            without a label, or a split of another name.
        DatasetError: ``options.class_names`` cannot be read, or lacks a class.
    """
    path: Path = options.source
    if packed := how_packed(path):
        raise SourceError(f"{path}: {packed}")
    separator: str | None = options.label_separator
    if separator == "":
        raise SourceError("--label-separator is empty: name what stands between two labels, such as ';'")
    if separator is not None and options.multi_hot:
        raise SourceError("--label-separator with --multi-hot, whose columns are the classes: use one of them")
    has_several = separator is not None or options.multi_hot
    class_columns: list[str] | None = [] if options.multi_hot else None
    rows = list(_rows(path, options.image_key, options.label_key, separator, class_columns))
    labels = class_columns or {label for row in rows for label in row.labels}
    is_numbered = all(label.isdecimal() for label in labels)
    if options.class_names is not None:
        names = read_class_names(options.class_names)
        numbers = number_classes(labels, names, options.class_names)
    else:
        names = class_columns or order_classes(labels, "natural" if is_numbered else "name")
        numbers = {name: number for number, name in enumerate(names)}
    words: set[SplitWord] = {row.split for row in rows if row.split is not None}
    splits = splits_of_words(words) if words else {}
    parts: dict[SplitName, list[Image | PassedOver]] = {}
    sets = LabelSets()
    for row in rows:
        classes = [numbers[label] for label in row.labels]
        value = classes if has_several else classes[0]
        image = Image(f"{path.parent}/", row.file, 0, row.size, sets.label(value, row.file))
        if row.split is None or row.split in splits:
            split: SplitName = "train" if row.split is None else splits[row.split]
            parts.setdefault(split, []).append(image)
        else:
            parts.setdefault("train", []).append(PassedOver("", TEST_SPLIT))
    read = Directory(path.parent).read
    images = {split: Images(ImageFiles(part.copy, read), path.parent) for split, part in parts.items()}
    sets.resolve(images)
    return hold_out(images, options.validation_fraction, seed=options.seed, group_by=options.group_by), names


@dataclass(frozen=True)
class _Row:
    """An image of the table, checked."""

    file: str  # below the table's directory
    size: int  # in bytes
    labels: list[str]  # one, unless they are separated
    split: SplitWord | None  # None: the table has no such column


def _rows(
    path: Path,
    image_key: str | None,
    label_key: str | None,
    separator: str | None,
    class_columns: list[str] | None,
) -> Iterator[_Row]:
    """Yield the images; with a separator, at the end.

    Args:
        class_columns: a list for the columns that are classes; None: the column of the labels names them.

    Raises:
        SourceError: see `table`.
    """
    seen: dict[str, int] = {}
    merged: dict[str, _Row] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = _reader(path, lines)
            columns = dict.fromkeys(reader.fieldnames or (), "text")
            if len(columns) < len(reader.fieldnames or ()):
                raise SourceError(f"{path}: two of its columns have one name: rename one of them")
            image = find_column(path, columns, "--image-key", image_key, _FILE_COLUMNS)
            split = _split_column(columns)
            label = ""
            if class_columns is None:
                label = find_column(path, columns, "--label-key", label_key, _LABEL_COLUMNS)
            else:
                class_columns[:] = [name for name in columns if name not in (image, split)]
            for line in reader:
                where = f"{path}, line {reader.line_num}"
                if None in line or None in line.values():
                    raise SourceError(
                        f"{where}: has not one cell under each of the {len(columns)} headings: correct it"
                    )
                name = _checked_file(path.parent, line[image].strip(), where)
                if name in seen and separator is None:
                    raise SourceError(
                        f"{where}: {name} is in line {seen[name]} already: leave one out; where images have several "
                        "labels, say what stands between those in one cell: --label-separator ';'"
                    )
                if class_columns is not None:
                    labels = [column for column in class_columns if _is_one(line[column].strip(), where)]
                else:
                    text = line[label].strip()
                    if not text and separator is None:
                        raise SourceError(f"{where}: {name} has no label: give it one, or leave it out")
                    labels = [text] if separator is None else [part.strip() for part in text.split(separator)]
                size = (path.parent / name).stat().st_size
                word = _checked_split(line[split], where) if split else None
                row = _Row(name, size, [part for part in labels if part], word)
                if separator is None:
                    yield row
                elif name not in merged:
                    merged[name] = row
                elif merged[name].split == row.split:
                    merged[name].labels.extend(row.labels)
                else:
                    raise SourceError(f"{where}: {name} is in another split in line {seen[name]}: use one of them")
                seen[name] = reader.line_num
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"{path}: cannot be read as a table ({reason}): use CSV in UTF-8 with a heading") from error
    if not seen:
        raise SourceError(f"{path}: has no rows: use a heading, such as file,label, and a row per image")
    yield from merged.values()


def _reader(path: Path, lines: Iterable[str]) -> "csv.DictReader[str]":
    return csv.DictReader(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)


def _split_column(columns: Iterable[str]) -> str | None:
    there = {*columns}
    return next((name for name in _SPLIT_COLUMNS if name in there), None)


def has_validation(path: Path) -> bool:
    """Return whether a table names images for validation; False also for a file that is none."""
    with suppress(OSError, UnicodeDecodeError, csv.Error), path.open(encoding="utf-8-sig", newline="") as lines:
        reader = _reader(path, lines)
        column = _split_column(reader.fieldnames or ())
        if column is not None:
            words = {split_word((line[column] or "").strip()) for line in reader}
            return "validation" in splits_of_words({word for word in words if word is not None}).values()
    return False


def _is_one(text: str, where: str) -> bool:
    """Return whether a cell of --multi-hot says that the image has the class. Raises SourceError: it says nothing."""
    if text not in ("1", "1.0", "0", "0.0", "-1", "-1.0"):
        raise SourceError(f"{where}: {text!r} under a class: use 1 for the images that have it, else 0 or -1")
    return text.startswith("1")


def _checked_file(directory: Path, name: str, where: str) -> str:
    """Return the file's name below the table's directory. Raises SourceError: there is none."""
    try:
        below = PurePosixPath(name).relative_to(directory) if name.startswith("/") else PurePosixPath(name)
    except ValueError:
        below = PurePosixPath("..")
    if not name or ".." in below.parts:
        raise SourceError(
            f"{where}: {name!r} does not lie below {directory}, the table's directory: put the table above its images"
        )
    for candidate in (str(below), *(f"{below}{suffix}" for suffix in sorted(IMAGE_SUFFIXES))):  # an id without suffix
        if (directory / candidate).is_file():
            return candidate
    raise SourceError(f"{where}: there is no file {directory / below}: restore it, or leave the row out")


def _checked_split(text: str, where: str) -> SplitWord:
    word = split_word(text.strip())
    if word is None:
        raise SourceError(f"{where}: {text!r} is no split: use train, val or test")
    return word
