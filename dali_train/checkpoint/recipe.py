"""What a config says about the training, as a fingerprint: resuming with another recipe is a decision and not an
accident."""

import hashlib
import json
from dataclasses import MISSING
from typing import Any

import numpy as np

from dali_train.checkpoint.load import Checkpoint
from dali_train.config import Config
from dali_train.config.config import SETTINGS
from dali_train.data.dataset.index import Split
from dali_train.errors import ConfigError


def recipe(config: Config, split: Split) -> dict[str, Any]:
    """Everything that decides what is computed, as plain JSON values by field name: the config's part and the
    dataset."""
    # Sizes and labels in the order of the index: what crops, targets and sample order follow from. Where the shards lie
    # and how they are cut does not matter.
    columns = hashlib.sha256()
    for name in ("label", "height", "width"):
        columns.update(np.ascontiguousarray(split.rows[name]).data)
    return {**recipe_settings(config), "dataset": f"{len(split)} images, labels and sizes {columns.hexdigest()[:16]}"}


def recipe_settings(config: Config) -> dict[str, Any]:
    """The config's part of a recipe."""
    sections = json.loads(config.to_json())
    fields = {
        name: sections[section][field]
        for name, (section, _, field) in ((name, name.partition(".")) for name in SETTINGS)
        if SETTINGS[name].in_recipe
    }
    if config.data.shuffle != "block":  # then they decide nothing
        del fields["data.block_images"], fields["data.window_blocks"]
    # As numbers, so that it does not matter how they were spelled; checkpoints have always had them so.
    del fields["data.normalise"]
    return fields | {"data.mean": list(config.data.mean), "data.std": list(config.data.std)}


def check_recipe(checkpoint: Checkpoint, current: dict[str, Any], *, accept: bool) -> list[str]:
    """Warnings about what changed since `checkpoint`, where that is accepted.

    Raises:
        ConfigError: the recipe differs and that is not accepted; the message names the difference.
    """
    changes = changes_between(checkpoint.values["recipe"], current)
    if not changes:
        return []
    difference = f"the recipe is not the one of {checkpoint.path}: " + "; ".join(changes)
    if not accept:
        raise ConfigError(
            f"{difference}. Set it back, choose another run.dir to start anew, or set run.accept_changed_recipe true "
            "to resume with the change"
        )
    return [f"{difference}; resuming with the change, as run.accept_changed_recipe says"]


def changes_between(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """What differs between two recipes, as "NAME OLD -> NEW".

    A setting that one of them lacks has its default there: a checkpoint may be older than the setting. One that is no
    longer part of the recipe does not count.
    """
    names = sorted(name for name in {*saved, *current} if name not in SETTINGS or SETTINGS[name].in_recipe)
    values = [(name, _value(saved, name), _value(current, name)) for name in names]
    return [f"{name} {old} -> {new}" for name, old, new in values if old != new]


def _value(recipe: dict[str, Any], name: str) -> Any:
    default = SETTINGS[name].default if name in SETTINGS else MISSING
    value = recipe.get(name, "absent" if default is MISSING else default)
    return list(value) if isinstance(value, tuple) else value
