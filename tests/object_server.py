"""A server of a directory's files over HTTP, with byte ranges and ETags, that can be told to misbehave.

python tests/object_server.py DIRECTORY [DELAY_S]   # prints its URL; used by tools/bench/remote.py
"""

import hashlib
import re
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class ObjectServer(ThreadingHTTPServer):
    """Serves `directory` at `url` until it is closed.

    Set `fault` to a function of (handler, path, content) that answers in place of the server and returns True, or
    returns False to have the request answered as usual.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, directory: Path, delay_s: float = 0.0, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.directory, self.delay_s = directory, delay_s
        self.fault: Callable[[Any, str, bytes], bool] | None = None
        self.num_requests = self.num_bytes = 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def server_close(self) -> None:
        self.shutdown()  # else its thread would ask the closed socket for requests, without a pause
        super().server_close()

    def handle_error(self, *_: Any) -> None:
        """Say nothing: clients that were killed leave broken connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        if self.server.delay_s:
            time.sleep(self.server.delay_s)
        path = self.server.directory / self.path.lstrip("/")
        if not path.is_file():
            self.reply(404, b"")
            return
        size = path.stat().st_size
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if body else None
        start, stop = (int(span[1]), min(int(span[2]) + 1, size)) if span else (0, size)
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(stop - start) if body else b""
        status = path.stat()
        etag = hashlib.md5(f"{path}{status.st_size}{status.st_mtime_ns}".encode()).hexdigest()
        self.right_headers = {"ETag": f'"{etag}"'}
        if span:
            self.right_headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.server.num_requests += 1
        self.server.num_bytes += len(content)
        if self.server.fault is not None and self.server.fault(self, self.path, content):
            return
        wanted = self.headers.get("If-Match")
        if wanted is not None and wanted.strip('"') != etag:
            self.reply(412, b"")
            return
        self.reply(206 if span else 200, content, self.right_headers, size if not body else None)

    def reply(
        self, status: int, content: bytes, headers: dict[str, str] | None = None, size: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if size is None else size))
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    server = ObjectServer(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    print(server.url, flush=True)
    threading.Event().wait()
