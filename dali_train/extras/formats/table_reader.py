"""One reader for tables of image files and labels, however they are written.

Text with a cell for each column, separated by commas, semicolons, tabs or bars, with or without a heading; lists of
``FILE LABEL`` with a space between, or of files in class folders; JSON lines; JSON with a list of objects, or with
``images``, ``annotations`` and ``categories`` as COCO and iNaturalist have them; Parquet without images.

Python's csv reads the cells. pandas, polars and pyarrow.csv want to be told the separator and whether there is a
heading, and csv.Sniffer takes any letter that is frequent for a separator: so both are decided here, by the first line.
"""

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dali_train.data.convert.datasets import SPREADSHEETS, TABLE_ENDINGS
from dali_train.data.convert.sources import SourceError
from dali_train.data.dataset.image_file import IMAGE_SUFFIXES
from dali_train.data.dataset.manifest import SplitWord, split_of_folder, split_word
from dali_train.data.dataset.packed_files import how_packed
from dali_train.data.progress import SHORT_S, Progress
from dali_train.extras.formats.listing import import_pyarrow
from dali_train.files import read_limited

_SEPARATORS = (",", ";", "\t", "|")
_BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_MAX_JSON_BYTES = 1 << 30

_FILE = rf"[/\\]|(?:{'|'.join(map(re.escape, sorted(IMAGE_SUFFIXES)))})$"  # a cell, and no heading
# As names are compared, see `plain_name`: what says more comes first.
FILE_COLUMNS = (
    *("file", "filename", "filepath", "path", "imagepath", "imgpath", "imagefile", "image", "img"),
    *("imagename", "imgname", "imageid", "imgid", "name", "fname", "fn", "id"),
)
LABEL_COLUMNS = (
    *("label", "labels", "class", "classname", "category", "target", "breed", "species", "labelname"),
    *("wnid", "synset", "predictionstring", "categoryid", "classid", "labelid", "y"),
)
SPLIT_COLUMNS = ("split", "set", "subset", "partition")
YES_OR_NO_COLUMNS: dict[str, tuple[SplitWord, SplitWord]] = {
    **dict.fromkeys(("isvalid", "isvalidation", "isval"), ("val", "train")),
    **dict.fromkeys(("istrain", "istraining", "istrainingimage"), ("train", "test")),
    "istest": ("test", "train"),
}
"""Columns that divide images by True and False, or 1 and 0 -> the splits of these: fastai's, CUB-200's."""
_NO_CLASSES = ("", "id", "index", "fold", "kfold")
"""Columns that are no classes, if every other column is one."""


def tables_in(directory: Path, endings: tuple[str, ...] = TABLE_ENDINGS) -> list[Path]:
    """Return the files in a directory that are called as tables, sorted; none if it cannot be read."""
    names: list[str] = []
    with suppress(OSError), os.scandir(directory) as entries:  # of a million images: a Path for each takes far longer
        names = sorted(entry.name for entry in entries if entry.name.lower().endswith(endings))
    return [directory / name for name in names]


class Row(NamedTuple):
    where: str  # for messages
    cells: Sequence[str]  # one for each column


@dataclass(frozen=True)
class Table:
    """A table that can be read any number of times."""

    path: Path
    columns: tuple[str, ...]  # its first row, a heading or not
    _rows: Callable[[], Iterator[Row]]

    @classmethod
    def open(cls, path: Path) -> "Table":
        """Raises SourceError: it is none, or cannot be read."""
        with _reading(path):
            return _opened(path)

    def rows(self, columns: "Columns") -> Iterator[Row]:
        """Yield the rows below the heading. Raises SourceError: one with more or fewer cells, or text that is none."""
        title = f"reading {self.path.name}"
        with _reading(self.path), Progress(title, total=None, unit="rows", delay_s=SHORT_S) as progress:
            for row in islice(self._rows(), int(columns.has_heading), None):
                yield row
                progress.update(1)


@dataclass(frozen=True)
class Columns:
    """What the columns of a table are, by their numbers."""

    names: tuple[str, ...]  # "1", "2", ... without a heading
    has_heading: bool
    image: int
    label: int | None  # None: `classes` say it, or the files' folders
    split: int | None
    classes: tuple[int, ...] = ()  # those of which each is a class

    @property
    def are_of_files_alone(self) -> bool:
        """Whether nothing in the table but the files' folders can be their labels."""
        return self.label is None and not self.classes

    def described(self) -> str:
        """Return which column is used for what, and which is not used."""
        used = {"files": self.image, "labels": self.label, "splits": self.split}
        texts = [f"{what} from {self.names[number]}" for what, number in used.items() if number is not None]
        if self.are_of_files_alone:
            texts.append("labels from their folders")
        if self.classes:
            texts.append(f"{len(self.classes)} classes from {', '.join(self.names[number] for number in self.classes)}")
        unused = {*range(len(self.names))} - {*used.values(), *self.classes}
        if unused:
            texts.append(f"not used: {', '.join(self.names[number] or 'a column without a name' for number in unused)}")
        return ", ".join(texts)


def find_columns(
    table: Table,
    *,
    image_key: str | None = None,
    label_key: str | None = None,
    multi_hot: bool = False,
    is_file: Callable[[str], bool] = lambda cell: False,
) -> Columns:
    """Return what the columns are: those of these names, else by the usual ones; without a heading, the first one of
    which a cell names a file, and the one after it. Where none has the labels, and of the others exactly one is 1 in
    each row, these are the classes; where there are no others, the files' folders are.

    Args:
        multi_hot: every column of no other use is a class.
        is_file: whether a cell names an image.

    Raises:
        SourceError: there are no such columns, or two of one name.
    """
    plain = [plain_name(name) for name in table.columns]
    image = _find(table.columns, image_key, FILE_COLUMNS)
    if image is None and len(table.columns) == 1 and re.search(_FILE, table.columns[0], re.IGNORECASE):
        return _without_heading(table, 0, image_key, label_key)
    if image is None and len(table.columns) > 1:
        files = [number for number, cell in enumerate(table.columns) if is_file(cell)]
        if files:  # a number may be called as an image, but for its suffix
            has_suffix = [PurePosixPath(table.columns[number]).suffix.lower() in IMAGE_SUFFIXES for number in files]
            first = files[has_suffix.index(True)] if any(has_suffix) else files[0]
            return _without_heading(table, first, image_key, label_key)
    if image is None:
        raise _no_column(table, "--image-key", image_key, FILE_COLUMNS)
    named = [name for name in table.columns if name]
    if len({*named}) < len(named):
        raise SourceError(f"{table.path}: two of its columns have one name: rename one of them")
    split = _find(table.columns, None, (*SPLIT_COLUMNS, *YES_OR_NO_COLUMNS), without=(image,))
    classes = tuple(number for number in range(len(plain)) if number not in (image, split))
    wrong = [table.columns[number] or "without a name" for number in classes if plain[number] in _NO_CLASSES]
    if not multi_hot:
        label = _find(table.columns, label_key, LABEL_COLUMNS, without=(image,))
        one_hot = Columns(table.columns, has_heading=True, image=image, label=None, split=split, classes=classes)
        if label is None and label_key is None and not wrong and (not classes or _is_one_hot(table, one_hot)):
            return one_hot
        if label is None:
            raise _no_column(table, "--label-key", label_key, LABEL_COLUMNS)
        split = None if split == label else split
        return Columns(table.columns, has_heading=True, image=image, label=label, split=split)
    if not classes:
        raise SourceError(f"{table.path}: has only files, and --multi-hot takes a column for each class: add these")
    if wrong:
        raise SourceError(
            f"{table.path}: the column {wrong[0]} is no class, and --multi-hot takes every column for one but that of "
            "the files and that of the splits: leave it out of the table"
        )
    return Columns(table.columns, has_heading=True, image=image, label=None, split=split, classes=classes)


def _is_one_hot(table: Table, columns: Columns) -> bool:
    """Return whether each row has one of several classes."""
    if len(columns.classes) < 2:
        return False
    with suppress(SourceError):  # a cell is neither 0 nor 1
        return all(len(classes_in(row, columns)) == 1 for row in table.rows(columns))
    return False


def _without_heading(table: Table, first: int, image_key: str | None, label_key: str | None) -> Columns:
    """Return the columns, which have numbers from 1 for names: those of the keys, else the `first` one that names a
    file, and the one after it. Raises SourceError: a key is no such number, or there is none after it, but several."""
    names = tuple(map(str, range(1, 1 + len(table.columns))))
    for option, key in (("--image-key", image_key), ("--label-key", label_key)):
        if key is not None and key not in names:
            raise SourceError(
                f"{table.path}: {option} is {key}, and the table has no heading: use the number of a column, 1 to "
                f"{len(names)}"
            )
    image = names.index(image_key) if image_key is not None else first
    label: int | None = None
    if label_key is not None:
        label = names.index(label_key)
    elif image + 2 < len(names) and table.columns[image + 1].isdecimal():
        raise SourceError(
            f"{table.path}: has no heading, and several columns behind that of the files, the first with numbers: name "
            f"that of the labels with --label-key, such as {image + 2}"
        )
    elif image + 1 < len(names):
        label = image + 1
    elif len(names) == 2:
        label = 0
    elif len(names) > 1:
        raise SourceError(
            f"{table.path}: has no heading, and {len(names) - 1} columns before that of the files: name that of the "
            f"labels with --label-key, 1 to {len(names) - 1}"
        )
    others = [number for number in range(len(names)) if number not in (image, label)]
    split = next((number for number in others if split_of_folder(table.columns[number])), None)
    return Columns(names, has_heading=False, image=image, label=label, split=split)


def label_in(row: Row, columns: Columns) -> str:
    """Return what stands in the column of the labels."""
    assert columns.label is not None
    text = row.cells[columns.label].strip()
    # Kaggle's ImageNet has the class there, and then its boxes.
    return text.partition(" ")[0] if columns.names[columns.label] == "PredictionString" else text


def classes_in(row: Row, columns: Columns) -> list[str]:
    """Return the classes of which each has a column. Raises SourceError: one of their cells does not say whether."""
    classes = []
    for number in columns.classes:
        text = row.cells[number].strip().casefold()
        if text not in _HAS_CLASS | _HAS_NOT:
            raise SourceError(
                f"{row.where}: {text!r} under {columns.names[number]}, which is a class: use 1 for the images that "
                "have it, else 0 or -1, or leave the column out of the table"
            )
        if text in _HAS_CLASS:
            classes.append(columns.names[number])
    return classes


_HAS_CLASS, _HAS_NOT = {"1", "1.0", "true"}, {"0", "0.0", "-1", "-1.0", "false"}  # True: of pandas.get_dummies


def split_in(row: Row, columns: Columns) -> SplitWord | None:
    """Return the split that a row names; None: the table has no such column. Raises SourceError: it names none."""
    if columns.split is None:
        return None
    text = row.cells[columns.split].strip()
    name = columns.names[columns.split]
    if (words := YES_OR_NO_COLUMNS.get(plain_name(name))) and text.casefold() in _TRUE | _FALSE:
        return words[text.casefold() in _FALSE]
    word = split_word(text)
    if word is None:
        allowed = "True or False" if words else "train, val or test"
        raise SourceError(f"{row.where}: {text!r} under {name} is no split: use {allowed}")
    return word


_TRUE, _FALSE = {"true", "1", "1.0", "yes"}, {"false", "0", "0.0", "no", ""}


def plain_name(name: str) -> str:
    """Return a column's name as it is compared: in small letters, without what joins words."""
    return name.casefold().translate({ord(letter): None for letter in "_- ."})


def _find(names: Sequence[str], key: str | None, usual: Sequence[str], without: Sequence[int] = ()) -> int | None:
    if key is not None:
        return next((number for number, name in enumerate(names) if name == key), None)
    plain = [plain_name(name) for name in names]
    return next((plain.index(name) for name in usual if name in plain and plain.index(name) not in without), None)


def _no_column(table: Table, option: str, key: str | None, usual: Sequence[str]) -> SourceError:
    wanted = key or f"{', '.join(usual[:5])} or the like"
    without = "write one such as file,label above"
    if option == "--image-key":
        without = "put the table into the directory that holds the images, where its first line names one"
    there = ", ".join(name[:40] or "one without a name" for name in table.columns[:20])
    return SourceError(
        f"{table.path}: has no column {wanted}, but {there}: name one with {option}"
        + ("" if key else f"; if these are no headings, {without}")
        + ("; --multi-hot if each class has a column" if option == "--label-key" else "")
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises SourceError: for what reading a file as text or JSON raises."""
    try:
        yield
    except SourceError:
        raise
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as error:  # JSON may have anything anywhere
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, KeyError):
            reason = f"an entry has no {error}"
        raise SourceError(
            f"{path}: cannot be read as a table ({reason}): use CSV in UTF-8 with a heading, such as file,label"
        ) from error


def _opened(path: Path) -> Table:
    with path.open("rb") as file:
        begin = file.read(4)
    if path.suffix.lower() in SPREADSHEETS:
        raise SourceError(f"{path}: is a spreadsheet: save its table as CSV in UTF-8")
    if packed := how_packed(path):
        raise SourceError(f"{path}: {packed}")
    if begin == b"PAR1":
        rows = import_pyarrow().parquet.read_table(path).to_pylist()
        return _of_objects(path, lambda: ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1)))
    encoding = _BYTE_ORDER_MARKS.get(begin[:2], "utf-8-sig")
    with path.open(encoding=encoding, newline="") as lines:
        first = next((line for line in lines if line.strip()), "")
        second = next(lines, "")
    if first.lstrip().startswith(("{", "[")) and path.suffix.lower() not in (".csv", ".tsv"):
        is_lines = _is_row(first, is_followed=second.lstrip().startswith("{"))
        objects = _json_lines(path, encoding) if is_lines else _json_objects(path)
        return _of_objects(path, objects)
    named = re.fullmatch(r"sep=(.)\s*", first)  # Excel's first line
    first = second if named else first
    if not first.strip():
        raise SourceError(f"{path}: has no rows: use a heading, such as file,label, and a row per image")
    separator = named[1] if named else _separator(first)
    columns = tuple(cell.strip() for cell in next(_cells([first], separator, path)).cells)
    return Table(path, columns, lambda: _text_rows(path, encoding, separator, len(columns), skipped=bool(named)))


def _separator(line: str) -> str:
    """Return what stands between the cells of a table's first line: what makes most of them; a space if none does."""
    counts = {separator: len(next(csv.reader([line], delimiter=separator))) for separator in _SEPARATORS}
    best = max(_SEPARATORS, key=lambda separator: counts[separator])
    return best if counts[best] > 1 else " "


def _cells(lines: Iterable[str], separator: str, path: Path) -> Iterator[Row]:
    if separator == " ":
        for number, line in enumerate(lines, 1):
            yield Row(f"{path}, line {number}", _words(line))
        return
    reader = csv.reader(lines, delimiter=separator, strict=True)
    try:
        for cells in reader:
            yield Row(f"{path}, line {reader.line_num}", cells)
    except csv.Error as error:
        raise SourceError(f"{path}, line {reader.line_num}: cannot be read ({error}): correct its quotes") from error


_FILE_NAME = re.compile(rf"(.+?(?:{'|'.join(map(re.escape, IMAGE_SUFFIXES))}))(?:\s+(\S.*))?", re.IGNORECASE)


def _words(line: str) -> list[str]:
    """Return the cells of a line without a separator: a file, whose name may have spaces if it has a suffix, and a
    label, which may have them too, or several numbers; or cells in quotes, as R writes them."""
    if line.lstrip().startswith('"'):
        return next(csv.reader([line.strip()], delimiter=" ", skipinitialspace=True, strict=True))
    match = _FILE_NAME.fullmatch(line.strip())
    name, _, rest = (match[1], "", match[2] or "") if match else line.strip().partition(" ")
    numbers = rest.split()
    return [name, *(numbers if all(map(str.isdecimal, numbers)) else [rest.strip()])]


def _text_rows(path: Path, encoding: str, separator: str, num_columns: int, *, skipped: bool) -> Iterator[Row]:
    """Args: skipped: whether the first line is none of the table's."""
    with path.open(encoding=encoding, newline="") as lines:
        for where, cells in islice(_cells(lines, separator, path), int(skipped), None):
            if not any(cells):
                continue
            if len(cells) != num_columns:
                raise SourceError(f"{where}: has not one cell under each of the {num_columns} headings: correct it")
            yield Row(where, cells)


def _is_row(line: str, *, is_followed: bool) -> bool:
    """Return whether a line is a whole object of JSON that names a file, or that another one follows."""
    try:
        values = json.loads(line)
    except ValueError:
        return False
    return isinstance(values, dict) and (is_followed or any(plain_name(name) in FILE_COLUMNS for name in values))


Objects = Callable[[], Iterator[tuple[str, Any]]]
"""Yields where an object stands, for messages, and the object."""


def _json_lines(path: Path, encoding: str) -> Objects:
    def objects() -> Iterator[tuple[str, Any]]:
        with path.open(encoding=encoding) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}, line {number}", json.loads(line)

    return objects


def _json_objects(path: Path) -> Objects:
    content = json.loads(read_limited(path, _MAX_JSON_BYTES))
    if isinstance(content, dict) and "images" in content:
        content = _of_coco(content) if "annotations" in content else content["images"]
    elif isinstance(content, dict):
        content = content.get("labels", content)  # of StyleGAN's dataset.json
        pairs = content.items() if isinstance(content, dict) else content
        if any(isinstance(label, dict | list) for _, label in pairs):
            raise SourceError(f"{path}: has no objects with a file and a label: use objects such as {_EXAMPLE}, or CSV")
        content = [{"file": name, "label": label} for name, label in pairs]
    return lambda: ((f"{path}, entry {number}", entry) for number, entry in enumerate(content, 1))


def _of_coco(content: dict[str, Any]) -> list[object]:
    """Return an object for each annotation."""
    names = {one["id"]: one.get("name", one["id"]) for one in content.get("categories", ())}
    files = {one["id"]: one["file_name"] for one in content["images"]}
    return [
        {"file_name": files[one["image_id"]], "category": names.get(one["category_id"], one["category_id"])}
        for one in content["annotations"]
    ]


_EXAMPLE = '{"file": "images/1.jpg", "label": "cat"}'


def _of_objects(path: Path, objects: Objects) -> Table:
    """Return the table whose columns are the keys of the first object."""
    _, first = next(objects(), ("", None))
    if not isinstance(first, dict) or not first:
        raise SourceError(f"{path}: has no objects with a file and a label: use objects such as {_EXAMPLE}, or CSV")
    columns = tuple(first)
    if not any(isinstance(value, str) for value in first.values()):
        raise SourceError(f"{path}: its first object names no file: use objects such as {_EXAMPLE}, or CSV")

    def rows() -> Iterator[Row]:
        yield Row(str(path), columns)
        for where, values in objects():
            if not isinstance(values, dict) or not {*columns} <= {*values}:
                raise SourceError(f"{where}: has not all of {', '.join(columns)}: correct it")
            yield Row(where, [_as_text(values[name]) for name in columns])

    return Table(path, columns, rows)


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=date.isoformat)
