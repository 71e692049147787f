"""A run as its directory tells it."""

import csv
import json
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dali_train.config import ConfigError

STEP_PHASES = ("data_wait_s", "forward_s", "backward_s", "exchange_s", "optimizer_s", "logging_s")
OUTSIDE_PHASES = ("evaluation_s", "checkpoint_s")

Event = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """Events of metrics.jsonl by kind, and the other files as far as they are there."""

    directory: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    events: tuple[Event, ...]
    lamb: tuple[Event, ...]

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @cached_property
    def train(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "train"]

    @cached_property
    def evaluations(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "eval"]

    @cached_property
    def resumed_at(self) -> list[float]:
        """Epochs at which the run was started again."""
        return [event["epoch"] for event in self.events if event["event"] == "start" and event["step"] > 0]

    @property
    def state(self) -> str:
        last = self.events[-1]
        if last["event"] != "end":
            return "running, or killed"
        return f"failed: {last['error']}" if last["error"] else "ended"

    def phase_seconds(self) -> dict[str, float]:
        """Of the whole run as far as it is logged; phases of the steps and, apart from them, evaluation and checkpoints."""
        totals = dict.fromkeys((*STEP_PHASES, *OUTSIDE_PHASES), 0.0)
        before = 0
        for event in sorted((e for e in self.events if e["event"] in ("start", "train")), key=lambda e: e["step"]):
            if event["event"] == "train":
                for phase in STEP_PHASES:
                    totals[phase] += event.get(phase, 0.0) * (event["step"] - before)
                for phase in OUTSIDE_PHASES:
                    totals[phase] += event.get(phase, 0.0)
            before = event["step"]
        return totals

    def median(self, field: str) -> float | None:
        """Over the logging intervals, the first of a process left out where there are others: caches fill in it."""
        intervals = [event for event in self.train if "first_step_s" not in event] or self.train
        values = [event[field] for event in intervals if field in event]
        return statistics.median(values) if values else None

    def best(self) -> Event | None:
        """The evaluation with the best top-1."""
        return max(self.evaluations, key=lambda event: event["top1"], default=None)

    def predictions(self) -> Path | None:
        """The newest evaluation's tables."""
        return max(self.directory.glob("predictions/step-*"), default=None)


def load_run(directory: Path) -> Run:
    """Read a run directory.

    Raises:
        ConfigError: there is no metrics.jsonl, or nothing in it.
    """
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{directory} has no metrics.jsonl: name the run.dir of a run that has started")
    events = _read_lines(path)
    if not events:
        raise ConfigError(f"{path} has no line yet: wait for the run's first hooks.log_every_steps steps")
    return Run(
        directory=directory,
        config=_read_object(directory / "config.json"),
        environment=_read_object(directory / "environment.json"),
        events=tuple(events),
        lamb=tuple(_read_lines(directory / "lamb.jsonl")),
    )


def read_table(path: Path) -> list[dict[str, str]]:
    """A CSV file's rows; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """``{"section.field": value}``."""
    return {f"{section}.{field}": value for section, fields in config.items() for field, value in fields.items()}


def differences(runs: list[Run]) -> list[tuple[str, list[Any]]]:
    """Settings in which the runs differ, with each run's value."""
    settings = [flat(run.config) for run in runs]
    names = dict.fromkeys(name for setting in settings for name in setting)
    rows = [(name, [setting.get(name) for setting in settings]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def _read_lines(path: Path) -> list[Event]:
    """Whole lines only: the last may still be under way, or torn by a full disk."""
    events = []
    if path.is_file():
        for text in path.read_text().splitlines():
            try:
                events.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return events


def _read_object(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}
