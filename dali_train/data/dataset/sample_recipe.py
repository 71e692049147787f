"""What decides samples: the settings, and the dataset by its content. Runs, loaders and their states compare it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from dali_train.config import SampleConfig
from dali_train.config.check import as_typed
from dali_train.config.config import SETTINGS
from dali_train.data.dataset.index import kind_of_dataset
from dali_train.data.dataset.manifest import CONTENT, Manifest, dataset_content
from dali_train.data.sampling.rng import DRAWS_VERSION
from dali_train.files import sha256
from dali_train.text import plural, printable, shortened

CLASS_NAMES = "class_names"
DRAWS = "version of the draws"
_SETTINGS_OF = {"data.mean": "data.normalise (mean)", "data.std": "data.normalise (std)"}


def dataset_fields(manifest: Manifest) -> dict[str, str]:
    """Return a recipe's part on the dataset: the checksums in ``dataset.json``, and the names of the classes.

    The checksums of the index cover labels, sizes and positions. For a shard that was indexed without reading all of
    it, only these and its size are known.
    """
    return {"dataset": dataset_content(manifest), CLASS_NAMES: names_content(manifest.class_names)}


def names_content(names: Sequence[str]) -> str:
    """Return a digest of the class names, with the first of them."""
    digest = hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:16]
    return f"{shortened(printable(', '.join(names[:4])), 40)} ({plural(len(names), 'name')}, {CONTENT}{digest})"


def sample_settings(config: SampleConfig) -> dict[str, Any]:
    """Return a recipe's settings of sections data, batch and mixup by full name, as plain JSON values, and the version
    of the draws.

    Files are included by their content, so that a replaced file is noticed.

    Raises:
        DatasetError: a source of the dataset cannot be read.
    """
    sections = {one.name: asdict(getattr(config, one.name)) for one in fields(SampleConfig)}
    settings = in_recipe(json.loads(json.dumps(sections)))
    if config.data.shuffle != "block":  # otherwise they have no effect
        del settings["data.block_images"], settings["data.window_blocks"]
    if config.data.exclude is not None and Path(config.data.exclude).is_file():
        settings["data.exclude"] = CONTENT + sha256(Path(config.data.exclude))[:16]
    if (kind := kind_of_dataset(config.data)) is not None:
        settings |= kind.recipe_settings(config.data)
    del settings["data.normalise"]  # as numbers, so that it does not matter how they were spelled
    return settings | {"data.mean": list(config.data.mean), "data.std": list(config.data.std), DRAWS: DRAWS_VERSION}


def in_recipe(sections: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in the recipe of these sections, ``{section: {field: value}}``, by full name."""
    return {
        name: sections[section][field]
        for name, (section, _, field) in ((name, name.partition(".")) for name in SETTINGS)
        if section in sections and SETTINGS[name].in_recipe
    }


def changes_between(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return the differences of two recipes, as "NAME OLD -> NEW".

    A setting that one of them lacks has its default there, because a checkpoint may be older than the setting. Settings
    of `saved` that exist but are no longer part of the recipe are ignored; one that was removed counts as a change.
    """
    names = sorted(
        name for name in {*saved, *current} if name in current or name not in SETTINGS or SETTINGS[name].in_recipe
    )
    values = [(name, value_in(saved, name), value_in(current, name)) for name in names]
    return [
        f"{_SETTINGS_OF.get(name, name)} {as_typed(old)} -> {as_typed(new)}" for name, old, new in values if old != new
    ]


def value_in(recipe: dict[str, Any], name: str) -> Any:
    """Return the value of a setting in a recipe, or its default if it is missing there."""
    value = recipe.get(name, default_in_recipes(name))
    return list(value) if isinstance(value, tuple) else value


def default_in_recipes(name: str) -> Any:
    """Return what a recipe without this name had; "absent" if it has no default."""
    default = SETTINGS[name].default if name in SETTINGS else MISSING
    return "absent" if default is MISSING else default
