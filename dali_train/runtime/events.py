"""The lines of ``metrics.jsonl``, which the hooks write and reports and scripts read. Needs no torch."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dali_train.files import ForeignFileError, open_regular, read_json
from dali_train.text import duration, plural

STEP_PHASES = {
    "data": "data_wait_s",
    "forward": "forward_s",
    "backward": "backward_s",
    "all-reduce": "exchange_s",
    "optimizer": "optimizer_s",
    "logging": "logging_s",
}
"""What a step consists of, and the fields with the seconds of each; "logging" is reading the metrics and the hooks."""
OUTSIDE_PHASES = {"evaluation": "evaluation_s", "checkpoint": "checkpoint_s"}
"""Phases between steps."""

METRICS = "metrics.jsonl"
_LONGEST_LINE = 1_000_000  # bytes; a run's have about a thousand
Event = dict[str, Any]

_NEEDED = {
    "start": ("startup_s",),
    "train": ("loss", "step_s"),
    "eval": ("loss", "top1", "top5", "num_images"),
    "end": (),
}
"""Required fields of each event, besides step and epoch; other lines are ignored."""


def decisive(event: Event, name: str) -> float:
    """Return an evaluation's ``loss``, ``top1`` or ``top5``: of the moving average if the run has one (ema.decay),
    since the average is the result of such a run."""
    average = f"ema_{name}"
    return float(event[average if average in event else name])


def best_evaluation(events: Iterable[Event]) -> Event | None:
    """Return the evaluation with the best `decisive` top-1, the latest if several are equal, as checkpoints/best; None
    if there is none."""
    evaluations = (event for event in events if event["event"] == "eval" and not math.isnan(decisive(event, "top1")))
    return max(evaluations, key=lambda event: (decisive(event, "top1"), event["step"]), default=None)


@dataclass(frozen=True)
class Goodput:
    """The fraction of a run's time that was spent on steps that count, and the cost of restarts."""

    share: float  # seconds of these steps / seconds since the first start, including pauses between starts
    restarts: int
    lost_steps: int  # steps that were repeated, as far as they were logged
    away_s: float  # total time between the last line of a start and the first step of the next

    def describe(self) -> str:
        if not self.restarts:
            return f"{self.share:.1%}"
        return (
            f"{self.share:.1%}, started {self.restarts + 1} times: {plural(self.lost_steps, 'step')} repeated, "
            f"{duration(self.away_s)} without a step"
        )


def goodput(events: Sequence[Event]) -> Goodput | None:
    """Return a run's goodput; None if it was not recorded."""
    starts = [event for event in events if event["event"] == "start"]
    if not starts or not all("time" in event for event in (starts[0], events[-1])):
        return None
    seconds, step = 0.0, starts[0]["step"]
    for event in events:
        if event["event"] == "train":
            seconds, step = seconds + event["step_s"] * (event["step"] - step), event["step"]
    since = events[-1]["time"] - starts[0]["time"] + starts[0]["startup_s"]
    if not seconds or since <= 0:  # or the clock was set back
        return None
    return Goodput(
        share=seconds / since,
        restarts=len(starts) - 1,
        lost_steps=sum(int(event.get("lost_steps", 0)) for event in starts),
        away_s=sum(event.get("away_s", 0.0) for event in starts),
    )


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the object in a line of JSON.

    Raises:
        ForeignFileError: it holds anything else, or is torn.
    """
    return read_json(line, _LONGEST_LINE, name="the line", non_finite=True)


def read_events(path: Path, foreign: list[str] | None = None) -> list[Event]:
    """Return the events of a ``metrics.jsonl``; empty if there is no file. All other lines are skipped, so the fields
    of an event have the right types.

    Args:
        foreign: receives a sentence on each line that neither a run nor an unfinished write explains. Objects without a
            known ``"event"``, which other programs may add, are not mentioned.
    """
    events = []
    for number, line in json_lines(path):
        try:
            event = parse_line(line)
        except ForeignFileError as error:
            is_torn = not line.endswith(b"\n") and len(line) <= _LONGEST_LINE  # by a kill, or not complete yet
            reason = "" if is_torn else str(error).removeprefix("the line ")
        else:
            is_event, kind = _is_event(event), _kind(event)
            reason = f"a field of event {kind!r} is missing or wrong" if kind and not is_event else ""
            if is_event:
                events.append(event)
        if reason and foreign is not None:
            foreign.append(f"{path}, line {number}: {reason}; this line is ignored")
    return events


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers from 1; none if there is no file. A line that is
    longer than any that a run writes is truncated, so that it cannot be parsed."""
    if not path.is_file():
        return
    with open_regular(path) as file:
        number = 0
        while line := file.readline(_LONGEST_LINE + 1):
            number += 1
            rest = line
            while len(rest) > _LONGEST_LINE and not rest.endswith(b"\n"):
                rest = file.readline(_LONGEST_LINE + 1)
            if line.strip():
                yield number, line


def _kind(line: dict[str, Any]) -> str:
    """Return which event a line is of, empty for none."""
    kind = line.get("event")
    return kind if isinstance(kind, str) and kind in _NEEDED else ""


def _is_event(line: dict[str, Any]) -> bool:
    kind = _kind(line)
    if not kind or not isinstance(line.get("step"), int):
        return False
    if not all(_is_number(line.get(name)) for name in ("step", "epoch", *_NEEDED[kind])):
        return False
    if kind == "end":
        seconds = line.get("seconds")
        return (
            isinstance(seconds, dict)
            and all(map(_is_number, seconds.values()))
            and isinstance(line.get("error"), str | None)
            and _is_number(line.get("time", 0))
        )
    if not all(_is_number(value) for name, value in line.items() if name != "event"):
        return False
    return all(math.isfinite(value) for name, value in line.items() if name == "epoch" or name.endswith("_s"))


def _is_number(value: Any) -> bool:
    if isinstance(value, int):  # one that a float can be: the others fail where they are compared with one
        return not isinstance(value, bool) and abs(value) < 1 << 63
    return isinstance(value, float)
