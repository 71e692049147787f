"""Reading files into the page cache, in another process.

Reading in threads of this process would do, but each read gives the GIL away and waits for it again, hundreds of times
for a micro-batch, and so does each operator of the model in the thread that launches kernels: this delayed it by 13 ms
a micro-batch of 256 photographs, and another process does by 4 (measured on two cores). On an H100's host such delays
were most of what a step with real data took longer than one without (docs/measurements/gpu.md).
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

from dali_train.errors import DatasetError

NUM_THREADS = 4
"""Requests in flight of one rank; a host has several ranks."""

_END_S = 5.0
_PROGRAM = Path(__file__).with_name("page_reader.py")
Ranges = Mapping[str, Sequence[tuple[int, int]]]
"""First byte and end of each range, by the path of the file."""


class PageCache:
    """Has ranges of files read by a process that starts with the first of them. Methods may be called from several
    threads at once."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def read(self, ranges: Ranges) -> None:
        """Read `ranges`, and wait until they are read.

        Raises:
            DatasetError: a file ends before a range does.
            OSError: a file cannot be read, or the process cannot be started or has ended.
        """
        with self._starting:
            if self.process is None:
                self._start()
        connection = self._free.get()
        try:
            line = _asked(connection, json.dumps(ranges))
        except ConnectionError as error:
            raise OSError(errno.EPIPE, "the process that reads ahead has ended") from error
        finally:
            self._free.put(connection)
        answer = json.loads(line)
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

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(NUM_THREADS)]
        theirs = [other.fileno() for _, other in pairs]
        command = [sys.executable, "-I", "-S", str(_PROGRAM), *map(str, theirs)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=theirs)
        for own, other in pairs:
            other.close()
            self._free.put(own)
        ours = [own for own, _ in pairs]
        weakref.finalize(self, _end, self.process, ours).atexit = False  # then the connections are closed anyway


def _asked(connection: socket.socket, request: str) -> bytes:
    """Send a line, and return the line that comes back."""
    connection.sendall(request.encode() + b"\n")
    line = b""
    while not line.endswith(b"\n"):
        received = connection.recv(1 << 16)
        if not received:
            raise ConnectionResetError
        line += received
    return line


def _end(process: subprocess.Popen[bytes], connections: Sequence[socket.socket]) -> None:
    for connection in connections:
        connection.close()
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # it may wait for a file server that does not answer
        process.wait(_END_S)
