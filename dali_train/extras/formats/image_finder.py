"""Which file a table means: tables name images without their folder or suffix, or as another system spells them.

What a name leaves out is the same for all rows of a table, or it is a guess: where the images lie in ``train``, a name
that is missing there is not one in ``test``.
"""

import glob
import os
import re
import stat
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from dali_train.data.convert.archives import Directory, folders_in
from dali_train.data.convert.datasets import KAGGLES_IMAGENET, images_root
from dali_train.data.convert.sources import Image, SourceError
from dali_train.data.dataset.image_file import IMAGE_SUFFIXES
from dali_train.data.dataset.manifest import SplitWord, split_word

_MOST_FOLDERS = 20  # that are looked into one after the other, beside the table and in those
_MOST_LEVELS = 2  # of folders that a name may leave out
_ABSOLUTE = re.compile(r"/|[A-Za-z]:[\\/]|\\\\")  # also Windows' paths


class Found(NamedTuple):
    """A file that a name means."""

    file: str  # its path below the directory
    size: int  # in bytes
    folder: str  # the beginning of that path which the name leaves out, with a slash at its end; mostly nothing


class ImageFinder:
    """Finds images below a directory by the names that a table in it has for them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._listed: dict[str, dict[str, list[str]]] = {}  # see `_names_in`
        self._beginnings: dict[tuple[str, ...], tuple[str, str]] = {}  # of another machine's paths -> a name, its file

    def find(self, name: str, where: str, word: SplitWord | None = None) -> Found:
        """Return the file below the directory.

        Names are paths below the directory or below a folder in it, or one in that, such as ``train_images``; also with
        backslashes, without the suffix, in other case or another Unicode form. Of an absolute path of another machine
        the end counts: at least a folder and a file, or a file beside the table.

        Args:
            where: the row of the table, for messages.
            word: of its split, which decides between folders that have a file of this name each.

        Raises:
            SourceError: there is no such file, there are several, or it lies elsewhere.
        """
        if (parts := self._parts_elsewhere(name)) is not None:
            ends = self._ends(parts)
            found = self._by_their_end(ends, parts, name, where)
            below = ends[0]
        else:
            below = self._below(name, where)
            # Once all files are listed, a look there is quicker than one in each folder.
            found = self._spelt_otherwise(below) if "_spellings" in self.__dict__ else []
            if len(found) != 1:
                found = self._there(below) or self._spelt_otherwise(below)
        if len(found) > 1 and word is not None:
            found = [one for one in found if split_word(one.folder) == word] or found
        if len(found) > 1:
            one_folder = len({one.folder for one in found}) == 1
            remedy = "put the table beside the images, or write the folder's name before theirs"
            raise SourceError(
                f"{where}: {name!r} may be {' or '.join(one.file for one in found[:3])}: "
                f"{'write its suffix, too' if one_folder else remedy}"
            )
        if found:
            return found[0]
        if others := self._of_other_kinds(below):
            raise SourceError(f"{where}: {others[0]} is no image that is read: convert it to JPEG or PNG")
        looked = f" (nor in {', '.join(self._folders[:5])})" if self._folders else ""
        raise SourceError(
            f"{where}: there is no file {below} in {self._directory}{looked}: restore it, or leave the row out; if "
            "the images are elsewhere, put the table into the directory that holds them"
        )

    def look(self, name: str) -> list[str]:
        """Return the paths below the directory of what a name may mean, as it is spelt."""
        with suppress(SourceError):
            parts = self._parts_elsewhere(name)
            ends = [self._below(name, "")] if parts is None else self._ends(parts)
            for end in ends:
                if found := self._there(end):
                    return [one.file for one in found]
        return []

    def has(self, name: str) -> bool:
        """Return whether a name is that of an image, as it is spelt."""
        return bool(self.look(name))

    def num_images(self, folder: str) -> int:
        """Return how many images lie in a folder, without those in folders there."""
        return sum(map(len, self._names_in(folder).values()))

    def _below(self, name: str, where: str) -> str:
        """Return a path below the directory. Raises SourceError: it leads elsewhere."""
        if name and name[0] not in "./" and not any(part in name for part in ("\\", "..", "//", ":/")):
            return name  # nearly always, and pathlib takes longer than all else
        path = PurePosixPath(name)
        if "\\" in name and not (self._directory / name).exists():
            path = PurePosixPath(name.replace("\\", "/"))
        if path.is_relative_to(self._directory):
            path = path.relative_to(self._directory)
        if not path.name or path.is_absolute() or ".." in path.parts:
            raise SourceError(
                f"{where}: {name!r} does not lie below {self._directory}, the table's directory: put the table above "
                "its images"
            )
        return str(path)

    def _parts_elsewhere(self, name: str) -> tuple[str, ...] | None:
        """Return the parts of an absolute path that does not exist on this machine; else None."""
        if not _ABSOLUTE.match(name):
            return None
        path = PurePosixPath(name)
        if path.is_relative_to(self._directory) or ".." in path.parts or (path.is_absolute() and Path(path).exists()):
            return None
        return PurePosixPath(name.replace("\\", "/").lstrip("/")).parts or None

    def _ends(self, parts: tuple[str, ...]) -> list[str]:
        """Return what the path of another machine may be here: what follows its directory, or what may follow it, the
        longest first."""
        for beginning in self._beginnings:
            if parts[: len(beginning)] == beginning:
                return ["/".join(parts[len(beginning) :])]
        return ["/".join(parts[number:]) for number in range(len(parts))]

    def _by_their_end(self, ends: list[str], parts: tuple[str, ...], name: str, where: str) -> list[Found]:
        """Return the files that the longest of the `ends` of a path names. Raises SourceError: that end is longer than
        the one of another path."""
        for look_up in (self._there, self._spelt_otherwise):
            for end in ends:
                # Any folder may have a file of this name: what folder it lay in is known, and is none of these.
                if found := [one for one in look_up(end) if "/" in end or not one.folder]:
                    self._note_beginning(parts[: -end.count("/") - 1], name, found[0].file, where)
                    return found
        return []

    def _note_beginning(self, beginning: tuple[str, ...], name: str, file: str, where: str) -> None:
        for other, (other_name, other_file) in self._beginnings.items():
            if other != beginning and other[: len(beginning)] == beginning:
                raise SourceError(
                    f"{where}: {name!r} would be {file} here, and {other_name!r} {other_file}, which cannot both be "
                    f"right: restore the file that is missing, or write paths below {self._directory}"
                )
        self._beginnings.setdefault(beginning, (name, file))

    def _there(self, name: str) -> list[Found]:
        """Return the file of this name beside the table, else those in the folders; else those with any suffix."""
        for names in (lambda path: [path], self._with_suffix):
            for folders in (("",), self._folders):
                paths = [(folder, path) for folder in folders for path in names(f"{folder}{name}")]
                if found := self._files(paths):
                    return found
        return []

    def _with_suffix(self, path: str) -> list[str]:
        folder, slash, stem = path.rpartition("/")
        return [f"{folder}{slash}{name}" for name in self._names_in(folder).get(stem, ())]

    def _names_in(self, folder: str) -> dict[str, list[str]]:
        """Return the names of the images in a folder by what stands before their suffixes."""
        if folder not in self._listed:
            names = self._listed[folder] = {}
            with suppress(OSError, ValueError), os.scandir(f"{self._directory}/{folder}") as entries:  # as in `_files`
                for entry in entries:
                    stem, suffix = os.path.splitext(entry.name)  # noqa: PTH122  there may be millions
                    if suffix.lower() in IMAGE_SUFFIXES:
                        names.setdefault(stem, []).append(entry.name)
        return self._listed[folder]

    def _files(self, paths: Iterable[tuple[str, str]]) -> list[Found]:
        """Return those of the pairs of a folder and a path that are files."""
        found = []
        for folder, path in paths:
            with suppress(OSError, ValueError):  # of names that are none, such as text of 1,000 letters
                status = os.stat(f"{self._directory}/{path}")  # noqa: PTH116  a table may have millions
                if stat.S_ISREG(status.st_mode):
                    found.append(Found(path, status.st_size, folder))
        return found

    def _of_other_kinds(self, name: str) -> list[Path]:
        """Return the files of this name with any suffix."""
        folders = [self._directory, *(self._directory / folder for folder in self._folders)]
        with suppress(OSError, ValueError):  # as in `_files`
            return [path for folder in folders for path in folder.glob(f"{glob.escape(name)}.*")]
        return []

    @cached_property
    def _folders(self) -> tuple[str, ...]:
        """The folders in the directory, and those in them, each with a slash at its end; none if there are many."""
        folders: list[str] = []
        is_kaggles = images_root(self._directory) != self._directory
        for folder in [KAGGLES_IMAGENET] if is_kaggles else folders_in(self._directory):
            folders += [f"{folder}/", *(f"{folder}/{inner}/" for inner in folders_in(self._directory / folder))]
            if len(folders) > _MOST_FOLDERS:
                return ()
        return tuple(folders)

    def _spelt_otherwise(self, name: str) -> list[Found]:
        """Return the files whose paths differ in case, in the Unicode form or in the suffix's case alone, in any folder
        of the two levels."""
        found = {*self._spellings.get(_normal(name), ())}
        for suffix in IMAGE_SUFFIXES:
            found.update(self._spellings.get(_normal(f"{name}{suffix}"), ()))
        num_parts = name.count("/") + 1
        return self._files(
            ("".join(f"{part}/" for part in path.split("/")[:-num_parts]), path) for path in sorted(found)
        )

    @cached_property
    def _spellings(self) -> dict[str, list[str]]:
        """All files, by what their paths have in common with those of other spellings, and without up to two folders;
        only made if one is missing."""
        spellings: dict[str, list[str]] = {}
        for entry in Directory(self._directory).walk():
            if isinstance(entry, Image):
                path = _normal(entry.name)
                spellings.setdefault(path, []).append(entry.name)
                for _ in range(min(_MOST_LEVELS, path.count("/"))):
                    path = path.partition("/")[2]
                    spellings.setdefault(path, []).append(entry.name)
        return spellings


@dataclass
class _Folder:
    """The rows of a table whose images lie in a folder that their names leave out."""

    first: str  # file
    where: str  # row
    num_rows: int = 0
    is_class: bool = True  # whether it is called as the labels of all its images
    words: set[SplitWord | None] = field(default_factory=set)  # of the rows' splits
    directories: set[str] = field(default_factory=set)  # of the files


class FoldersOfTable:
    """Which folders the names of a table leave out. Most names are in the right one; where some are missing there,
    other folders may have files of these names."""

    def __init__(self) -> None:
        self._folders: dict[str, _Folder] = {}

    def add(self, found: Found, where: str, labels: Iterable[str], word: SplitWord | None) -> None:
        """Take a row into account, with its labels and the word of its split, if there is one."""
        folder = self._folders.setdefault(found.folder, _Folder(found.file, where))
        folder.num_rows += 1
        folder.words.add(word)
        if folder.is_class:
            name = _normal(PurePosixPath(found.folder).name)
            folder.is_class = all(_normal(label) == name for label in labels)
        folder.directories.add(found.file.rpartition("/")[0])

    def check(self, finder: ImageFinder) -> None:
        """Raises SourceError: a few files lie where others are that the table does not name, or in another split."""
        if len(self._folders) < 2:
            return
        main = max(self._folders, key=lambda name: self._folders[name].num_rows)
        for name, folder in self._folders.items():
            if name and name != main and (self._is_of_another_split(name) or self._is_stray(name, main, finder)):
                raise SourceError(
                    f"{folder.where}: there is no such file {f'in {main}' if main else 'beside the table'}, where "
                    f"{self._folders[main].num_rows:,} others are, but {folder.first}: restore the file, or leave the "
                    f"row out; if that one is meant, write {name} before its name"
                )

    def _is_of_another_split(self, name: str) -> bool:
        """Return whether a folder is called as one split, and its rows belong to another one that has a folder, too."""
        split = split_word(name)
        words = {word for word in self._folders[name].words if word not in (None, split)}
        return split is not None and any(
            split_word(other) in words & folder.words for other, folder in self._folders.items()
        )

    def _is_stray(self, name: str, main: str, finder: ImageFinder) -> bool:
        """Return whether a folder has less than half of the rows of the `main` one, is no part of a download as
        ``images_001``, no class, and has more images that the table does not name."""
        folder = self._folders[name]
        others = (re.sub(r"\d+", "", other) for other in self._folders if other != name)
        if folder.is_class or re.sub(r"\d+", "", name) in others:
            return False
        num_images = sum(finder.num_images(directory) for directory in folder.directories)
        return 2 * folder.num_rows < min(num_images, self._folders[main].num_rows)


def _normal(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()
