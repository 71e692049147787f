"""The recipe of a run, everything that decides its result, so that a run never resumes with a changed one by accident.

Files are included by their content, so that a replaced file is noticed.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from dali_train.checkpoint.format import CheckpointError, RunValues
from dali_train.checkpoint.run_directory import MANIFEST, named_checkpoint
from dali_train.config import Config
from dali_train.config.check import as_typed, load_row
from dali_train.config.config import SETTINGS
from dali_train.data.dataset.manifest import CONTENT, Manifest, dataset_content
from dali_train.errors import ConfigError
from dali_train.files import sha256
from dali_train.text import plural, printable, shortened
from dali_train.training.pretrained import is_path
from dali_train.training.schedule import learning_rate

MIXED_RECIPE = "dali_train.extras.mixture.dataset:mixed_recipe"
_WEIGHTS = ("model.weights", "loss.teacher", "loss.teacher_weights")  # may name files
_DIRECTORY = "local-dir:"  # timm's name for one that `export --format timm` writes
_NAMES = "class_names"  # recipes of earlier versions lack it
_SETTINGS_OF = {"data.mean": "data.normalise (mean)", "data.std": "data.normalise (std)"}


def recipe(config: Config, manifest: Manifest) -> dict[str, Any]:
    """Return everything that decides what is computed, as plain JSON values by field name.

    The dataset is included by the checksums in ``dataset.json``; those of the index cover labels, sizes and
    positions. For a shard that was indexed without reading all of it, only these and its size are known.
    """
    dataset = {"dataset": dataset_content(manifest), _NAMES: names_content(manifest.class_names)}
    return {**recipe_settings(config), **dataset}


def names_content(names: Sequence[str]) -> str:
    """Return a digest of the class names, with the first of them."""
    digest = hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:16]
    return f"{shortened(printable(', '.join(names[:4])), 40)} ({plural(len(names), 'name')}, {CONTENT}{digest})"


def recipe_settings(config: Config) -> dict[str, Any]:
    """Return the config's part of a recipe."""
    sections = json.loads(config.to_json())
    fields = {
        name: sections[section][field]
        for name, (section, _, field) in ((name, name.partition(".")) for name in SETTINGS)
        if SETTINGS[name].in_recipe
    }
    if config.data.shuffle != "block":  # otherwise they have no effect
        del fields["data.block_images"], fields["data.window_blocks"]
    fields |= {name: _content_of(name, fields[name]) for name in _WEIGHTS}
    if config.data.exclude is not None and Path(config.data.exclude).is_file():
        fields["data.exclude"] = CONTENT + sha256(Path(config.data.exclude))[:16]
    if config.data.mix:
        fields |= load_row(MIXED_RECIPE, "data.mix")(config.data)
    del fields["data.normalise"]  # as numbers, so that it does not matter how they were spelled
    return fields | {"data.mean": list(config.data.mean), "data.std": list(config.data.std)}


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
    values = {name: _value(saved, name) for name in schedule}
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
    saved = dict(values.recipe)
    if _NAMES not in saved and values.class_names:
        saved[_NAMES] = names_content(values.class_names)
    return saved


def changes_between(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return the differences of two recipes, as "NAME OLD -> NEW".

    A setting that one of them lacks has its default there, because a checkpoint may be older than the setting. Settings
    that exist but are no longer part of the recipe are ignored; one that was removed counts as a change.
    """
    names = sorted(name for name in {*saved, *current} if name not in SETTINGS or SETTINGS[name].in_recipe)
    if _NAMES in names and not (_NAMES in saved and _NAMES in current):
        names.remove(_NAMES)
    values = [(name, _value(saved, name), _value(current, name)) for name in names]
    return [
        f"{_SETTINGS_OF.get(name, name)} {as_typed(old)} -> {as_typed(new)}" for name, old, new in values if old != new
    ]


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


def _value(recipe: dict[str, Any], name: str) -> Any:
    default = SETTINGS[name].default if name in SETTINGS else MISSING
    value = recipe.get(name, "absent" if default is MISSING else default)
    return list(value) if isinstance(value, tuple) else value
