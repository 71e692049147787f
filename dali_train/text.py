"""Formatting text for users: safe for terminals, logs and pictures, without credentials, and shortened to fit."""

import math
import re
import shlex
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

_ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])"
)  # colours, cursor, titles
_JOINERS = "\u200c\u200d"  # invisible, but part of how Persian and emoji are written
_URL = re.compile(
    r"""
    \b(?P<scheme> [a-z][a-z0-9+.-]*:// )
    (?P<user>                                      # KEY:SECRET@, up to the last @ of the authority
        [^\s/?\#'"<>]*@
      | [^\s/?\#'"<>:\[@]+ : (?!\d*(?:[/?\#\s'"<>]|$)) [^\s'"<>]*@  # no port, so a secret with / or ? in it
    )?
    (?P<path> [^\s?\#'"<>]* )
    (?P<query> [?\#] [^\s'"<>]*? )?
    (?= [.,:;)\]]* (?: [\s'"<>] | $ ) )
    """,
    re.IGNORECASE | re.VERBOSE,
)


def redacted(text: str) -> str:
    """Return `text` without what may be secret in its URLs: user and password, and the query, which may be a signature.

    ``https://me:SECRET@host/x?sig=SECRET`` becomes ``https://***@host/x?***``.
    """
    if "://" not in text:
        return text
    return _URL.sub(
        lambda url: (
            f"{url['scheme']}{'***@' if url['user'] else ''}{url['path']}"
            f"{url['query'][0] + '***' if len(url['query'] or '') > 1 else url['query'] or ''}"
        ),
        text,
    )


def shell_command(command: Sequence[str]) -> str:
    """Return a command for a shell, without secrets and without the path of the program on this machine."""
    program, *words = command
    name = Path(program).name
    start = "dali-train" if name in ("dali-train", "__main__.py") else f"python {shlex.quote(name)}"
    return " ".join([start, *(shlex.quote(redacted(word)) for word in words)])


def has_credentials(url: str) -> bool:
    """Return whether there is something in a URL that `redacted` removes."""
    return redacted(url) != url


def printable(text: str, *, keep: str = "") -> str:
    """Return `text` from a file name, a class name or an error as one harmless line: white space becomes a space,
    terminal escape sequences are removed, other control characters become U+FFFD; characters in `keep` stay. URLs are
    `redacted`."""
    text = redacted(_ESCAPE_SEQUENCE.sub("", text))
    return "".join(
        c if c.isprintable() or c in keep or c in _JOINERS else " " if c.isspace() else "\ufffd" for c in text
    )


def shortened(text: str, limit: float, size: Callable[[str], float] = len) -> str:
    """Return `text`, truncated with an ellipsis if its `size`, by default the number of characters, exceeds `limit`."""
    if size(text) <= limit:
        return text
    too_long = bisect_right(range(len(text)), limit, key=lambda end: size(text[:end] + "…"))
    return text[: max(0, too_long - 1)].rstrip() + "…"


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a line per row with its cells in columns."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def plural(count: float, noun: str) -> str:
    """Return ``1 class``, ``1,000 classes``, ``0.5 epochs``."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    hisses = noun.endswith(("s", "ch", "sh", "x")) and noun != "epoch"
    ending = "" if count == 1 else "es" if hisses else "s"
    return f"{number} {noun}{ending}"


def span(least: int, most: int) -> str:
    """Return ``33 to 37``, or ``120`` if both are equal."""
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def duration(seconds: float) -> str:
    """Return the two largest units: ``85 ms``, ``2.22 s``, ``3 min 5 s``, ``78 h 35 min``, ``1,646 h``."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    if seconds < 0.9995:  # three digits of more would be 1e+03
        return f"{1000 * seconds:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(seconds / 60), 60)
    if hours >= 1000:
        return f"{round(seconds / 3600):,} h"
    return f"{hours} h {rest} min" if rest else f"{hours} h"
