"""Pieces of HTML. Everything that comes from files goes through `escape`."""

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dali_train.files import read_limited
from dali_train.text import printable

_LARGEST_PICTURE = 20_000_000  # bytes; a run's have at most 3 MB


class Markup(str):
    """Text that is HTML already, and is not escaped again."""

    __slots__ = ()


def escape(value: Any, keep: str = "") -> str:
    """Escape `value` for HTML, between tags or in quotes, and remove control characters other than `keep`."""
    return value if isinstance(value, Markup) else html.escape(printable(str(value), keep=keep))


def table(heads: Sequence[Any], rows: Iterable[Sequence[Any]], kind: str = "") -> str:
    """Return a table whose first column is a head, and which scrolls sideways if it is too wide; empty without rows."""
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, *values in rows
    )
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    if not body:
        return ""
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def folded(heading: str, content: str, *, is_open: bool = False) -> str:
    """Return `content` below a heading that opens and closes it; empty without content."""
    if not content:
        return ""
    return f"<details{' open' if is_open else ''}><summary>{escape(heading)}</summary>{content}</details>"


def live(identity: str, content: str) -> str:
    """Return a part that page.js updates if the page is served during the run."""
    return f'<div id="{identity}" data-live>{content}</div>'


def picture(path: Path, description: str, kind: str = "") -> str:
    """Return a PNG file as part of the page; empty if it is missing, unreadable or too large."""
    try:
        content = base64.b64encode(read_limited(path, _LARGEST_PICTURE)).decode()
    except OSError:
        return ""
    return f'<img class="{kind}" src="data:image/png;base64,{content}" alt="{escape(description)}">'
