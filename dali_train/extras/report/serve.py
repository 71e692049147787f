"""``dali-train report --serve``: live pages of runs, which may still be training. It only reads files."""

import hashlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import zip_longest
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from dali_train.errors import ConfigError
from dali_train.extras.report.page import Markup, document, escape, live, overview, page
from dali_train.extras.report.runs import ReportedRun, by_dataset, find_runs, load_run
from dali_train.text import plural, printable

LOCALHOST, PORT = "127.0.0.1", 7007
_LOCAL = (LOCALHOST, "localhost", "::1")
REFRESH_S = 5
_MOST_DRAWN = 8
"""How many runs, the best ones, have curves in the index."""
_WATCHED = ("config.json", "metrics.jsonl", "environment.json", "samples.png", "predictions")


def serve(directories: Sequence[Path], host: str = LOCALHOST, port: int = PORT) -> None:
    """Serve the runs in `directories` until an interrupt. New runs are found when the index is loaded again.

    Raises:
        ConfigError: there is no run, or the address cannot be used.
    """
    with make_server(directories, host, port) as server:
        name, number = server.server_address[:2]
        print(
            f"http://{name!s}:{number}/ serves {plural(len(find_runs(directories)), 'run')}. Ctrl-C ends it", flush=True
        )
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def make_server(directories: Sequence[Path], host: str, port: int) -> ThreadingHTTPServer:
    find_runs(directories)

    class Handler(_Handler):
        site = Site(tuple(directories), is_local=host in _LOCAL)

    try:
        return _Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--host {host} --port {port}: nothing can listen there ({error}); choose another port, or 0 for any"
        ) from None


@dataclass(frozen=True)
class Site:
    """The pages: ``/`` is the index, ``/run/NAME`` one run, ``/compare?run=NAME&run=NAME`` several."""

    directories: tuple[Path, ...]
    is_local: bool  # only for this machine

    def find(self, target: str) -> dict[str, Path] | None:
        """Return the runs of an address by name, or None. Names are looked up, never made into paths."""
        runs = find_runs(self.directories)
        try:
            address = urlsplit(target)
        except ValueError:
            return None
        if address.path == "/":
            return runs
        if address.path == "/compare":
            names = parse_qs(address.query).get("run", [])
            return {name: runs[name] for name in names} if names and runs.keys() >= set(names) else None
        name = unquote(address.path).removeprefix("/run/")
        return {name: runs[name]} if name in runs and address.path.startswith("/run/") else None

    def render(self, target: str, runs: dict[str, Path]) -> str:
        loaded, notes = [], []
        for name, directory in runs.items():
            try:
                run = load_run(directory, name)
                run.config.to_json()  # refused here, not in the middle of a page that others are on too
                loaded.append(run)
            except ConfigError as error:
                notes.append(f"<p>{escape(error)}</p>")
        if urlsplit(target).path != "/" and loaded:
            return page(loaded, refresh_s=REFRESH_S)
        return _index(loaded, notes)


def _index(runs: list[ReportedRun], notes: list[str]) -> str:
    """Return the page with all runs, links to each, boxes to compare some, and the curves of the best of each
    dataset."""

    def entry(run: ReportedRun) -> Markup:
        box = f'<input type="checkbox" name="run" value="{escape(run.name)}" aria-label="compare">'
        return Markup(f'{box} <a href="/run/{escape(quote(run.label))}">{escape(run.name)}</a>')

    groups = by_dataset(runs).values()
    by_rank = [run for rank in zip_longest(*groups) for run in rank if run is not None]
    drawn = by_rank[:_MOST_DRAWN]
    hint = f" The curves are those of the {len(drawn)} best." if len(drawn) < len(runs) else ""
    form = (
        f'<form action="/compare">{live("overview", overview(runs, entry))}'
        f"<p><button>Compare the ticked runs</button>{hint}</p></form>"
    )
    return document(f"{len(runs)} runs", drawn, [form, *notes], REFRESH_S, with_answers=False)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a browser that goes away while it is answered, such as a closed tab."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    site: Site
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        # Protects against DNS rebinding: a foreign page must not read what only this machine may see.
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            host = None
        try:
            runs = self.site.find(self.path) if not self.site.is_local or host in _LOCAL else None
            if runs is None:
                self._answer(HTTPStatus.NOT_FOUND, "There is no such page.\n")
            elif self.headers.get("If-None-Match") == (tag := _tag(runs)):
                self._answer(HTTPStatus.NOT_MODIFIED, "", tag)
            else:
                self._answer(HTTPStatus.OK, self.site.render(self.path, runs), tag)
        except ConfigError as error:  # a table that no run wrote, or no run is left
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{printable(str(error))}\n")

    def _answer(self, status: HTTPStatus, text: str, tag: str = "") -> None:
        """Send a page, which has a `tag`, or plain text."""
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"text/{'html' if tag else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-cache")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, since each page sends a request every few seconds."""


def _tag(runs: dict[str, Path]) -> str:
    """Return an ETag that changes when a file of one of `runs` changes."""
    facts: list[object] = []
    for name, directory in runs.items():
        for file in _WATCHED:
            path = directory / file
            facts.append((name, file, (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None))
    return f'"{hashlib.sha256(repr(facts).encode()).hexdigest()}"'
