"""The recipe of a run, everything that decides its result, so that a run never resumes with a changed one by accident.

Files are included by their content, so that a replaced file is noticed.
"""

import hashlib
import json
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from dali_train.checkpoint.format import CheckpointError, CheckpointManifest, RunValues
from dali_train.checkpoint.run_directory import MANIFEST, RunDirectory, checkpoint_paths, named_checkpoint
from dali_train.config import Config, SampleConfig
from dali_train.config.check import Mark, has_mark
from dali_train.config.config import SETTINGS
from dali_train.data.dataset.index import read_manifest
from dali_train.data.dataset.manifest import CONTENT, Manifest
from dali_train.data.dataset.sample_recipe import (
    changes_between,
    dataset_fields,
    in_recipe,
    sample_settings,
    value_in,
)
from dali_train.errors import ConfigError
from dali_train.files import sha256
from dali_train.training.pretrained import is_path
from dali_train.training.schedule import learning_rate

_SAMPLES = tuple(f"{section.name}." for section in fields(SampleConfig))  # `sample_settings` reads their files
_WEIGHTS = [  # may name files
    name
    for name, setting in SETTINGS.items()
    if has_mark(setting.hint, Mark.BY_CONTENT) and not name.startswith(_SAMPLES)
]
_DIRECTORY = "local-dir:"  # timm's name for one that `export --format timm` writes
_EVALUATION = [name for name in SETTINGS if name.startswith("data.eval_")]
_OF_RESULT = [*_EVALUATION, "hooks.stop_early", "run.eval_every_epochs", "run.f1_threshold", "run.max_steps"]


def recipe(config: Config, manifest: Manifest) -> dict[str, Any]:
    """Return everything that decides what is computed, as plain JSON values by field name. Raises DatasetError: see
    `sample_settings`."""
    return {**recipe_settings(config), **dataset_fields(manifest)}


def recipe_settings(config: Config) -> dict[str, Any]:
    """Return the config's part of a recipe."""
    others = json.loads(config.to_json())
    for section in fields(SampleConfig):
        del others[section.name]
    weights = {name: _content_of(name, attrgetter(name)(config)) for name in _WEIGHTS}
    settings = {**in_recipe(others), **weights, **sample_settings(config)}
    if config.model.head_scale is None and config.model.weights is None:
        settings["model.head_scale"] = 1.0  # which it then means
    return settings


def result_settings(config: Config) -> dict[str, Any]:
    """Return the config's part of what decides accuracies: its recipe, where it ends, and what is evaluated when."""
    return {**recipe_settings(config), **_only_of_result(config)}


def changes_of_result(run: RunDirectory, config: Config) -> list[str]:
    """Return how `config` and its dataset differ from those that gave a run its accuracies, as "NAME OLD -> NEW".

    Raises:
        ConfigError, CheckpointError: the run has no config.json or no checkpoint, or they are damaged.
        DatasetError: the dataset of `config` is not here.
    """
    paths = checkpoint_paths(run.directory / "checkpoints")
    if not paths:
        raise ConfigError(
            f"{run.directory} has finished, and no checkpoint is left that says with which dataset: use another "
            "directory"
        )
    path = paths[-1]
    saved = {**saved_recipe(CheckpointManifest.read(path).values, path), **_only_of_result(run.config)}
    current = {**result_settings(config), **dataset_fields(read_manifest(config.data))}
    keep_digests_of_lost_files(saved, current)
    return changes_between(saved, current)


def _only_of_result(config: Config) -> dict[str, Any]:
    values = config.flat()
    return {name: values[name] for name in _OF_RESULT if name in values}


def check_recipe(
    saved: dict[str, Any], current: dict[str, Any], *, source: str, remedy: str, accept: bool
) -> list[str]:
    """Return warnings about changes since the checkpoint that `saved` is from, if they are accepted.

    `current` gets the digests in `saved` of files that are gone.

    Args:
        source: what has the checkpoint, in messages.
        remedy: how to start anew.

    Raises:
        ConfigError: the recipe differs, which is not accepted; the message names the difference.
    """
    keep_digests_of_lost_files(saved, current)
    changes = changes_between(saved, current)
    if not changes:
        return []
    difference = f"the recipe differs from that of {source}: " + "; ".join(changes)
    if not accept:
        raise ConfigError(
            f"{difference}. Undo the change, {remedy} to start at step 0, or set run.accept_changed_recipe true to "
            "resume with the change"
        )
    return [f"{difference}; resuming with the change because run.accept_changed_recipe is set"]


def is_branch(saved: dict[str, Any], current: dict[str, Any], config: Config, *, step: int, num_images: int) -> bool:
    """Return whether two recipes differ in the schedule at most, and only from `step` on.

    Then the first `step` steps of a run are the same with both, bit for bit.

    Args:
        config: the settings of `current`.
    """
    schedule = [name for name in current if name == "run.epochs" or name.startswith("schedule.")]
    others = [{name: value for name, value in one.items() if name not in schedule} for one in (saved, current)]
    if changes_between(*others) or config.ema.power:  # which depends on the end of the run
        return False
    values = {name: value_in(saved, name) for name in schedule}
    before = config.replace({name: tuple(one) if isinstance(one, list) else one for name, one in values.items()})
    return all(learning_rate(before, at, num_images) == learning_rate(config, at, num_images) for at in range(step))


def keep_digests_of_lost_files(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Give `current` the digests in `saved` of weight files and directories that do not exist any more. What
    model.weights names has no effect after the start."""
    for name in _WEIGHTS:
        began_with, weights = str(saved.get(name)), str(current.get(name))
        is_local = is_path(weights) or weights.startswith(_DIRECTORY)
        if began_with.startswith(CONTENT) and is_local and not Path(weights.removeprefix(_DIRECTORY)).exists():
            current[name] = began_with


def saved_recipe(values: RunValues, source: object) -> dict[str, Any]:
    """Return the recipe in the values of a checkpoint. Raises CheckpointError: `source` has none."""
    if not values.recipe:
        raise CheckpointError(f"{source}: values.recipe is missing in {MANIFEST}, so this is not a run's checkpoint")
    return dict(values.recipe)


def _content_of(field: str, weights: str | None) -> str | None:
    """Return the digest of the file, directory, run or checkpoint `weights`; a timm name is returned as it is."""
    path = Path((weights or "").removeprefix(_DIRECTORY))
    files = [path]
    if weights is not None and path.is_dir():
        if weights.startswith(_DIRECTORY):
            files = sorted(path.iterdir())
        elif is_path(weights):
            files = [named_checkpoint(path, field) / MANIFEST]  # which has the digests of the tensors
    digests = [sha256(file) for file in files if file.is_file()]
    return CONTENT + hashlib.sha256("".join(digests).encode()).hexdigest()[:16] if digests else weights
