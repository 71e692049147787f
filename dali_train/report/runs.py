"""A run as the report shows it."""

import statistics
from functools import cached_property
from pathlib import Path
from typing import Any

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.errors import ConfigError
from dali_train.report.tables import PredictionTables
from dali_train.text import printable
from dali_train.training.events import OUTSIDE_PHASES, STEP_PHASES, Event, decisive


class ReportedRun(RunDirectory):
    """A run directory, with what the report works out from it."""

    @property
    def name(self) -> str:
        return printable(self.directory.resolve().name)

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
                accuracies = {f"decisive_{name}": decisive(event, name) for name in ("top1", "top5")}
                evaluations.append(event | accuracies | without)
        return evaluations

    def series(self, key: str) -> list[Event]:
        """Return the events that have ``train/FIELD`` or ``eval/FIELD``."""
        kind, _, field = key.partition("/")
        return [event for event in (self.train if kind == "train" else self.evaluations) if field in event]

    @cached_property
    def tables(self) -> PredictionTables:
        return PredictionTables(self.directory)

    @property
    def has_ema(self) -> bool:
        """True if a moving average of the weights was evaluated too."""
        return any("ema_top1" in event for event in self.evaluations)

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
        """Return the seconds of the complete run as far as it is logged, by field: the phases of steps, and what is
        between steps."""
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
        """Return the median over the logging intervals, the first of a process left out where there are others: caches
        fill in it."""
        intervals = [event for event in self.train if "first_step_s" not in event] or self.train
        values = [event[field] for event in intervals if field in event]
        return statistics.median(values) if values else None

    def is_small(self) -> bool:
        """Return True if images have few pixels: better seen than smoothed away, and cheap to decode."""
        return self.config.data.eval_size <= 64


def load_run(directory: Path) -> ReportedRun:
    """Read a run directory.

    Raises:
        ConfigError: it is none, or metrics.jsonl has no line yet.
    """
    run = ReportedRun(directory)
    if not run.events:
        path = directory / "metrics.jsonl"
        raise ConfigError(f"{path} has no line yet: wait for the run's first hooks.log_every_steps steps")
    return run


def differences(runs: list[ReportedRun]) -> list[tuple[str, list[Any]]]:
    """Return the settings in which the runs differ, each with every run's value."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = [(name, [run.settings.get(name) for run in runs]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]
