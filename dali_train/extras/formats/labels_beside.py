"""Labels of images that all lie in one folder, from a table beside them.

Such are Tiny ImageNet's ``val/val_annotations.txt``, Kaggle's ``LOC_val_solution.csv`` for ImageNet and the
``metadata.csv`` (or .jsonl or .parquet) of the Hugging Face Hub's image folders.
"""

import logging
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, combinations, islice
from pathlib import Path, PurePosixPath

from dali_train.data.convert.archives import folders_in
from dali_train.data.convert.datasets import KAGGLES_IMAGENET, TABLE_ENDINGS
from dali_train.data.convert.sources import SourceError
from dali_train.data.dataset.image_file import IMAGE_SUFFIXES
from dali_train.data.dataset.manifest import SplitWord, split_of_folder, split_word
from dali_train.data.dataset.passed_over import is_hidden
from dali_train.extras.formats.image_finder import ImageFinder
from dali_train.extras.formats.table_reader import (
    Columns,
    Table,
    classes_in,
    find_columns,
    label_in,
    split_in,
    tables_in,
)
from dali_train.text import plural

_log = logging.getLogger(__name__)
IMAGE_FOLDERS = {"images", "image", "imgs", "img", "data"}
"""Folders between that of a dataset or a split and its class folders, in any case."""
LIST_OF_SPLITS = re.compile("partition|split|folds?(?![a-z])", re.IGNORECASE)
"""In the name of a list that says which split each image is of."""

_MAX_TABLE_BYTES = 1 << 28
_MOST_TABLES = 50  # that are tried in a directory
_FEW_LISTS = 4  # that are named
_MOST_LEVELS = 4  # of folders that hold a single one
_MOST_ROWS, _MOST_MISSES = 1000, 20  # that are compared with class folders
_MOST_JSON_BYTES = 1 << 24  # of what is read whole, for a warning alone


@dataclass(frozen=True)
class LabelsBeside:
    table: Path
    by_name: Mapping[str, str]  # class of each file of the folder
    bare: Collection[str]  # the files that the table names without a folder
    described: str  # the columns

    def __getitem__(self, path: PurePosixPath) -> str:
        """Return the class of an image. Raises SourceError: the table has no row for it."""
        try:
            return self.by_name[path.name]
        except KeyError:
            raise SourceError(
                f"{path}: has no row in {self.table}, which has the labels of the images beside it: add one, move the "
                "image away, or name the table instead of the directory"
            ) from None


def labels_beside(directory: Path, word: SplitWord | None, classes: Collection[str] | None) -> LabelsBeside | None:
    """Return the labels of the images in the directory of a split; None if they lie in class folders, or no table in
    the directory or in the two above it has their labels.

    Args:
        word: of the split, None for a directory without splits.
        classes: those that labels may be, of the training split; None: any.

    Raises:
        SourceError: tables side by side have different labels, or one has labels that are no `classes`.
    """
    folder, names = _images_in_one_folder(directory)
    if not names:
        return None
    above = directory.absolute().parents
    between = [parent for parent in (folder, *folder.parents) if parent.is_relative_to(directory)]
    places = [*between, *above[:2], *(parent for parent in above[:6] if (parent / KAGGLES_IMAGENET).is_dir())]
    unfit: list[LabelsBeside] = []
    for place in places:
        found = [read for table in _tables_in(place, word) if (read := _read(table, folder, names, word)) is not None]
        fitting = [read for read in found if classes is None or {*read.by_name.values()} <= {*classes}]
        if not fitting:
            unfit += found
            continue
        first = fitting[0]
        for other in fitting[1:]:
            if other.by_name != first.by_name:
                raise SourceError(
                    f"{first.table} and {other.table} have different labels for the images in {directory}: move the "
                    "wrong one away, or name the right one, a table, instead of the directory"
                )
        images = plural(len(first.by_name), "image")
        _log.warning("%s: labels of %s from %s (%s)", directory, images, first.table, first.described)
        return first
    if unfit and classes is not None and folder.name not in classes:
        label = next(label for label in unfit[0].by_name.values() if label not in classes)
        raise SourceError(
            f"{unfit[0].table}: has the label {label!r} for an image in {folder}, which is no class folder of the "
            "training split: write the names of these folders there, or name a table of all images instead of the "
            "directory"
        )
    return None


def refuse_shared(used: Sequence[LabelsBeside]) -> None:
    """Raises SourceError: a table has the labels of two splits, and names files that both have."""
    for one, other in combinations(used, 2):
        if one.table == other.table and (shared := sorted({*one.bare} & {*other.bare})):
            raise SourceError(
                f"{one.table}: {shared[0]} may be an image of either split ({len(shared):,} such names): put a table "
                "beside the images of each"
            )


def warn_of_other_labels(root: Path, split: str) -> None:
    """Warn if a table in a directory of class folders has labels that these do not tell apart: they may be no classes,
    but the parts of a download, as ``images_001``.

    Args:
        split: the folder of the split whose images are looked at; empty if there are no splits.
    """
    finder = ImageFinder(root)
    for path in _tables_in(root, split_word(split)):
        if path.suffix.lower() == ".json" and path.stat().st_size > _MOST_JSON_BYTES:
            continue
        labels: dict[str, set[str]] = {}
        num_labels = num_misses = 0
        with suppress(SourceError):  # it is no table of images
            table = Table.open(path)
            columns = _columns(table, finder.has)
            if columns.label is None:
                continue
            for row in islice(table.rows(columns), _MOST_ROWS):
                inside = [found.removeprefix(f"{split}/") for found in finder.look(row.cells[columns.image].strip())]
                num_misses += len(inside) != 1 or "/" not in inside[0]
                if num_misses > _MOST_MISSES:
                    break
                if len(inside) == 1:
                    num_labels += 1
                    labels.setdefault(inside[0].partition("/")[0], set()).add(label_in(row, columns))
        are_ids = num_labels > 1 and len({*chain.from_iterable(labels.values())}) == num_labels
        folder = next((folder for folder, its_labels in labels.items() if len(its_labels) > 1), None)
        if folder is not None and not are_ids:
            _log.warning(
                "%s: has other labels than the class folders, such as %s in %s: if they are the right ones, name the "
                "table instead of the directory",
                path,
                " and ".join(sorted(labels[folder])[:2]),
                folder,
            )


def warn_of_lists(root: Path, classes: Collection[str]) -> None:
    """Warn of files in and around a directory of class folders whose names say that they divide the images into splits,
    as ``meta/train.txt``.

    Args:
        classes: the folders that are not looked into.
    """
    places = [root]
    with suppress(OSError):  # somebody else's directory
        places += [root / name for name in folders_in(root) if name not in classes]
        if root.name.casefold() in IMAGE_FOLDERS:
            places += [root.parent, *(root.parent / name for name in folders_in(root.parent) if name != root.name)]
    lists = [path for place in places[:_MOST_TABLES] for path in tables_in(place, (*TABLE_ENDINGS, ".mat"))]
    words = {path: split_word(path.stem) for path in lists}
    has_several = len({*words.values()} - {None}) > 1
    lists = [path for path in lists if LIST_OF_SPLITS.search(path.stem) or (has_several and words[path])]
    if lists:
        shown = ", ".join(str(path.relative_to(root.parent)) for path in lists[:_FEW_LISTS])
        _log.warning(
            "%s: not read, though the images may be divided by %s%s: docs/your-dataset.md says how lists of splits are "
            "read",
            root,
            shown,
            ", ..." if len(lists) > _FEW_LISTS else "",
        )


def _images_in_one_folder(directory: Path) -> tuple[Path, set[str]]:
    """Return the folder that all images of a directory lie in, itself or the only one in it and so on, and their names;
    no names if there is none."""
    folder = directory
    for _ in range(_MOST_LEVELS):
        folders, names = folders_and_images(folder)
        if names or len(folders) != 1:
            break
        folder /= folders[0]
    return folder, names


def folders_and_images(directory: Path) -> tuple[list[str], set[str]]:
    """Return the names of the folders and of the images in a directory, those that are not hidden."""
    folders, names = list[str](), set[str]()
    with suppress(OSError), os.scandir(directory) as entries:  # the listing says what is wrong with it
        for entry in entries:  # of which there may be a million: a Path, or a look at each, takes far longer
            if entry.is_dir() and not is_hidden(entry.name):
                folders.append(entry.name)
            elif entry.name[entry.name.rfind(".") :].lower() in IMAGE_SUFFIXES and not is_hidden(entry.name):
                names.add(entry.name)
    return folders, names


def _tables_in(place: Path, word: SplitWord | None) -> list[Path]:
    """Return the files in a directory that may have the labels of a split, or of images that are not divided: not those
    of another split, and not Kaggle's sample of a submission, whose labels are made up."""
    tables = [
        path
        for path in tables_in(place)
        if not is_hidden(path.name)
        and split_word(path.stem) in (None, word or "train")
        and "submission" not in path.name.lower()
        and path.is_file()
        and path.stat().st_size <= _MAX_TABLE_BYTES
    ]
    return tables[:_MOST_TABLES]


def _columns(table: Table, is_file: Callable[[str], bool]) -> Columns:
    """Return the columns; without one of labels, each class is one, as Roboflow's ``_classes.csv`` has them. Raises
    SourceError: there are no such columns."""
    try:
        columns = find_columns(table, is_file=is_file)
    except SourceError:
        columns = find_columns(table, is_file=is_file, multi_hot=True)
    has_splits = not columns.has_heading and LIST_OF_SPLITS.search(table.path.stem)  # CelebA's list_eval_partition.txt
    if has_splits or (columns.label is None and len(columns.classes) < 2):
        raise SourceError(f"{table.path}: has neither a column of labels nor one for each class")
    return columns


def _read(path: Path, folder: Path, names: Collection[str], word: SplitWord | None) -> LabelsBeside | None:
    """Return the labels that a table has of images by these names in a folder; None if it has none of them."""
    stems = {PurePosixPath(name).stem: name for name in names}
    place = folder.absolute().parts

    def parts_of(cell: str) -> tuple[str, ...]:
        return PurePosixPath(cell.strip().replace("\\", "/").strip("/")).parts or ("",)

    def named(cell: str) -> str | None:
        *above, name = parts_of(cell)
        if above and place[-len(above) :] != (*above,):
            return None  # in another folder
        return name if name in names else stems.get(name)

    by_name: dict[str, str] = {}
    bare: set[str] = set()
    try:
        table = Table.open(path)
        columns = _columns(table, lambda cell: named(cell) is not None)
        for row in table.rows(columns):
            name = named(row.cells[columns.image])
            labels = [label_in(row, columns)] if columns.label is not None else classes_in(row, columns)
            if name is None or not any(labels) or split_in(row, columns) not in (None, word):
                continue
            if len(labels) > 1 or by_name.setdefault(name, labels[0]) != labels[0]:
                _log.warning(
                    "%s: not used, since it has several labels for %s: for several labels an image name one table of "
                    "all images, with a column split, and --multi-hot or --label-separator%s",
                    path,
                    name,
                    _joined(path) if columns.classes else "",
                )
                return None
            if len(parts_of(row.cells[columns.image])) == 1:
                bare.add(name)
    except SourceError:  # a readme, a list of classes, ...
        return None
    return LabelsBeside(path, by_name, bare, columns.described()) if by_name else None


def _joined(path: Path) -> str:
    """Return the commands that make one table of those that the folders of splits have each, as Roboflow writes them,
    and read it; nothing if there are none."""
    root = path.parent.parent
    splits = [name for name in folders_in(root) if split_of_folder(name) and (root / name / path.name).is_file()]
    if path.parent.name not in splits:
        return ""
    file = f"{f'{root}/'!r} + split + {f'/{path.name}'!r}"
    tables = f"[pandas.read_csv({file}).assign(split=split) for split in {splits}]"
    joined = root / path.name
    code = f"import pandas; pandas.concat({tables}).fillna(0).to_csv({str(joined)!r}, index=False)"
    read = f"dali-train data index {shlex.quote(str(joined))} --multi-hot --out INDEX"
    return f": `python3 -c {shlex.quote(code)}`, then `{read}`"
