"""Reading files in another process.

Reading in threads of this process would do, but each read gives the GIL away and waits for it again, hundreds of times
for a micro-batch, and so does each operator of the model in the thread that launches kernels: this delayed it by 13 ms
a micro-batch of 256 photographs, and another process does by 4 (measured on two cores). On an H100's host such delays
were most of what a step with real data took longer than one without (docs/measurements/gpu.md). For the same reason
many small files are read there and come in one piece.
"""

import errno
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dali_train.errors import DatasetError

T = TypeVar("T")

NUM_THREADS = 4
"""Requests in flight of one rank; a host has several ranks."""

_END_S = 5.0
_PROGRAM = Path(__file__).with_name("page_reader.py")
Ranges = Mapping[str, Sequence[tuple[int, int]]]
"""First byte and end of each range, by the path of the file."""


class ReadingProcess:
    """Has ranges of files read by a process that starts with the first of them. Methods may be called from several
    threads at once."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> memoryview | None:
        """Return the bytes of `ranges`, each a path, first byte and end, one after the other; None: one of them cannot
        be read. Raises OSError: the process cannot be started or has ended."""
        answer, content = self._ask(json.dumps(ranges), sum(end - begin for _, begin, end in ranges))
        return content if answer is None else None

    def read_into_page_cache(self, ranges: Ranges) -> None:
        """Read `ranges` into the page cache, and wait until they are read.

        Raises:
            DatasetError: a file ends before a range does.
            OSError: a file cannot be read, or the process cannot be started or has ended.
        """
        answer, _ = self._ask(json.dumps(ranges), 0)
        if answer is None:
            return
        path = answer["path"]
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]), path)
        # The decoder would touch a page of the map that has no file behind it, and the process would die of SIGBUS.
        raise DatasetError(
            f"{path} was truncated while in use: it ends at byte {answer['length']}, but the index has an image at "
            f"byte {answer['begin']}. Restore the shard, and start again"
        )

    def _ask(self, request: str, num_bytes: int) -> tuple[dict[str, Any] | None, memoryview]:
        """Return the answer to a request, and the `num_bytes` that follow if it is None."""
        with self._starting:
            if self.process is None:
                self._start()
        connection = self._free.get()
        answered = None
        try:
            answered = _asked(connection, request, num_bytes)
            return answered
        except OSError as error:
            raise OSError(errno.EPIPE, "the process that reads ahead has ended") from error
        finally:
            if answered is None:  # after an interrupt, the rest of this answer would be taken for the next one's
                connection.close()
            self._free.put(connection)

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(NUM_THREADS)]
        theirs = [other.fileno() for _, other in pairs]
        encoding = f"utf8={sys.flags.utf8_mode}"  # of paths; -I hides the variable
        command = [sys.executable, "-I", "-S", "-X", encoding, str(_PROGRAM), *map(str, theirs)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=theirs)
        for own, other in pairs:
            other.close()
            self._free.put(own)
        ours = [own for own, _ in pairs]
        weakref.finalize(self, _end, self.process, ours).atexit = False  # then the connections are closed anyway


def _asked(connection: socket.socket, request: str, num_bytes: int) -> tuple[dict[str, Any] | None, memoryview]:
    """Send a line; return the line that comes back, and `num_bytes` after it if that is null."""
    connection.sendall(request.encode() + b"\n")
    received = b""
    while b"\n" not in received:
        received += _not_empty(connection.recv(1 << 16))
    line, _, begin = received.partition(b"\n")
    answer = json.loads(line)
    content = memoryview(bytearray(num_bytes if answer is None else 0))
    content[: len(begin)] = begin
    at = len(begin)
    while at < len(content):
        at += _not_empty(connection.recv_into(content[at:], flags=socket.MSG_WAITALL))
    return answer, content


def _not_empty(received: T) -> T:
    if not received:
        raise ConnectionResetError
    return received


def _end(process: subprocess.Popen[bytes], connections: Sequence[socket.socket]) -> None:
    for connection in connections:
        connection.close()
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # it may wait for a file server that does not answer
        process.wait(_END_S)
