"""What a run says of itself: the lines of ``metrics.jsonl``, and how its last start ended, in ``status.json``.

Hooks write the former and reports read them. The latter is for scripts: torchrun hides the exit status of its workers,
and a kill leaves none. Nothing here needs torch, so that a batch script gets its answer at once.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dali_train.config.check import CountOr0, Fraction, from_json
from dali_train.errors import ConfigError, UserError
from dali_train.files import ForeignFileError, open_regular, read_json, write_atomically
from dali_train.runtime.lock import find_holder
from dali_train.text import aligned, duration, plural

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
_TRAIN = b'"train"'
_HEAD = 30  # the first bytes of a line, in which a step's has _TRAIN
_LONGEST_LINE = 1_000_000  # bytes; a run's have about a thousand
Event = dict[str, Any]

TEXTS = ("command", "record", "machine")
"""Fields of `start` and `train` events that are text; on the last two see checkpoint/fingerprint.py."""

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


def score(event: Event, best_by: str) -> float:
    """Return the number by which run.best_by ranks an evaluation: the best one has the largest, and it is finite."""
    value = decisive(event, best_by.replace("-", "_"))
    if best_by == "loss":
        value = -value
    return value if math.isfinite(value) else -sys.float_info.max


def best_evaluation(events: Iterable[Event], best_by: str = "top1") -> Event | None:
    """Return the evaluation with the best `score`, the latest if several are equal, as checkpoints/best; None if there
    is none."""
    evaluations = (event for event in events if event["event"] == "eval" and not math.isnan(decisive(event, "top1")))
    return max(evaluations, key=lambda event: (score(event, best_by), event["step"]), default=None)


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
    seconds = 0.0
    step = starts[0]["step"]
    for event in events:
        if event["event"] == "train":
            seconds = seconds + event["step_s"] * (event["step"] - step)
            step = event["step"]
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


def read_events(path: Path, foreign: list[str] | None = None, every: int = 1) -> list[Event]:
    """Return the events of a ``metrics.jsonl``; empty if there is no file. All other lines are skipped, so the fields
    of an event have the right types.

    Args:
        every: parse only each `every`-th line of a step; all other lines are parsed.
        foreign: receives a sentence on each line that neither a run nor an unfinished write explains. Objects without a
            known ``"event"``, which other programs may add, are not mentioned.
    """
    events = []
    num_steps = 0
    for number, line in json_lines(path):
        if every > 1 and _TRAIN in line[:_HEAD]:
            num_steps += 1
            if num_steps % every:
                continue
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
    step = line.get("step")
    if not kind or not isinstance(step, int) or step < 0:
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
    if not all(_is_number(value) for name, value in line.items() if name not in ("event", *TEXTS)):
        return False
    if not all(isinstance(line.get(name, ""), str) for name in TEXTS):
        return False
    if "record" in line and not re.fullmatch("[0-9a-f]{64}", line["record"]):
        return False
    return all(math.isfinite(value) for name, value in line.items() if name == "epoch" or name.endswith("_s"))


def _is_number(value: Any) -> bool:
    if isinstance(value, int):  # one that a float can be: the others fail where they are compared with one
        return not isinstance(value, bool) and abs(value) < 1 << 63
    return isinstance(value, float)


# Exit statuses; 75 is EX_TEMPFAIL of sysexits.h. Anything else is a failure.
FINISHED = 0
MISTAKE = 2
START_AGAIN = 75
WRONG_RESULT = 76

STOPPED_BY_TERM = "signal TERM"
_FILE = "status.json"
_LARGEST_FILE = 100_000


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The progress and the end of the last start."""

    state: Literal["running", "stopped", "finished", "failed", "killed"]  # killed is never written, only inferred
    step: CountOr0  # optimizer steps done
    reason: str = ""  # why it was stopped or failed
    total_steps: CountOr0 | None = None  # at which the run ends
    best_top1: Fraction | None = None  # of the evaluations so far, a fraction
    ema: bool = False  # best_top1 is that of the moving average of the weights
    lock_holder: str = ""  # which process trained: `Holder.describe`
    record: str = ""  # of these steps, see checkpoint/fingerprint.py; empty where it is not known
    weights: str = ""  # digest of the resulting weights after these steps, once they are saved
    evaluations: str = ""  # digest of all evaluations, see checkpoint/fingerprint.py; empty where none has one

    def write(self, run_directory: Path) -> None:
        write_atomically(run_directory / _FILE, (json.dumps(asdict(self), indent=1) + "\n").encode())


def read_status(run_directory: Path) -> RunStatus | None:
    """Read the status of a run; None if no start has begun training. A status of running is checked against run.lock.

    Raises:
        ConfigError: status.json is not what a run writes.
    """
    path = run_directory / _FILE
    try:
        status = from_json(RunStatus, read_json(path, _LARGEST_FILE))
    except FileNotFoundError:
        return None
    except UserError as error:
        raise ConfigError(
            f"{path} is not the status of a run ({error}): move it away, checkpoints do not need it"
        ) from error
    if status.state == "running" and find_holder(run_directory) is None:
        return replace(status, state="killed", reason="it ended without a message, as after SIGKILL or a power failure")
    return status


def describe(run_directory: Path) -> str:
    """Return the line that `dali-train status` prints of one run. Raises ConfigError: see `read_status`."""
    status = read_status(run_directory)
    newest = newest_step(run_directory)
    if status is None:
        holder = find_holder(run_directory)
        state = f"starting ({holder.describe()})" if holder is not None else "not started"
        return f"{run_directory}: {state}, {_newest(newest)}"
    state = status.state + (f" ({status.reason})" if status.reason else "")
    best = (
        f", best top-1{' of the EMA' if status.ema else ''} {status.best_top1:.2%}"
        if status.best_top1 is not None
        else ""
    )
    holder_text = f", last trained by {status.lock_holder}" if status.lock_holder else ""
    progress = _progress(status, newest)
    with suppress(OSError):  # then without it
        if (found := goodput(read_events(run_directory / METRICS))) is not None:
            holder_text += f", goodput {found.describe()}"
    return f"{run_directory}: {state}, step {progress}{best}, {_newest(newest)}{holder_text}"


def describe_all(run_directories: Sequence[Path]) -> tuple[list[str], int]:
    """Return the table that `dali-train status` prints for several runs, and the exit status: 0 if all are finished, 75
    if some should be started again, 1 otherwise."""
    rows = [["run", "state", "step", "best top-1", "checkpoint", "reason, or process"]]
    statuses = set()
    for directory in run_directories:
        try:
            status, newest = read_status(directory), newest_step(directory)
        except ConfigError as error:
            rows.append([str(directory), "not readable", "", "", "", str(error)])
            statuses.add(1)
            continue
        statuses.add(exit_status(status))
        holder = find_holder(directory) if status is None else None
        if status is None:
            note = holder.describe() if holder is not None else ""
            cells = ["not started" if holder is None else "starting", "", "", _newest(newest, ""), note]
        else:
            best = "-" if status.best_top1 is None else f"{status.best_top1:.2%}{' (EMA)' if status.ema else ''}"
            cells = [
                status.state,
                _progress(status, newest),
                best,
                _newest(newest, ""),
                status.reason or status.lock_holder,
            ]
        rows.append([str(directory), *cells])
    return aligned(rows), 1 if 1 in statuses else max(statuses)


def _newest(step: int | None, words: str = "newest checkpoint ") -> str:
    return "no checkpoint" if step is None else f"{words}{step}"


def _progress(status: RunStatus, newest: int | None) -> str:
    step = max(status.step, newest or 0) if status.state in ("running", "killed") else status.step
    return f"{step}{f' of {status.total_steps}' if status.total_steps is not None else ''}"


def exit_status(status: RunStatus | None) -> int:
    """Return the exit status for a run: 0 finished, 75 should be started again, 1 failed, killed or still running."""
    if status is None:
        return 1
    return {"finished": FINISHED, "stopped": START_AGAIN}.get(status.state, 1)


def stopped_before_restart(run_directory: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun has restarted this process after a stop on request that was meant to last.

    torchrun treats exit status 75 of its workers as a failure and restarts them. A stop by SIGTERM is different:
    torchrun itself stops workers by it, to continue with another number of them.
    """
    status = read_status(run_directory)
    restarted = environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
    return restarted and status is not None and status.state == "stopped" and status.reason != STOPPED_BY_TERM


def newest_step(run_directory: Path) -> int | None:
    """Return the step of the newest checkpoint, or None, without reading its content."""
    paths = [path for path in (run_directory / "checkpoints").glob("step-*") if path.is_dir() and not path.is_symlink()]
    steps = [path.name.removeprefix("step-") for path in paths]
    return max((int(step) for step in steps if step.isdecimal()), default=None)
