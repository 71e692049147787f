"""What a listing of files passes over, and which numbers of shards are missing: counted, and shown as a warning.

Nothing of what lies beside images vanishes without a word, whatever the format: a listing yields a `PassedOver` for
each file that it does not take.
"""

import logging
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from dali_train.text import plural, printable, shortened

_log = logging.getLogger(__name__)
# What systems put beside people's files: macOS's zip, Synology's thumbnails, Windows' bin, a file system's check.
_SYSTEM_FOLDERS = frozenset(("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"))
_MOST_REASONS = 8  # in a message
_MOST_PLACES = 3  # of a reason in a message
_MOST_MISSING = 5  # numbers in a message

EMPTY = "empty folder"
HIDDEN = "hidden"
TEST_SPLIT = "of the test split, since there is another for validation"


def is_hidden(name: str) -> bool:
    """Return whether a file or a folder of this name, without its path, is none of the dataset's."""
    return name.startswith(".") or name in _SYSTEM_FOLDERS


class PassedOver(NamedTuple):
    """A file that a listing passes over, or an empty folder."""

    place: str  # the class folder, the tar or the directory that it is in; empty for the root
    reason: str

    @classmethod
    def by_suffix(cls, place: str, name: str) -> "PassedOver":
        """Describe a file that is passed over for the end of its name."""
        return cls(place, PurePosixPath(name).suffix.lower() or "without suffix")


def warn_passed_over(root: Path | str, passed_over: Counter[PassedOver]) -> None:
    """Log how many files are passed over by reason, such as ``3 files passed over: 2 .heic (owl), 1 hidden (ant)``."""
    if not passed_over:
        return
    num_files = sum(count for one, count in passed_over.items() if one.reason != EMPTY)
    totals: Counter[str] = Counter()
    places: dict[str, list[str]] = {}
    for one, count in passed_over.items():
        totals[one.reason] += count
        if one.place:
            places.setdefault(one.reason, []).append(shortened(printable(_decoded(one.place)), 100))
    texts = []
    for reason, count in totals.most_common(_MOST_REASONS):
        where = places.get(reason, [])
        more = f" and {len(where) - _MOST_PLACES:,} more" if len(where) > _MOST_PLACES else ""
        named = f" ({', '.join(where[:_MOST_PLACES])}{more})" if where else ""
        texts.append(f"{count:,} {shortened(printable(_decoded(reason)), 60)}{named}")
    others = totals.total() - sum(count for _, count in totals.most_common(_MOST_REASONS))
    texts += [f"{others:,} of other kinds"] if others else []
    _log.warning("%s: %s passed over: %s", _decoded(str(root)), plural(num_files, "file"), ", ".join(texts))


def _decoded(name: str) -> str:
    """Return a file name whose bytes that are not UTF-8 become \\xNN."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def missing_numbers(names: Collection[str]) -> Sequence[str]:
    """Return the numbers that shards with these names seem to lack, as they are written.

    Names are numbered if they differ in one number alone: ``a-0``, ``a-2`` lack 1. With a total (``-0-of-4``) the last
    ones can lack, too. Where more numbers are missing than there are, they are dates or synsets and count nothing.
    """
    split = [re.split(r"(\d+)", name) for name in names]
    if len({len(parts) for parts in split}) != 1:
        return []
    columns = [[*column] for column in zip(*split, strict=True)]
    varying = [number for number, column in enumerate(columns) if len({*column}) > 1]
    totals = [number for number, parts in enumerate(columns) if parts[0].endswith("-of-") and number % 2 == 0]
    if totals and totals[0] > 0 and varying in ([], [totals[0] - 1]):
        place = totals[0] - 1
    elif len(varying) == 1 and varying[0] % 2 == 1:
        place = varying[0]
    else:
        return []
    there = {int(text) for text in columns[place]}
    width = min(map(len, columns[place]))
    first, last = min(there), max(there)
    if totals:
        total = int(columns[totals[0] + 1][0])
        first = 1 if last == total else 0  # some count from 1
        last = total - 1 + first
    if last - first > 1_000_000:
        return []
    missing = [f"{number:0{width}d}" for number in range(first, last + 1) if number not in there]
    return missing if totals or len(missing) <= len(there) else []


def warn_missing(root: Path | str, names: Collection[str]) -> None:
    """Log which shards seem to be missing among those with these names."""
    missing = missing_numbers(names)
    if missing:
        shown = ", ".join(missing[:_MOST_MISSING]) + (", ..." if len(missing) > _MOST_MISSING else "")
        _log.warning(
            "%s: by their numbers %s missing: %s; fetch them if they are the dataset's",
            _decoded(str(root)),
            plural(len(missing), "file") + (" is" if len(missing) == 1 else " are"),
            shown,
        )
