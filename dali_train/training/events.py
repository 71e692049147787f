"""The lines of ``metrics.jsonl``, which the hooks write and reports and scripts read. Needs no torch."""

import json
import math
from pathlib import Path
from typing import Any

STEP_PHASES = {
    "data": "data_wait_s",
    "forward": "forward_s",
    "backward": "backward_s",
    "exchange": "exchange_s",
    "optimizer": "optimizer_s",
    "logging": "logging_s",
}
"""What a step consists of, and the fields with the seconds of each; "logging" is reading the metrics and the hooks."""
OUTSIDE_PHASES = {"evaluation": "evaluation_s", "checkpoint": "checkpoint_s"}
"""What happens between steps."""

Event = dict[str, Any]

_NEEDED = {
    "start": ("startup_s",),
    "train": ("loss", "step_s"),
    "eval": ("loss", "top1", "top5", "num_images"),
    "end": (),
}
"""Fields, apart from step and epoch, without which a line of that kind is not ours."""


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line of JSON; None if it holds anything but an object, or is torn."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_events(path: Path) -> list[Event]:
    """The events of a ``metrics.jsonl``, none where there is no file. Lines that no run wrote, and those that a kill or
    a full disk has torn, are skipped: whoever reads an event finds numbers where numbers belong."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [event for line in file if (event := parse_line(line)) is not None and _is_event(event)]


def _is_event(line: dict[str, Any]) -> bool:
    kind = line.get("event")
    if not isinstance(kind, str) or kind not in _NEEDED or not isinstance(line.get("step"), int):
        return False
    if not all(_is_number(line.get(name)) for name in ("step", "epoch", *_NEEDED[kind])):
        return False
    if kind == "end":
        seconds = line.get("seconds")
        return (
            isinstance(seconds, dict)
            and all(map(_is_number, seconds.values()))
            and isinstance(line.get("error"), str | None)
        )
    return math.isfinite(line["epoch"]) and all(_is_number(value) for name, value in line.items() if name != "event")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
