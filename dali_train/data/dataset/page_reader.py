"""A program that reads byte ranges of files into the page cache: see `PageCache`. It needs the standard library alone.

    python page_reader.py DESCRIPTOR ...

Each descriptor is a socket with a thread of its own. A request is a line, {path: [[first byte, end], ...]} in JSON; the
answer is a line too: null, or why a range could not be read, as {"path", "errno"}, or, of a file that ends before the
range does, as {"path", "length", "begin"}. The program ends when its sockets are closed.
"""

import json
import os
import resource
import signal
import socket
import sys
import threading
from collections import OrderedDict
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
    """Answer requests until the other side closes; keep `most_open` files open, since opening asks a file server."""
    descriptors: OrderedDict[str, int] = OrderedDict()  # the most recently used last
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with connection.makefile("rwb") as lines:
        for line in lines:
            answer = None
            for path, ranges in json.loads(line).items():
                try:
                    if path not in descriptors:
                        if len(descriptors) >= most_open:
                            os.close(descriptors.popitem(last=False)[1])
                        descriptors[path] = os.open(os.fsencode(path), os.O_RDONLY)
                    descriptors.move_to_end(path)
                    answer = read_ranges(path, descriptors[path], ranges, buffer)
                except OSError as error:
                    answer = {"path": path, "errno": error.errno}
                if answer is not None:
                    break
            lines.write(json.dumps(answer).encode() + b"\n")
            lines.flush()


def read_ranges(path: str, descriptor: int, ranges: list[list[int]], buffer: memoryview) -> dict[str, Any] | None:
    """Read `ranges` of an open file; return where it ends if that is too early."""
    for begin, end in ranges:
        at = begin
        while at < end:
            num_read = os.preadv(descriptor, [buffer[: end - at]], at)
            if num_read == 0:
                return {"path": path, "length": os.fstat(descriptor).st_size, "begin": begin}
            at += num_read
    return None


if __name__ == "__main__":
    main()
