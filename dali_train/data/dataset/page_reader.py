"""A program that reads byte ranges of files for another process: see `ReadingProcess`. It needs the standard library
alone.

    python page_reader.py DESCRIPTOR ...

Each descriptor is a socket with a thread of its own. A request is a line: [[path, first byte, end], ...] in JSON for
the bytes of these ranges, or {path: [[first byte, end], ...]} to have them read into the page cache alone. The answer
is a line too, null, then the bytes that were asked for; or why a range could not be read, as {"path", "errno"}, or, of
a file that ends before the range does, as {"path", "length", "begin"}. The program ends when its sockets are closed.
"""

import json
import os
import resource
import signal
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

_BUFFER_BYTES = 1 << 20
_OTHERS = 64  # descriptors for all else
# A terminal, torchrun and Slurm send them to all processes of a run, which decides itself when it ends.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    sockets = [socket.socket(fileno=int(word)) for word in sys.argv[1:]]
    for one in sockets:
        threading.Thread(target=serve, args=(one, (most - _OTHERS) // len(sockets))).start()


def serve(connection: socket.socket, most_open: int) -> None:
    """Answer requests until the other side closes, or is gone with an answer on its way."""
    files, buffer = OpenFiles(most_open), memoryview(bytearray(_BUFFER_BYTES))
    with suppress(ConnectionError), connection.makefile("rwb") as lines:
        for line in lines:
            request, content = json.loads(line), memoryview(b"")
            if isinstance(request, dict):
                answer = files.read(
                    (path, begin, end, buffer) for path, ranges in request.items() for begin, end in ranges
                )
            else:
                content = memoryview(bytearray(sum(end - begin for _, begin, end in request)))
                answer = files.read(into(content, request))
            lines.write(json.dumps(answer).encode() + b"\n")
            if answer is None:
                lines.write(content)
            lines.flush()


Reads = Iterable[tuple[str, int, int, memoryview]]
"""The path of a file, first byte and end of a range, and the buffer for it: as long as the range, or another one, in
which pieces of it follow one another."""


def into(content: memoryview, ranges: Iterable[tuple[str, int, int]]) -> Reads:
    """Yield reads of `ranges` that fill `content`."""
    place = 0
    for path, begin, end in ranges:
        yield path, begin, end, content[place : place + end - begin]
        place += end - begin


class OpenFiles:
    """Keeps so many files open, since opening asks a file server."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._descriptors: OrderedDict[str, int] = OrderedDict()  # the most recently used last

    def read(self, reads: Reads) -> dict[str, Any] | None:
        """Read ranges; return why one cannot be read."""
        for path, begin, end, buffer in reads:
            try:
                descriptor, at = self._opened(path), begin
                while at < end:
                    place = buffer[at - begin :] if len(buffer) == end - begin else buffer[: end - at]
                    num_read = os.preadv(descriptor, [place], at)
                    if num_read == 0:
                        return {"path": path, "length": os.fstat(descriptor).st_size, "begin": begin}
                    at += num_read
            except OSError as error:
                return {"path": path, "errno": error.errno}
        return None

    def _opened(self, path: str) -> int:
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            if len(self._descriptors) >= self._most:
                os.close(self._descriptors.popitem(last=False)[1])
            # A FIFO would wait for a writer.
            descriptor = self._descriptors[path] = os.open(os.fsencode(path), os.O_RDONLY | os.O_NONBLOCK)
        self._descriptors.move_to_end(path)
        return descriptor


if __name__ == "__main__":
    main()
