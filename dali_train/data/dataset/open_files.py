"""The files that a process keeps open: the limit of `ulimit -n` is raised for them as far as is allowed."""

import resource
import threading
from collections import deque

_OTHERS = 256  # descriptors for all else: libraries, devices, sockets, checkpoints


class OpenFileLimit:
    """Counts them. Methods may be called from several threads at once."""

    def __init__(self) -> None:
        self._num_reserved = 0
        self._changing = threading.Lock()
        self._released: deque[int] = deque()

    def reserve(self, num_files: int) -> str:
        """Count files that will stay open, as a mapped one does. Return the reason if they cannot be, else an empty
        string."""
        with self._changing:
            while self._released:
                self._num_reserved -= self._released.popleft()
            total = self._num_reserved + num_files
            limit = _raised_limit(total + _OTHERS)
            if limit < total + _OTHERS:
                return f"{total + _OTHERS:,} files would be open, `ulimit -Hn` allows {limit:,}"
            self._num_reserved = total
            return ""

    def release(self, num_files: int) -> None:
        """Count no longer what was reserved. No lock is taken: finalizers call this, in any thread, also one that is in
        here."""
        self._released.append(num_files)


OPEN_FILES = OpenFileLimit()
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
