"""``dali-train diff``: why two runs differ, from settings through samples to losses.

A run need not record its samples, because they are a function of its settings (the invariant). They are recomputed here
for both runs, and compared in training order.
"""

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dali_train.checkpoint.fingerprint import parsed, samples_of
from dali_train.config import Config
from dali_train.config.check import as_typed
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.extras.report.runs import ReportedRun, differences
from dali_train.text import printable

# The order matters: earlier differences explain later ones.
_FIRST = ("positions", "images", "labels")


def diff(first: Path, second: Path, *, steps: int) -> bool:
    """Print what differs between two runs.

    Args:
        steps: number of optimizer steps whose samples are compared; fewer if a run is shorter.

    Returns:
        Whether settings, samples, records and losses are the same; the machines may differ.

    Raises:
        ConfigError, DatasetError: there is no such run, or its dataset is gone.
    """
    runs = ReportedRun(first), ReportedRun(second)
    findings = [f"{name}: {' | '.join(map(as_typed, values))}" for name, values in differences(runs)]
    versions = [run.environment.get("draws", 1) for run in runs]
    if versions[0] != versions[1]:  # the samples below are those of this version
        findings.append(f"version of the draws: {versions[0]} | {versions[1]}")
    print("settings")
    for finding in findings or ["the same"]:
        print(f"  {printable(finding)}")
    print(f"machine\n  {printable(compare_machines(*runs)) or 'the same'}")
    samples = compare_samples(*(run.config for run in runs), steps=steps)
    print(f"samples\n  {printable(samples) or 'the same'}")
    records = compare_records(*runs)
    print(f"records\n  {records or 'the same samples between all lines that both logged'}")
    losses = compare_losses(*runs)
    print(f"losses\n  {losses or 'the same in every line that both logged'}")
    return not (findings or samples or records or losses)


def compare_machines(first: ReportedRun, second: ReportedRun) -> str:
    """Return what the machines of their last starts do not have in common: versions, processors, threads, ranks; empty
    if nothing."""
    machines = [[event["machine"] for event in run.events if "machine" in event] for run in (first, second)]
    if not all(machines):
        return "not recorded"
    one, other = (texts[-1].split(", ") for texts in machines)
    sides = [[part for part in one if part not in other], [part for part in other if part not in one]]
    return " | ".join(", ".join(side) or "none" for side in sides) if any(sides) else ""


def compare_samples(first: Config, second: Config, *, steps: int) -> str:
    """Return the first step, micro-batch, image and draw that differ; empty if there is none.

    Raises:
        ConfigError: a run's samples do not follow from its settings.
    """
    splits, sources = zip(*map(samples_of, (first, second)), strict=True)
    lengths = [
        config.steps(config.run.epochs, split.num_images) for config, split in zip((first, second), splits, strict=True)
    ]
    num_per_step = [source.num_per_step for source in sources]
    for step in range(min(steps, *lengths)):
        for k in range(min(num_per_step)):
            if difference := _difference(*(source(step, k) for source in sources)):
                return f"first difference: step {step}, micro-batch {k}, {difference}"
        if num_per_step[0] != num_per_step[1]:
            return f"first difference: step {step} has {num_per_step[0]} | {num_per_step[1]} micro-batches"
    return ""


def compare_records(first: ReportedRun, second: ReportedRun) -> str:
    """Return the first steps in which the runs had other samples or draws, by their own records; empty if there are
    none. Unlike `compare_samples` this needs no dataset, and says what they had, not what they should have had."""
    one, other = (
        {event["step"]: parsed(event["record"]) for event in run.events if "record" in event} for run in (first, second)
    )
    for before, step in pairwise(sorted(one.keys() & other.keys())):
        for part, name in enumerate(("order", "draws")):  # the recipe's digest is in all, so not in the differences
            if (one[step][part] - one[before][part] - other[step][part] + other[before][part]) % (1 << 128):
                return f"first difference: {name} of steps {before + 1} to {step}"
    return ""


def compare_losses(first: ReportedRun, second: ReportedRun) -> str:
    """Return the first logged loss that differs and the largest difference; empty if there is none."""
    one, other = ({event["step"]: event["loss"] for event in run.train} for run in (first, second))
    common = sorted(one.keys() & other.keys())
    if not common:
        return "no step has a logged loss in both runs"
    different = [step for step in common if not np.array_equal(one[step], other[step], equal_nan=True)]
    if not different:
        return ""
    relative = {step: abs(one[step] - other[step]) / max(abs(one[step]), 1e-300) for step in different}
    largest = max(relative, key=lambda step: relative[step])
    step = different[0]
    return (
        f"first difference: step {step}, {one[step]!r} | {other[step]!r} ({relative[step]:.1e} relative); largest at "
        f"step {largest}, {relative[largest]:.1e}; {len(different)} of {len(common)} lines differ"
    )


def _difference(first: MicroBatch, second: MicroBatch) -> str:
    """Describe the first image and draw that differ; empty if all are equal."""
    fields = [field.name for field in dataclasses.fields(first) if field.name not in ("step", "k")]
    for name in (*_FIRST, *(name for name in fields if name not in _FIRST)):
        difference = _first_row(name, getattr(first, name), getattr(second, name))
        if difference:
            row, message = difference
            where = f"position {row} (image {first.images[row]} | {second.images[row]}), " if row is not None else ""
            return where + message
    return ""


def _first_row(name: str, first_value: Any, second_value: Any) -> tuple[int | None, str] | None:
    """Return (row, what differs there), row None for what is not an array over the images; None if they are equal."""
    if not isinstance(first_value, np.ndarray) or not isinstance(second_value, np.ndarray):
        return (
            None
            if first_value is second_value or first_value == second_value
            else (None, f"{name}: {first_value} | {second_value}")
        )
    if first_value.shape != second_value.shape:
        return None, f"{name}: {len(first_value)} | {len(second_value)} images"
    if not first_value.size:  # such as the boxes of CutMix where none is drawn
        return None
    rows = np.flatnonzero((first_value != second_value).reshape(len(first_value), -1).any(axis=1))
    return (int(rows[0]), f"{name}: {first_value[rows[0]]} | {second_value[rows[0]]}") if len(rows) else None
