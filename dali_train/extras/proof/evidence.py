"""What a run directory says of itself, without the tensors: what `prove` compares."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dali_train.checkpoint.fingerprint import WeightDigests, parsed
from dali_train.checkpoint.format import CheckpointError, CheckpointManifest, RunValues
from dali_train.checkpoint.recipe import saved_recipe
from dali_train.checkpoint.run_directory import RunDirectory, checkpoint_paths
from dali_train.errors import ConfigError
from dali_train.runtime.status import METRICS, RunStatus, read_status


class Point(NamedTuple):
    """A place in the run directory that has the record of `step` steps."""

    step: int
    order: int  # what the order's sum of digests is compared with, the recipe's included
    draws: int
    source: str


@dataclass(kw_only=True)
class Evidence:
    """What a run directory says of itself, without the tensors."""

    run: RunDirectory
    end: int  # steps of the schedule, which no run passes
    status: RunStatus | None
    points: list[Point] = field(default_factory=list)  # by step
    checkpoints: dict[Path, RunValues] = field(default_factory=dict)  # oldest first
    recipe: dict[str, Any] = field(default_factory=dict)  # of the newest checkpoint
    damage: list[str] = field(default_factory=list)  # checkpoints that cannot be read
    beyond_the_end: list[str] = field(default_factory=list)  # where there are records of more steps

    @property
    def weights(self) -> dict[Path, WeightDigests]:
        """The digests in each checkpoint, oldest first."""
        return {path: values.weights for path, values in self.checkpoints.items()}

    @classmethod
    def of(cls, run: RunDirectory, end: int) -> "Evidence":
        """Read it. Raises ConfigError: the run has no record."""
        found = cls(run=run, end=end, status=read_status(run.directory))
        records = [(event["step"], event["record"], METRICS) for event in run.events if "record" in event]
        for path in checkpoint_paths(run.directory / "checkpoints"):
            try:
                manifest = CheckpointManifest.read(path)
                found.recipe = saved_recipe(manifest.values, path)
            except CheckpointError as error:
                found.damage.append(str(error))
                continue
            records.append((manifest.step, manifest.values.record, path.name))
            found.checkpoints[path] = manifest.values
        if found.status is not None:
            records.append((found.status.step, found.status.record, "status.json"))
        points = [Point(step, *parsed(record), source) for step, record, source in records if record]
        found.points = sorted((point for point in points if point.step <= end), key=lambda point: point.step)
        found.beyond_the_end = [point.source for point in points if point.step > end]
        if not found.points:
            raise ConfigError(
                f"{run.directory} has no record of its samples, as no step was logged and no checkpoint saved: train "
                "it further"
            )
        return found
