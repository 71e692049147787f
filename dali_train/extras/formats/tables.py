"""Tables of image files and labels, as Kaggle, labelling tools and the Hugging Face Hub write them.

::

    file,label,split
    images/0001.jpg,cat,train
    images/0002.jpg,dog,val

Instead of a column of labels there may be one for each class, with one 1 in each row; or the files' folders are the
labels, as in Food-101's lists.

With ``--label-separator ";"`` a cell may have several labels, ``cat;dog``, or none, and an image several rows. With
``--multi-hot`` every other column is a class::

    file,cat,dog
    images/0001.jpg,1,0

A table ``train.csv`` has the validation images in ``val.csv``, if that lies beside it; a list of files alone, which has
no made-up labels, also in ``test.txt``.
"""

import ast
import logging
import re
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from dali_train.data.convert.archives import Directory
from dali_train.data.convert.sources import Image, ImageFiles, Images, SourceError, Sources, hold_out
from dali_train.data.dataset.manifest import (
    SplitName,
    SplitWord,
    check_spellings,
    number_classes,
    read_class_names,
    split_folders_among,
    split_word,
    splits_of_words,
    without_split_words,
)
from dali_train.data.dataset.passed_over import TEST_SPLIT, PassedOver
from dali_train.extras.formats.image_finder import FoldersOfTable, ImageFinder
from dali_train.extras.formats.label_sets import FEW, LabelSets, order_names
from dali_train.extras.formats.labels_beside import LIST_OF_SPLITS
from dali_train.extras.formats.listing import Within, where_it_lies
from dali_train.extras.formats.table_reader import (
    Columns,
    Row,
    Table,
    classes_in,
    find_columns,
    label_in,
    plain_name,
    split_in,
    tables_in,
)
from dali_train.files import sha256

_log = logging.getLogger(__name__)
_ABSENT = "labels that the table says to be absent"


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
    if options.label_separator == "":
        raise SourceError("--label-separator is empty: name what stands between two labels, such as ';'")
    if options.label_separator is not None and options.multi_hot:
        raise SourceError("--label-separator with --multi-hot, whose columns are the classes: use one of them")
    reader = _Reader(options)
    of_files_alone = reader.read(path).are_of_files_alone
    beside = _other_tables(path)
    validation = _of_validation(path, beside, of_files_alone)
    if validation and options.validation_fraction is None and all(row.split is None for row in reader.rows):
        if len(validation) > 1:
            both = " and ".join(other.name for other in validation)
            raise SourceError(f"{path}: {both} beside it may both have the validation images: move one of them away")
        reader.read(validation[0], "val")
    lists = [other for other in tables_in(path.parent) if other != path and LIST_OF_SPLITS.search(other.stem)]
    if unread := [other.name for other in sorted({*beside, *lists}) if other not in reader.tables]:
        _log.warning("%s: beside it, and not read: %s", path.name, ", ".join(unread))
    rows = _with_folders_as_labels(path, reader.rows) if of_files_alone else _without_decimals(reader.rows)
    if all(row.split is None for row in rows) and (words := _split_folders(row.file for row in rows)):
        _log.warning("%s: splits from the folders %s", path.name, ", ".join(sorted(words)))
        rows = [replace(row, split=words[_top_folder(row.file)]) for row in rows]
    names, numbers = _number_labels(rows, reader.classes, options.class_names)
    if not reader.has_several and len(rows) >= FEW and len(names) == len(rows):
        raise SourceError(f"{path}: each of its {len(rows):,} images has a label of its own: name another --label-key")
    splits = splits_of_words({row.split for row in rows if row.split is not None})
    parts: dict[SplitName, list[Image | PassedOver]] = {}
    sets = LabelSets()
    for row in rows:
        classes = [numbers[label] for label in row.labels]
        value = classes if reader.has_several else classes[0]
        image = Image(f"{path.parent}/", row.file, 0, row.size, sets.label(value, row.file))
        if row.split is None or row.split in splits:
            split: SplitName = "train" if row.split is None else splits[row.split]
            parts.setdefault(split, []).append(image)
        else:
            parts.setdefault("train", []).append(PassedOver("", TEST_SPLIT))
    parts["train" if "train" in parts else next(iter(parts))] += [PassedOver("", _ABSENT)] * reader.num_absent
    read = Directory(path.parent).read
    images = {
        split: Images(ImageFiles(part.copy, read), path.parent, labels_from=reader.tables)
        for split, part in parts.items()
    }
    sets.resolve(images)
    return hold_out(images, options.validation_fraction, seed=options.seed, group_by=options.group_by), names


def has_validation(path: Path, *, multi_hot: bool = False) -> bool:
    """Return whether a table names images for validation; False also for a file that is none."""
    with suppress(SourceError):
        read = Table.open(path)
        columns = find_columns(read, multi_hot=multi_hot, is_file=ImageFinder(path.parent).has)
        if columns.split is None:
            if _of_validation(path, _other_tables(path), columns.are_of_files_alone):
                return True
            finder, word = ImageFinder(path.parent), split_word(path.stem)
            found = (finder.find(row.cells[columns.image].strip(), row.where, word) for row in read.rows(columns))
            return "validation" in splits_of_words({*_split_folders(one.file for one in found).values()}).values()
        words = {split_in(row, columns) for row in read.rows(columns)}
        return "validation" in splits_of_words({word for word in words if word is not None}).values()
    return False


def _top_folder(file: str) -> str:
    return file.partition("/")[0] if "/" in file else ""


def _split_folders(files: Iterable[str]) -> dict[str, SplitWord]:
    """Return the splits that the folders of all files stand for; none if one of these is no split's."""
    folders = {_top_folder(file) for file in files}
    words = split_folders_among(folders)
    return words if folders == {*words} else {}


def _of_validation(path: Path, others: Sequence[Path], of_files_alone: bool) -> list[Path]:
    """Return those of the other tables that are called as that of the training images, but for the word val; for the
    word test, if there are none and lists have nothing but files."""
    rest = path.suffix, without_split_words(path.stem)
    alike = [other for other in others if (other.suffix, without_split_words(other.stem)) == rest]
    words = {other: split_word(other.stem) for other in alike}
    split = "test" if of_files_alone and "val" not in words.values() else "val"
    return [other for other, word in words.items() if word == split]


def _other_tables(path: Path) -> list[Path]:
    """Return the tables beside that of the training images that are called as those of other splits."""
    if split_word(path.stem) != "train":
        return []
    return [other for other in tables_in(path.parent) if split_word(other.stem) in ("val", "test")]


def _number_labels(
    rows: Iterable["_Row"], classes: list[str], class_names: Path | None
) -> tuple[list[str], dict[str, int]]:
    """Return the names of the classes in their order, and the number of each label."""
    labels = classes or {label for row in rows for label in row.labels}
    if class_names is not None:
        names = read_class_names(class_names)
        return names, dict(number_classes(labels, names, class_names))
    check_spellings(labels)
    names = classes or order_names({*labels})
    return names, {name: number for number, name in enumerate(names)}


@dataclass(frozen=True)
class _Row:
    """An image of the table, checked."""

    file: str  # below the table's directory
    size: int  # in bytes
    labels: list[str]  # one, unless they are separated
    split: SplitWord | None  # None: the table has no such column


def _without_decimals(rows: list[_Row]) -> list[_Row]:
    """Return the rows with whole numbers for 1.0, 2.0, ...: pandas writes these where a column once lacked a value,
    which may be so in one of two tables."""
    if not all(re.fullmatch(r"\d+(\.0+)?", label) for row in rows for label in row.labels):
        return rows
    return [replace(row, labels=[label.partition(".")[0] for label in row.labels]) for row in rows]


def _with_folders_as_labels(path: Path, rows: list[_Row]) -> list[_Row]:
    """Return the rows labelled by their files' folders, below those that all have in common and those of splits. Raises
    SourceError: these are all the same."""
    folders = [PurePosixPath(row.file).parts[:-1] for row in rows]
    differ = (number for number, parts in enumerate(zip(*folders, strict=False)) if len({*parts}) > 1)
    num_common = next(differ, min(map(len, folders)))
    below = [folder[num_common:] for folder in folders]
    words = split_folders_among({folder[0] if folder else "" for folder in below})
    labels = ["/".join(folder[1:] if folder and folder[0] in words else folder) for folder in below]
    if not all(labels):
        raise SourceError(f"{path}: has no labels, and not all of its files lie in class folders: add a column label")
    return [replace(row, labels=[label]) for row, label in zip(rows, labels, strict=True)]


class _Reader:
    """Reads the images of one or two tables."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._separator: str | None = options.label_separator
        self._word = split_word(options.source.stem)  # decides where two folders have a file
        self._finder = ImageFinder(options.source.parent)
        self.has_several = self._separator is not None or options.multi_hot
        self.classes: list[str] = []  # with --multi-hot
        self.num_absent = 0  # rows of labels that an image does not have
        self.tables: dict[Path, str] = {}  # that were read -> SHA-256
        self._images: dict[str, _Row] = {}
        self._seen: dict[str, str] = {}  # file -> where

    @property
    def rows(self) -> list[_Row]:
        return [*self._images.values()]

    def read(self, path: Path, word: SplitWord | None = None) -> Columns:
        """Read a table, whose images are all of one split if `word` names it. Raises SourceError: see `table`."""
        options, read = self._options, Table.open(path)
        self.tables[path] = sha256(path)
        columns = find_columns(
            read,
            image_key=options.image_key,
            label_key=options.label_key,
            multi_hot=options.multi_hot,
            is_file=self._finder.has,
        )
        one_hot = ", one in each row: its label" if columns.classes and not self.has_several else ""
        _log.warning("%s: %s%s", path.name, columns.described(), one_hot)
        if self.has_several:
            self.classes = [*dict.fromkeys([*self.classes, *(columns.names[number] for number in columns.classes)])]
        absent = self._confidence(columns)
        num_before = len(self._images)
        folders = FoldersOfTable()
        for row in read.rows(columns):
            if absent is not None and row.cells[absent].strip() in ("0", "0.0"):
                self.num_absent += 1
            else:
                self._add(self._image(row, columns, word, folders), row.where)
        if len(self._images) == num_before:
            raise SourceError(f"{path}: has no rows: use a heading, such as file,label, and a row per image")
        folders.check(self._finder)
        return columns

    def _add(self, image: _Row, where: str) -> None:
        earlier = self._images.setdefault(image.file, image)
        path = where.rpartition(", ")[0]
        before = self._seen.setdefault(image.file, where).removeprefix(f"{path}, ")
        if earlier is image:
            return
        if earlier.split != image.split:
            raise SourceError(f"{where}: {image.file} is in another split in {before}: use one of them")
        if self._separator is None:
            raise SourceError(
                f"{where}: {image.file} is in {before} already: leave one out; where images have several labels, say "
                "what stands between those in one cell: --label-separator ';'"
            )
        earlier.labels.extend(image.labels)

    def _confidence(self, columns: Columns) -> int | None:
        """Return the column of OpenImages that is 0 for a label that somebody has looked for in vain."""
        plain = [plain_name(name) for name in columns.names]
        return plain.index("confidence") if self._separator is not None and "confidence" in plain else None

    def _image(self, row: Row, columns: Columns, word: SplitWord | None, folders: FoldersOfTable) -> _Row:
        word = word or split_in(row, columns)
        name = row.cells[columns.image].strip()
        found = self._finder.find(name, row.where, word or self._word)
        if columns.label is None:
            labels = classes_in(row, columns)
        else:
            labels = self._labels(label_in(row, columns), row, name)
        folders.add(found, row.where, labels, word or self._word)
        return _Row(found.file, found.size, [label for label in labels if label], word)

    def _labels(self, text: str, row: Row, name: str) -> list[str]:
        if text.startswith("[") and text.endswith("]"):  # JSON's list, or Python's as pandas writes it
            if self._separator is None:
                raise SourceError(f"{row.where}: {name} has a list of labels: say so by --label-separator ','")
            try:
                labels = [str(label) for label in ast.literal_eval(text)]
            except (ValueError, SyntaxError) as error:
                raise SourceError(f"{row.where}: {text[:60]} is no list of labels ({error}): correct it") from error
            if len(labels) > 2 and {*labels} <= {"0", "1"}:
                raise SourceError(
                    f"{row.where}: {text[:60]} looks like a vector with a number for each class: write the labels that "
                    "the image has"
                )
            return labels
        if self._separator is not None:
            return [part.strip() for part in text.split(self._separator)]
        if text in ("", "nan", "NaN"):  # as pandas writes what is missing
            raise SourceError(f"{row.where}: {name} has no label: give it one, or leave it out")
        if "\n" in text:
            raise SourceError(f"{row.where}: {name} has a label of several lines, {text[:60]!r}: correct the quotes")
        if text.startswith("{"):
            raise SourceError(f"{row.where}: {text[:60]} is an object, and no label: write its name in its place")
        return [text]
