"""Which file a table means: tables name images without their folder or suffix, or as another system spells them."""

import glob
import os
import re
import stat
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath

from dali_train.data.convert.archives import Directory, folders_in
from dali_train.data.convert.datasets import KAGGLES_IMAGENET, images_root
from dali_train.data.convert.sources import Image, SourceError
from dali_train.data.dataset.image_file import IMAGE_SUFFIXES
from dali_train.data.dataset.manifest import SplitWord, split_word

_MOST_FOLDERS = 20  # that are looked into, beside the table and in those
_ABSOLUTE = re.compile(r"/|[A-Za-z]:[\\/]|\\\\")  # also Windows' paths
_SUFFIXES = ("", *sorted(IMAGE_SUFFIXES), *(suffix.upper() for suffix in sorted(IMAGE_SUFFIXES)))


class ImageFinder:
    """Finds images below a directory by the names that a table in it has for them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last = ""  # suffix that was missing in the name before
        self._dropped = 0  # parts at the beginning of absolute paths that are another machine's

    def find(self, name: str, where: str, word: SplitWord | None = None) -> tuple[str, int]:
        """Return the path of a file below the directory, and its size in bytes.

        Names are paths below the directory or below a folder in it, or one in that, such as ``train_images``; also
        absolute, with backslashes, without the suffix, in other case or another Unicode form.

        Args:
            where: the row of the table, for messages.
            word: of its split, which decides between folders that have a file of this name each.

        Raises:
            SourceError: there is no such file, there are several, or it lies elsewhere.
        """
        below = self._below(name, where)
        # Once all files are listed, a look there is quicker than one for each suffix in each folder.
        found = (self._spelt_otherwise(below) if "_spellings" in self.__dict__ else {}) or self._there(below)
        if len(found) > 1 and word is not None:
            of_split = {path: size for path, size in found.items() if split_word(path[: -len(below)]) == word}
            found = of_split or found
        if len(found) > 1:
            raise SourceError(
                f"{where}: {name!r} is in several folders, as {' and '.join([*found][:3])}: put the table beside the "
                "images, or write the folder's name before theirs"
            )
        found = found or self._spelt_otherwise(below) or self._of_another_machine(name)
        if not found:
            if others := self._of_other_kinds(below):
                raise SourceError(f"{where}: {others[0]} is no image that is read: convert it to JPEG or PNG")
            looked = f" (nor in {', '.join(self._folders[:5])})" if self._folders else ""
            raise SourceError(
                f"{where}: there is no file {below} in {self._directory}{looked}: restore it, or leave the row out; if "
                "the images are elsewhere, put the table into the directory that holds them"
            )
        return next(iter(found.items()))

    def _of_other_kinds(self, name: str) -> list[Path]:
        """Return the files of this name with any suffix."""
        folders = [self._directory, *(self._directory / folder for folder in self._folders)]
        with suppress(OSError, ValueError):  # as in `_sizes`
            return [path for folder in folders for path in folder.glob(f"{glob.escape(name)}.*")]
        return []

    def look(self, name: str) -> list[str]:
        """Return the paths below the directory of what a name may mean, as it is spelt."""
        try:
            return [*self._there(self._below(name, ""))]
        except SourceError:
            return []

    def has(self, name: str) -> bool:
        """Return whether a name is that of an image, as it is spelt."""
        return bool(self.look(name))

    def _below(self, name: str, where: str) -> str:
        if name and name[0] not in "./" and not any(part in name for part in ("\\", "..", "//", ":/")):
            return name  # nearly always, and pathlib takes longer than all else
        path = PurePosixPath(name)
        if "\\" in name and not (self._directory / name).exists():
            path = PurePosixPath(name.replace("\\", "/"))
        is_elsewhere = False
        if path.is_relative_to(self._directory):
            path = path.relative_to(self._directory)
        elif _ABSOLUTE.match(name):
            is_elsewhere = path.is_absolute() and Path(path).exists()
            parts = str(path).lstrip("/").split("/")
            path = PurePosixPath(*parts[min(self._dropped, len(parts) - 1) :])
        if not path.name or ".." in path.parts or is_elsewhere:
            raise SourceError(
                f"{where}: {name!r} does not lie below {self._directory}, the table's directory: put the table above "
                "its images"
            )
        return str(path)

    def _there(self, name: str) -> dict[str, int]:
        """Return the file of this name, or with a suffix, else those in the folders, and their sizes."""
        for suffix in (self._last, *_SUFFIXES):
            for folders in (("",), self._folders):
                found = self._sizes(f"{folder}{name}{suffix}" for folder in folders)
                if found:
                    self._last = suffix
                    return found
        return {}

    def _sizes(self, paths: Iterable[str]) -> dict[str, int]:
        """Return those of the paths that are files, and their sizes."""
        sizes = {}
        for path in paths:
            with suppress(OSError, ValueError):  # of names that are none, such as text of 1,000 letters
                status = os.stat(f"{self._directory}/{path}")  # noqa: PTH116  a table may have millions
                if stat.S_ISREG(status.st_mode):
                    sizes[path] = status.st_size
        return sizes

    def _of_another_machine(self, name: str) -> dict[str, int]:
        """Return the file that the end of an absolute path names: the longest end of which there is a file."""
        parts = PurePosixPath(name.replace("\\", "/").lstrip("/")).parts if _ABSOLUTE.match(name) else ()
        for number in range(len(parts)):
            found = self._there("/".join(parts[number:]))
            if len(found) == 1:
                self._dropped = number  # likely to be the same for all
                return found
        return {}

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

    def _spelt_otherwise(self, name: str) -> dict[str, int]:
        """Return the one file whose path differs in case, in the Unicode form or in the suffix's case alone."""
        found = {*self._spellings.get(_normal(name), ())}
        for suffix in IMAGE_SUFFIXES:
            found.update(self._spellings.get(_normal(f"{name}{suffix}"), ()))
        return self._sizes(found) if len(found) == 1 else {}

    @cached_property
    def _spellings(self) -> dict[str, list[str]]:
        """All files, by what their paths have in common with those of other spellings; only made if one is missing."""
        spellings: dict[str, list[str]] = {}
        for entry in Directory(self._directory).walk():
            if isinstance(entry, Image):
                spellings.setdefault(_normal(entry.name), []).append(entry.name)
                for folder in self._folders:
                    if entry.name.startswith(folder):
                        spellings.setdefault(_normal(entry.name.removeprefix(folder)), []).append(entry.name)
        return spellings


def _normal(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()
