"""A run as its directory shows it."""

import csv
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dali_train.errors import ConfigError
from dali_train.text import printable
from dali_train.training.events import OUTSIDE_PHASES, STEP_PHASES, Event, parse_line, read_events


@dataclass(frozen=True, eq=False)
class Run:
    """Events of metrics.jsonl by kind, and the other files as far as they are there."""

    directory: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    events: tuple[Event, ...]

    @property
    def name(self) -> str:
        return printable(self.directory.resolve().name)

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
        if last["error"]:
            return f"failed: {last['error']}"
        totals = [event["total_steps"] for event in self.events if "total_steps" in event]
        return "ended" if not totals else "finished" if last["step"] >= totals[-1] else "stopped"

    def phase_seconds(self) -> dict[str, float]:
        """Of the complete run as far as it is logged, by field: the phases of steps, and what happens between steps."""
        totals = dict.fromkeys((*STEP_PHASES.values(), *OUTSIDE_PHASES.values()), 0.0)
        before = 0
        for event in sorted((e for e in self.events if e["event"] in ("start", "train")), key=lambda e: e["step"]):
            if event["event"] == "train":
                for phase in STEP_PHASES.values():
                    totals[phase] += event.get(phase, 0.0) * (event["step"] - before)
                for phase in OUTSIDE_PHASES.values():
                    totals[phase] += event.get(phase, 0.0)
            before = event["step"]
        return totals

    def median(self, field: str) -> float | None:
        """Over the logging intervals, the first of a process left out where there are others: caches fill in it."""
        intervals = [event for event in self.train if "first_step_s" not in event] or self.train
        values = [event[field] for event in intervals if field in event]
        return statistics.median(values) if values else None

    def is_small(self) -> bool:
        """Whether images have few pixels: those are better seen than smoothed away, and cost little to decode."""
        return int(self.config.get("data", {}).get("eval_size", 224)) <= 64

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
    events = read_events(path)
    if not events:
        raise ConfigError(f"{path} has no line yet: wait for the run's first hooks.log_every_steps steps")
    return Run(
        directory=directory,
        config=_read_object(directory / "config.json"),
        environment=_read_object(directory / "environment.json"),
        events=tuple(events),
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


def _read_object(path: Path) -> dict[str, Any]:
    return (parse_line(path.read_bytes()) or {}) if path.is_file() else {}
