"""The runs of a report, and the prediction tables of a run's newest evaluation."""

import csv
import io
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.errors import ConfigError
from dali_train.files import read_limited
from dali_train.runtime.status import (
    METRICS,
    OUTSIDE_PHASES,
    STEP_PHASES,
    Event,
    best_evaluation,
    decisive,
    read_events,
)
from dali_train.text import printable

Row = TypeVar("Row")
_READ = ("config.json", "environment.json", METRICS, "samples.png", "predictions")
_DECISIVE = ("top1", "top5", "balanced_top1", "mean_ap", "micro_f1", "macro_f1", "sample_f1")
_LARGEST_METRICS, _METRICS_READ = 1 << 30, 20 << 20  # bytes; a line of a step has about a thousand
_LARGEST_TABLE = 50_000_000  # bytes; that of 21,841 classes has 2 MB


class Prediction(NamedTuple):
    image: int  # its number in the validation split
    file: str  # empty: not known
    truth: str
    predicted: str
    score: float  # of the predicted class, a probability


class ClassAccuracy(NamedTuple):
    name: str
    images: int
    accuracy: float  # a fraction, whatever `measure` it is; NaN without images
    weights: str  # which; empty: not known
    measure: str  # accuracy, or average precision with several labels an image


class ConfusedPair(NamedTuple):
    truth: str
    predicted: str
    images: int


class PredictionTables:
    """The files in ``predictions/step-NNNNNNNN/``, see extras/pictures/predictions.py; a missing file has
    no rows.

    Raises:
        ConfigError: a table is not what a run writes; the message names file and line.
    """

    def __init__(self, run_directory: Path) -> None:
        newest = max(run_directory.glob("predictions/step-*"), default=run_directory / "predictions")
        self.predictions = _read(newest / "predictions.csv", _prediction)
        self.classes = _read(
            newest / "classes.csv",
            lambda head, row: ClassAccuracy(row[0], _count(row[1]), float(row[2]), "".join(row[3:4]), head[2]),
        )
        self.pairs = _read(
            newest / "confused_pairs.csv", lambda head, row: ConfusedPair(row[0], row[1], _count(row[2]))
        )
        confusion = _read(newest / "confusion.csv", lambda head, row: (row[0], [*map(_count, row[1:])]))
        self.confusion_classes = [name for name, _ in confusion]
        # (truth, predicted)
        self.confusion: NDArray[np.int64] = np.array([counts for _, counts in confusion], dtype=np.int64)
        if confusion and self.confusion.shape != (len(confusion), len(confusion)):
            raise ConfigError(f"{newest / 'confusion.csv'} is not square, as a run writes it: move it away")


def _count(text: str) -> int:
    count = int(text)
    if not 0 <= count < 1 << 63:
        raise ValueError(f"{text[:20]} is not a count")
    return count


def _prediction(head: list[str], row: list[str]) -> Prediction:
    first = head.index("truth", 1, 3)  # before it the number and, but in older tables, the file
    truth, predicted = row[first : first + 2]
    score = head.index("score", first) if "score" in head[first:] else head.index(f"score {predicted}", first)
    return Prediction(_count(row[0]), row[1] if first == 2 else "", truth, predicted, float(row[score]))


def _read(path: Path, parse: Callable[[list[str], list[str]], Row]) -> list[Row]:
    if not path.is_file():
        return []
    head: list[str] = []
    rows: list[Row] = []
    try:
        text = read_limited(path, _LARGEST_TABLE).decode()
        for row in csv.reader(io.StringIO(text, newline=""), strict=True):
            if not head:
                head = row
            elif len(row) != len(head):
                raise ValueError(f"{len(row)} of {len(head)} columns")
            else:
                rows.append(parse(head, row))
    except (OSError, ValueError, IndexError, csv.Error) as error:
        raise ConfigError(f"{path}, row {len(rows) + 1}, is not what a run writes ({error}): move it away") from None
    return rows


@dataclass(frozen=True, eq=False)
class ReportedRun(RunDirectory):
    """A run directory, with values that the report derives from it.

    Args:
        label: its name in the report; empty: the directory's own name.
        thins: of very many steps read only some, evenly spread, as many as charts can show.
    """

    label: str = ""
    thins: bool = False

    @property
    def name(self) -> str:
        return printable(self.label or self.directory.resolve().name)

    def __post_init__(self) -> None:
        """Raises ConfigError: it is no run, or has a link to something else, which a report would show to others."""
        super().__post_init__()
        root = self.directory.resolve()
        for path in (*(self.directory / name for name in _READ), *(self.directory / "predictions").rglob("*")):
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise ConfigError(
                    f"{path} is a link to {path.readlink()}, outside of the run directory: a report, which may be "
                    "passed on, does not show that; put the file itself there, or remove the link"
                )

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events of metrics.jsonl, see `thins`.

        Raises:
            ConfigError: the file cannot be read, or is larger than that of any run.
        """
        path = self.directory / METRICS
        try:
            size = path.stat().st_size if path.exists() else 0
            if size > _LARGEST_METRICS:
                raise ConfigError(f"{path} has {size:,} bytes, more than {_LARGEST_METRICS:,}: no run writes as many")
            return tuple(read_events(path, self.foreign_lines, every=1 + size // _METRICS_READ * self.thins))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None

    @cached_property
    def train(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "train"]

    @cached_property
    def evaluations(self) -> list[Event]:
        """Evaluations with `decisive` accuracies; with a moving average of the weights also its top-1 without it."""
        evaluations = []
        for event in self.events:
            if event["event"] == "eval":
                without = {"top1_without_ema": event["top1"]} if "ema_top1" in event else {}
                names = [name for name in _DECISIVE if name in event]
                accuracies = {f"decisive_{name}": decisive(event, name) for name in names}
                evaluations.append(event | accuracies | without)
        return evaluations

    @cached_property
    def tables(self) -> PredictionTables:
        return PredictionTables(self.directory)

    @cached_property
    def resumed(self) -> list[Event]:
        """The events at which the run was started again."""
        return [event for event in self.events if event["event"] == "start" and event["step"] > 0]

    @property
    def best_top1(self) -> float | None:
        """The top-1 of the best checkpoint, see `best_evaluation`."""
        best = best_evaluation(self.events, self.config.run.best_by)
        return None if best is None else decisive(best, "top1")

    @property
    def state(self) -> str:
        last = self.events[-1]
        if last["event"] != "end":
            return "running, or killed"
        if last["error"]:
            return f"failed: {last['error']}"
        return "finished" if last.get("finished") else "stopped"

    @cached_property
    def _phases(self) -> list[tuple[int, dict[str, float]]]:
        """The logging intervals in order: the step at which each ends, and its seconds by field."""
        intervals = []
        before = 0
        for event in sorted((e for e in self.events if e["event"] in ("start", "train")), key=lambda e: e["step"]):
            if event["event"] == "train":
                steps = {phase: event.get(phase, 0.0) * (event["step"] - before) for phase in STEP_PHASES.values()}
                outside = {phase: event.get(phase, 0.0) for phase in OUTSIDE_PHASES.values()}
                intervals.append((event["step"], steps | outside))
            before = event["step"]
        return intervals

    def phase_seconds(self) -> dict[str, float]:
        """Return the logged seconds of the whole run by field: the phases of steps, and those between steps."""
        fields = (*STEP_PHASES.values(), *OUTSIDE_PHASES.values())
        return {field: sum(seconds[field] for _, seconds in self._phases) for field in fields}

    @cached_property
    def _times(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        ends = np.cumsum([0.0, *(sum(seconds.values()) for _, seconds in self._phases)])
        return np.array([0, *(step for step, _ in self._phases)], dtype=np.float64), ends

    def seconds_at(self, step: int) -> float:
        """Return how long the run had trained, evaluated and saved by `step`, as far as it was logged."""
        return float(np.interp(step, *self._times))

    def median(self, field: str) -> float | None:
        """Return the median over the logging intervals, without the first of each process, in which caches fill, unless
        there are no others."""
        intervals = [event for event in self.train if "first_step_s" not in event] or self.train
        values = [event[field] for event in intervals if field in event]
        return statistics.median(values) if values else None

    def is_small(self) -> bool:
        """Return whether images have few pixels: they are enlarged without smoothing, and cheap to decode."""
        return self.config.data.eval_size <= 64


def load_run(directory: Path, label: str = "") -> ReportedRun:
    """Read a run directory.

    Raises:
        ConfigError: it is not a run directory, or metrics.jsonl has no line yet, or none of a run.
    """
    run = ReportedRun(directory, label, thins=True)
    if not run.events:
        path = directory / METRICS
        if run.foreign_lines or (path.exists() and not path.is_file()):
            reason = run.foreign_lines[0] if run.foreign_lines else f"{path} is not a regular file"
            raise ConfigError(f"{path} is not what a run writes ({reason}): put the run's own file there")
        raise ConfigError(f"{path} has no line yet: wait for the run's first hooks.log_every_steps steps")
    return run


def find_runs(directories: Sequence[Path]) -> dict[str, Path]:
    """Return the run directories among `directories` and in the folders there, by unique printable names.

    Raises:
        ConfigError: one of `directories` is not a run and contains none.
    """
    runs: dict[Path, Path] = {}  # each once, whichever links lead to it
    for directory in directories:
        for run in sorted(_runs_in(directory)) or [RunDirectory(directory).directory]:
            runs[run.resolve()] = run
    names = [printable(run.name) for run in runs]
    if len(set(names)) < len(names):
        common = os.path.commonpath(runs)
        names = [printable(str(run.relative_to(common))) for run in runs]
    counts = Counter(names)
    for number, name in enumerate(names):
        if counts[name] > 1:  # the paths differ in what is not printable
            names[number] = f"{name} ({number + 1})"
    return dict(zip(names, runs.values(), strict=True))


def _runs_in(directory: Path, depth: int = 3) -> Iterator[Path]:
    """Yield `directory` if it is a run, otherwise the runs in the folders below; runs inside runs are ignored."""
    if (directory / "config.json").exists():
        yield directory
    elif depth and directory.is_dir():
        with suppress(PermissionError):
            for folder in directory.iterdir():
                yield from _runs_in(folder, depth - 1)


def by_dataset(runs: Sequence[ReportedRun]) -> dict[str, list[ReportedRun]]:
    """Return the runs by data.root, since accuracies on different images cannot be compared. In each group the best
    top-1 comes first, and runs without an evaluation last."""
    ranked = sorted(runs, key=lambda run: -1.0 if run.best_top1 is None else run.best_top1, reverse=True)
    groups: dict[str, list[ReportedRun]] = {}
    for run in ranked:
        groups.setdefault(run.config.data.root, []).append(run)
    return dict(sorted(groups.items()))


def differences(runs: Sequence[RunDirectory]) -> list[tuple[str, list[Any]]]:
    """Return the settings in which the runs differ, except their directories, each with every run's value."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "run.dir")
    rows = [(name, [run.settings.get(name) for run in runs]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]
