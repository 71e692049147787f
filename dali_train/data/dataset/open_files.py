"""The files that a process keeps open: one budget for all splits and evaluation sets, whatever `ulimit -n` says.

A mapped shard holds a descriptor as long as it is mapped, so those are reserved. Other files stay open as long as there
is room, and those that were not read for longest are closed first; a file that is being read is never closed.
"""

import errno
import os
import resource
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

_OTHERS = 256  # descriptors for all else: libraries, devices, sockets, checkpoints
_MOST_OPEN = 8192  # that stay open; the soft limit is raised no further than for these
_FEWEST_OPEN = 8  # even where the limit leaves no room: threads read a few at the same time


@dataclass
class _Open:
    descriptor: int
    num_users: int = 0


class OpenFiles:
    """Descriptors by owner and number. Methods may be called from several threads at once."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[int, int], _Open] = OrderedDict()  # the most recently used last
        self._num_reserved = 0
        self._most = _MOST_OPEN  # less where the system refused more
        self._changing = threading.Lock()
        self._owners = count()
        self._gone: deque[tuple[int, int]] = deque()  # owners, and how many files each had reserved

    def new_owner(self) -> int:
        """Return a number for an object whose files are opened. It calls `forget` when it is finalized."""
        return next(self._owners)

    def forget(self, owner: int, num_reserved: int = 0) -> None:
        """Have the files of an owner closed, later: a finalizer runs in any thread, also in one that is in here."""
        self._gone.append((owner, num_reserved))

    def reserve(self, num_files: int) -> str:
        """Count files that will stay open elsewhere; the limit is raised for them as far as is allowed. Return the
        reason if they cannot be, else an empty string."""
        with self._changing:
            self._close_gone()
            total = self._num_reserved + num_files
            limit = _raised_limit(total + _OTHERS)
            if limit < total + _OTHERS:
                return f"{total + _OTHERS:,} files would be open, `ulimit -Hn` allows {limit:,}"
            self._num_reserved = total
            self._close_surplus()
            return ""

    @contextmanager
    def opened(self, owner: int, number: int, open_file: Callable[[], int]) -> Iterator[int]:
        """Yield the descriptor of a file of an owner, which `open_file` opens if it is not open."""
        entry = self._take(owner, number, open_file)
        try:
            yield entry.descriptor
        finally:
            with self._changing:
                entry.num_users -= 1
                self._close_surplus()

    def _take(self, owner: int, number: int, open_file: Callable[[], int]) -> _Open:
        with self._changing:
            self._close_gone()
            entry = self._open.get((owner, number))
            if entry is None:
                entry = self._open[owner, number] = _Open(self._open_or_make_room(open_file))
            entry.num_users += 1
            self._open.move_to_end((owner, number))
            return entry

    def _open_or_make_room(self, open_file: Callable[[], int]) -> int:
        try:
            return open_file()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # More is open elsewhere in the process, or on the machine, than was thought.
            self._most = max(_FEWEST_OPEN, len(self._open) // 2)
            self._close_surplus()
            return open_file()

    def _close_gone(self) -> None:
        while self._gone:
            owner, num_reserved = self._gone.popleft()
            self._num_reserved -= num_reserved
            for key in [key for key in self._open if key[0] == owner]:
                os.close(self._open.pop(key).descriptor)

    def _close_surplus(self) -> None:
        room = _raised_limit(_MOST_OPEN) - self._num_reserved - _OTHERS
        most = max(_FEWEST_OPEN, min(self._most, room))
        unused = [key for key, entry in self._open.items() if not entry.num_users] if len(self._open) > most else []
        for key in unused[: len(self._open) - most]:
            os.close(self._open.pop(key).descriptor)


OPEN_FILES = OpenFiles()
"""Those of this process."""


def _raised_limit(wanted: int) -> int:
    """Raise this process's soft limit of open files to `wanted`, as far as the hard limit allows; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)
