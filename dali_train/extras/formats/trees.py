"""Image files in one folder per class, in a directory or a tar archive."""

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from dali_train.data.convert.archives import Container, Directory, folders_in, open_container
from dali_train.data.convert.datasets import images_root
from dali_train.data.convert.sources import Image, ImageFiles, Images, SourceError, Sources, hold_out, printable_name
from dali_train.data.dataset.image_file import IMAGE_SUFFIXES
from dali_train.data.dataset.manifest import (
    ClassOrder,
    SplitName,
    SplitWord,
    check_spellings,
    number_classes,
    order_classes,
    read_class_names,
    split_folders_among,
    split_of_folder,
    split_word,
    splits_of_words,
    without_split_words,
)
from dali_train.data.dataset.passed_over import EMPTY, TEST_SPLIT, PassedOver
from dali_train.extras.formats.label_sets import warn_of_spellings
from dali_train.extras.formats.labels_beside import (
    IMAGE_FOLDERS,
    LabelsBeside,
    folders_and_images,
    labels_beside,
    refuse_shared,
    warn_of_lists,
    warn_of_other_labels,
)
from dali_train.extras.formats.listing import seen
from dali_train.files import sha256
from dali_train.text import plural, shortened

_log = logging.getLogger(__name__)
_PART_OF_DOWNLOAD = re.compile(r"(.*(?:images?|imgs?|parts?|batch|chunk|archive|zip))[-_ .]?\d+", re.IGNORECASE)
_MOST_NAMED = 5  # classes in a message
_MOST_LETTERS = 100  # of a name in a message
_TABLE = (
    "if a table has their labels, put it beside them, with the heading file,label, or name it instead of the directory"
)
Parts = tuple[str, ...]


def folders(
    train: Path | None,
    validation: Path | None,
    *,
    validation_fraction: float | None,
    seed: int,
    class_order: ClassOrder = "name",
    class_names: Path | None = None,
    group_by: str | None = None,
) -> Sources:
    """Return the splits and the class names: the subfolders of `train` (or of `validation`, if it comes alone).

    A `train` that holds the folders of splits instead of classes gives these splits. With `validation_fraction`, that
    part of each class of `train` becomes the validation split, chosen by `seed`.

    Args:
        class_order: see `order_classes`.
        class_names: a file with the names in the order of the labels instead, see `number_classes`.
        group_by: see `hold_out`.

    Raises:
        SourceError: no class folders, or classes that lie a folder higher or deeper, a class that only `validation`
            has, or nothing that can be divided.
        DatasetError: `class_names` cannot be read, or does not fit.
    """
    train, validation = (path if path is None else images_root(path) for path in (train, validation))
    paths: dict[SplitName, Path | None] = {"train": train, "validation": validation}
    if train is None and validation is None:
        raise SourceError("nothing to convert: give --train DIR, --validation DIR, or both")
    for split, path in paths.items():
        if path is not None and not path.exists():
            raise SourceError(f"--{split} {path} does not exist: use a directory of class folders, or an archive")
    containers = {split: open_container(path) for split, path in paths.items() if path is not None}
    top_folders = {split: _top_folders(container) for split, container in containers.items()}
    words = {split: split_folders_among(names) for split, names in top_folders.items()}
    if train is not None and validation is None and words["train"]:
        listed = _list_splits(containers["train"], words["train"])
    else:
        for split, folders_of_splits in words.items():
            if folders_of_splits:
                raise SourceError(
                    f"--{split} {paths[split]}: holds {', '.join(sorted(folders_of_splits))}, which are splits and not "
                    f"classes: name it alone with --train, or name {paths[split]}/{min(folders_of_splits)} (of an "
                    "archive once it is unpacked)"
                )
        listed = {}
        for split, container in containers.items():
            if class_names is None:
                _refuse_lone_split(container, top_folders[split])
            listed[split] = _list_images(container, _SplitFiles(), listed.get("train"))
    if class_names is None:
        for listing in listed.values():
            _refuse_other_level(listing)
    sources, names = _with_common_labels(listed, class_order, class_names)
    return hold_out(sources, validation_fraction, seed=seed, group_by=group_by), names


def split_folders(path: Path) -> Sources:
    """As `folders`, for one tree with the class folders in ``train`` and in ``test``, ``val`` or ``validation``, which
    may lie deeper in it."""
    container = open_container(path)
    folders_there = {part for entry in container.list() for part in PurePosixPath(entry.name).parts[:-1]}
    words = {folder: word for folder in folders_there if (word := split_of_folder(folder)) is not None}
    listed = _list_splits(container, words, anywhere=True)
    if not any(listing.classes for listing in listed.values()):
        raise SourceError(f"{path}: expected image files in train/CLASS/ or test/CLASS/")
    return _with_common_labels(listed, "name", None)


def _top_folders(container: Container) -> set[str]:
    if isinstance(container, Directory):
        with suppress(OSError):  # the listing says what is wrong with it
            return {*folders_in(container.path)}
        return set()
    names = (entry.name for entry in container.walk(folders=True) if isinstance(entry, Image))
    return {name.partition("/")[0] for name in names if "/" in name}


@dataclass(frozen=True)
class _SplitFiles:
    """Which files of a container are those of a split.

    Args:
        words: the folders of splits; without any, all files are.
        split: the one that is meant.
        is_first: whether this is the first split that is listed, with which files of no split are shown.
        anywhere: the folders may lie deeper, as in cifar10/train/bird/0338.jpg.
        deeper: where those are whose class folders are a folder deeper, as in train/images/bird/0338.jpg.
    """

    words: Mapping[str, SplitWord] = field(default_factory=dict)
    split: SplitName = "train"
    is_first: bool = True
    anywhere: bool = False
    deeper: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The one that the split's class folders are in."""
        splits = splits_of_words({*self.words.values()})
        name = next((name for name, word in self.words.items() if splits.get(word) == self.split), "")
        return self.deeper.get(name, name)

    def below(self, parts: Parts) -> tuple[SplitName | None, int]:
        """Return the split that a file or a folder with these parts lies in, and how many parts lead there."""
        if not self.words:
            return self.split, 0
        splits = splits_of_words({*self.words.values()})
        for number, part in enumerate(parts if self.anywhere else parts[:1]):
            if part in self.words:
                return splits.get(self.words[part]), number + 1 + (part in self.deeper)
        return None, 0


def _list_splits(
    container: Container, words: Mapping[str, SplitWord], *, anywhere: bool = False
) -> dict[SplitName, "_Listing"]:
    """List each split that is used. Raises SourceError: as `_list_images`, or two folders are of one split."""
    if not anywhere:
        for word in words.values():
            same = [folder for folder, other in words.items() if other == word]
            if len(same) > 1:
                raise SourceError(
                    f"{container.path}: {' and '.join(sorted(same))} are one split: keep one of them, or put "
                    "the class folders of all into one"
                )
    deeper = {} if anywhere else _in_images(container, words)
    listed: dict[SplitName, _Listing] = {}
    for split in splits_of_words({*words.values()}).values():
        files = _SplitFiles(words, split, is_first=not listed, anywhere=anywhere, deeper=deeper)
        listed[split] = _list_images(container, files, listed.get("train"))
    return listed


def _in_images(container: Container, splits: Collection[str]) -> dict[str, str]:
    """Return the splits' folders that have nothing but a folder ``images``, or one of their own name as archives of
    Kaggle have, with the class folders -> this one, and say so."""
    deeper = {}
    is_archive = not isinstance(container, Directory)
    names = [entry.name for entry in container.walk(folders=True) if isinstance(entry, Image)] if is_archive else []
    for split in sorted(splits):
        folders_there, has_images = _contents(container, names, split)
        for folder in folders_there if len(folders_there) == 1 and not has_images else ():
            classes, has_images = _contents(container, names, f"{split}/{folder}")
            if (folder.casefold() in IMAGE_FOLDERS or folder == split) and classes and not has_images:
                deeper[split] = f"{split}/{folder}"
    if deeper:
        _log.warning("%s: the class folders are those in %s", container.path, ", ".join(deeper.values()))
    return deeper


def _contents(container: Container, names: Sequence[str], folder: str) -> tuple[set[str], bool]:
    """Return the folders in a folder of a container, and whether there are images.

    Args:
        names: of an archive's files and folders; not used of a directory.
    """
    if isinstance(container, Directory):
        folders, images = folders_and_images(container.path / folder)
        return {*folders}, bool(images)
    below = [name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/")]
    images_there = (name for name in below if "/" not in name and PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES)
    return {name.partition("/")[0] for name in below if "/" in name}, any(images_there)


@dataclass(frozen=True)
class _Listing:
    """The images of a split, and its class folders."""

    path: Path
    images: Images
    classes: list[str]  # that have images, as they appear: labels are places in this list
    empty: list[str]  # class folders without images
    deeper: set[Parts]  # the folders below class folders, if all images lie in such
    leaves: set[Parts]  # of a single class, all folders that have images
    beside: LabelsBeside | None  # has the labels; None: the class folders do


def _list_images(container: Container, files: _SplitFiles, train: _Listing | None) -> _Listing:
    """List the files in the class folders of a split, or those of which a table beside them has the labels.

    Args:
        train: the listing of the training split, whose classes the labels of a table must be; None for itself.

    Raises:
        SourceError: an image outside of a class folder, or of all splits, or without a row in the table.
    """
    numbers: dict[str, int] = {}
    beside = None
    if isinstance(container, Directory) and not files.anywhere:
        word = split_word(files.folder or container.path.name)
        beside = labels_beside(container.path / files.folder, word, None if train is None else train.classes)
    folders_there: dict[str, bool] = {}  # class folder -> whether something in it is passed over
    deeper: set[Parts] = set()
    leaves: set[Parts] = set()

    def images() -> Iterator[Image | PassedOver]:
        for entry in container.walk(folders=True):
            if isinstance(entry, PassedOver):
                if files.is_first:
                    yield entry
                continue
            path = PurePosixPath(entry.name)
            is_folder = entry.name.endswith("/")
            is_image = not is_folder and path.suffix.lower() in IMAGE_SUFFIXES
            split, start = files.below(path.parts)
            inside = path.parts[start:]
            if split != files.split:
                if split is None and files.is_first and not is_folder:
                    if is_image and start == 0:
                        raise SourceError(_stray(container, files, path.parts, start))
                    yield PassedOver("", TEST_SPLIT) if start else PassedOver.by_suffix(_folder(path.parts), path.name)
            elif beside is not None and is_image:
                yield entry._replace(label=numbers.setdefault(beside[path], len(numbers)))
            elif is_folder:
                if inside and beside is None:
                    folders_there.setdefault(inside[0], False)
            elif is_image:
                if len(inside) < 2:
                    raise SourceError(_stray(container, files, path.parts, start))
                deeper.add(inside[:-1][:2])
                if len(numbers) < 2:
                    leaves.add(inside[:-1])
                yield entry._replace(label=numbers.setdefault(inside[0], len(numbers)))
            else:
                if len(inside) > 1 and beside is None:
                    folders_there[inside[0]] = True
                yield PassedOver.by_suffix(_folder(inside), path.name)
        for folder, has_files in folders_there.items():
            if folder not in numbers and not has_files:
                yield PassedOver(folder, EMPTY)

    tables = {} if beside is None else {beside.table: sha256(beside.table)}
    listed = Images(ImageFiles(images, container.read), container.path, labels_from=tables)
    if len(numbers) > 1:
        leaves.clear()
    below = {folder for folder in deeper if len(folder) > 1}
    if below != deeper:
        deeper.clear()
    _warn_of_folders_below(container.path / files.folder, below, numbers)
    if isinstance(container, Directory) and beside is None and files.is_first:
        warn_of_other_labels(container.path, files.folder)
        if not files.words:
            warn_of_lists(container.path, numbers)
    empty = [folder for folder in folders_there if folder not in numbers]
    return _Listing(container.path / files.folder, listed, list(numbers), empty, deeper, leaves, beside)


def _warn_of_folders_below(path: Path, below: Collection[Parts], classes: Collection[str]) -> None:
    """Say that folders in class folders are no classes, where somebody may think that they are: those that are called
    as classes, or several in one."""
    inside: dict[str, set[str]] = {}
    for outer, inner in below:
        inside.setdefault(outer, set()).add(inner)
    for outer, names in sorted(inside.items()):
        # Of many thousands of classes their names are compared with few.
        if 2 <= len(classes) - 1 <= len(names) and {*classes} - {outer} <= names:
            _log.warning(
                "%s: %s is a class, and has folders called as all the others: move it away if it holds other versions "
                "of their images",
                path,
                shortened(printable_name(outer), _MOST_LETTERS),
            )
    several = sorted("/".join(parts) for parts in below if parts[1] in classes or len(inside[parts[0]]) > 1)
    if several:
        shown = ", ".join(shortened(printable_name(name), _MOST_LETTERS) for name in several[:_MOST_NAMED])
        _log.warning(
            "%s: %s in class folders are no classes, and their images are of the folders above: %s%s",
            path,
            plural(len(several), "folder"),
            shown,
            ", ..." if len(several) > _MOST_NAMED else "",
        )


def _warn_of_parts(listing: _Listing) -> None:
    """Warn if the class folders are called as the parts of a download: ``images_001``, ``images_002``."""
    matches = [_PART_OF_DOWNLOAD.fullmatch(name) for name in listing.classes]
    stems = {match[1] if match else name for match, name in zip(matches, listing.classes, strict=True)}
    if len(listing.classes) > 1 and len(stems) == 1:
        _log.warning(
            "%s: its %d class folders are called as the parts of one download, such as %s; %s",
            listing.path,
            len(listing.classes),
            printable_name(listing.classes[0]),
            _TABLE,
        )


def _folder(parts: Parts) -> str:
    return parts[0] if len(parts) > 1 else ""


def _stray(container: Container, files: _SplitFiles, parts: Parts, start: int) -> str:
    """Return the message for an image in no class folder, of which `start` parts lead to its split."""
    name, leaf = (shortened(printable_name(text), _MOST_LETTERS) for text in ("/".join(parts), parts[-1]))
    if not files.words:
        return (
            f"{name}: an image outside of a class folder: expected CLASS/{leaf} in {container.path}: move it, or if "
            f"{container.path.name} is a class itself, name the folder above it; {_TABLE}"
        )
    folder = next((folder for folder, word in files.words.items() if word == "train"), min(files.words))
    alone = f"name {container.path}/{folder} alone"
    if start == 0:
        return (
            f"{name}: an image outside of {', '.join(sorted(files.words))}, the folders of the splits in "
            f"{container.path}: move it away, or {alone} (of an archive once it is unpacked)"
        )
    return (
        f"{name}: an image outside of a class folder: expected {'/'.join(parts[:start])}/CLASS/{leaf} in "
        f"{container.path}: sort these images into a folder for each class, or {alone}, without this "
        f"split (of an archive once it is unpacked); {_TABLE}"
    )


def _refuse_lone_split(container: Container, folders: Collection[str]) -> None:
    """Raises SourceError: one of the folders is called as images that are no training images, the others are not."""
    for name in sorted(folders) if len(folders) > 1 else ():
        if split_word(name) in ("val", "test") and not re.search("[^0-9_. -]", without_split_words(name)):
            others = [printable_name(other) for other in sorted(folders) if other != name]
            remedy = "put these into train, or move it away"
            if len(others) == 1:
                remedy = f"call {others[0]} train if it has the training images, or move one of them away"
            raise SourceError(
                f"{container.path}: {printable_name(name)} is called as a split, what is beside it is not "
                f"({shortened(', '.join(others), _MOST_LETTERS)}): {remedy}; if it is a class, list all classes in a "
                "file for --class-names"
            )


def _refuse_other_level(listing: _Listing) -> None:
    """Raises SourceError: the class folders seem to lie deeper than they are looked for."""
    nested = sorted(folder for folder in listing.leaves if len(folder) > 1)
    if len(nested) > 1:
        first, last = nested[0], nested[-1]
        num_common = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        shown = shortened(printable_name("/".join(first[:num_common])), _MOST_LETTERS)
        images = "all images" if len(nested) == len(listing.leaves) else "images"
        raise SourceError(
            f"{listing.path} has one class folder, {shortened(printable_name(first[0]), _MOST_LETTERS)}, and {images} "
            f"in {len(nested):,} folders below it: if these are the classes, name {listing.path}/{shown} instead (of "
            "an archive once it is unpacked); if not, list the one class in a file for --class-names"
        )
    below: dict[str, set[str]] = {}
    for name, folder in listing.deeper:
        below.setdefault(name, set()).add(folder)
    by_spelling: dict[str, list[str]] = {}
    for name in sorted(below):
        by_spelling.setdefault(name.casefold(), []).append(name)
    for name, folder in sorted(listing.deeper):
        if alike := [other for other in by_spelling.get(folder.casefold(), ()) if other != name]:
            shown = shortened(printable_name(alike[0]), _MOST_LETTERS)
            raise SourceError(
                f"{listing.path} has {shown}, and in another folder {printable_name(f'{name}/{folder}')}: if that is "
                f"its copy, name {listing.path}/{shown} instead (of an archive once it is unpacked); if they are "
                "classes, list these in a file for --class-names"
            )
    if not below or len(min(below.values(), key=len)) < 2 or any(each != below[min(below)] for each in below.values()):
        return
    shown = shortened(printable_name(min(below)), _MOST_LETTERS)
    if split_folders_among(below[min(below)]):
        raise SourceError(
            f"{listing.path} has the folders of splits in {shown} and other folders: if these are the classes, turn it "
            f"round, such as train/{shown} instead of {shown}/train; if not, list the classes in a file for "
            "--class-names"
        )
    common = ", ".join(
        shortened(printable_name(folder), _MOST_LETTERS) for folder in sorted(below[min(below)])[:_MOST_NAMED]
    )
    raise SourceError(
        f"{listing.path} has {len(below):,} folders, {shown} and others, each with all images in the same folders "
        f"({common}): if these are the classes, name {listing.path}/{shown} alone (of an archive once it is unpacked); "
        "if not, move away what is not to be classified, such as masks, and list the classes in a file for "
        "--class-names"
    )


def _described(classes: Sequence[str], passed_over: Counter[PassedOver]) -> str:
    """Return ``owl (12 .heic, 1 .txt), wren (empty)``."""
    texts = []
    for name in classes[:_MOST_NAMED]:
        here = Counter({one.reason: count for one, count in passed_over.items() if one == (name, one.reason)})
        counts = [f"{count:,} {shortened(printable_name(reason), 20)}" for reason, count in here.most_common(3)]
        others = here.total() - sum(count for _, count in here.most_common(3))
        counts += [f"{others:,} other"] if others else []
        shown = "empty" if EMPTY in here or not here else ", ".join(counts)
        texts.append(f"{shortened(printable_name(name), _MOST_LETTERS)} ({shown})")
    more = [f"and {len(classes) - _MOST_NAMED} more"] if len(classes) > _MOST_NAMED else []
    return ", ".join([*texts, *more])


def _with_common_labels(
    listed: Mapping[SplitName, _Listing], class_order: ClassOrder, class_names: Path | None
) -> Sources:
    """Number the classes of all splits alike.

    Raises:
        SourceError: a class without images, or of one split alone.
        DatasetError: see `check_spellings`.
    """
    refuse_shared([listing.beside for listing in listed.values() if listing.beside is not None])
    first = next(iter(listed))
    folders_there = listed[first].classes
    for split, listing in listed.items():
        if split == first and folders_there and listing.empty:
            raise SourceError(
                f"{listing.path}: {plural(len(listing.empty), 'class folder')} without images: "
                f"{_described(listing.empty, listing.images.passed_over)}: convert what are images to JPEG or PNG, or "
                "move the folder away"
            )
        if not listing.classes:
            there = seen(listing.images)
            if listing.empty:
                there = f", but {_described(listing.empty, listing.images.passed_over)}"
            elif ".tar" in there:
                there += ": unpack each archive, into a folder of its class if it has no class folders"
            raise SourceError(
                f"the {split} split has no images: expected files such as CLASS/name.jpg in {listing.path}{there}"
            )
        check_spellings({*listing.classes, *folders_there})
        unknown = sorted(set(listing.classes) - set(folders_there))
        if unknown:
            raise SourceError(
                f"{split} has the class {shortened(printable_name(unknown[0]), _MOST_LETTERS)!r}, {first} has not "
                f"({len(unknown)} such classes): the class folders must agree"
                + (f"; {_TABLE}" if len(listing.classes) == 1 else "")
            )
    warn_of_spellings(folders_there)
    _warn_of_parts(listed[first])
    if len(folders_there) == 1:
        _log.warning("%s: all images are of one class, %s; %s", listed[first].path, folders_there[0], _TABLE)
    if class_names is None:
        ordered = order_classes(folders_there, class_order)
        number_of: Mapping[str, int] = {name: number for number, name in enumerate(ordered)}
        names = [printable_name(name) for name in ordered]
    else:
        names = read_class_names(class_names)
        number_of = number_classes(folders_there, names, class_names)
    for listing in listed.values():
        numbers = [number_of[name] for name in listing.classes]
        listing.images.labels = np.array(numbers, np.int32)[listing.images.labels]
    if len(set(names)) < len(names):
        raise SourceError("two class folders have names that differ only in bytes that are not UTF-8: rename one")
    return {split: listing.images for split, listing in listed.items()}, names
