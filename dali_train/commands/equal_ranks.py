"""What must be equal on all ranks of a run, compared once, before anything that depends on it.

Every rank reads its own config, dataset, weight files and code. A stale copy on one node would train a mixture without
an error, since gradients of any recipes can be averaged, and collectives that only some ranks call would hang.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dali_train
from dali_train.checkpoint.fingerprint import library_versions
from dali_train.checkpoint.recipe import recipe_settings
from dali_train.checkpoint.run_directory import MANIFEST
from dali_train.config import Config
from dali_train.config.check import Mark, has_mark
from dali_train.config.config import SETTINGS
from dali_train.data.dataset.index import read_manifest
from dali_train.data.dataset.manifest import dataset_content
from dali_train.data.dataset.sample_recipe import names_content
from dali_train.errors import ConfigError, UserError
from dali_train.files import sha256
from dali_train.runtime.process_group import on_rank_0
from dali_train.text import plural, shortened

_PER_NODE = {
    *("run.dir", "run.max_seconds"),  # a disk of its own; the first rank that must stop stops all
    *("data.num_threads", "data.read_ahead_mb", "data.cache_gb", "data.hw_decoder_load"),  # the size of the machine
}
"""Settings that may differ, since they only say where files are, or how fast a node is."""
_DIRECTORIES = ("data.cache", "data.local_copy")
"""May differ too, but all ranks must have one, or none, because they prepare it together."""
_BY_CONTENT = [name for name, setting in SETTINGS.items() if has_mark(setting.hint, Mark.BY_CONTENT)]


def require_equal_ranks(
    config: Config, device: torch.device, group: dist.ProcessGroup | None, checkpoint: Path | None = None
) -> None:
    """Compare settings, dataset, weight files, config file and package of all ranks in `group`.

    Args:
        checkpoint: one that all ranks are about to read.

    Raises:
        ConfigError: on all ranks, if one differs from rank 0; the message names rank, host and what differs.
        UserError: files could not be read, on all ranks for the same reason.
    """
    if group is None:
        return
    contents = _settings(config, device) | _code(config)
    fault = None
    try:
        contents |= _files(config, checkpoint)
    except (UserError, OSError) as error:
        contents["files"] = f"not readable ({error})"
        fault = error
    _compare(contents, group)
    if fault is not None:
        raise fault


def _compare(values: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Compare JSON `values`, by name, of all ranks in `group` with rank 0's.

    Raises:
        ConfigError: on all ranks, if one differs; the message names the first such rank, its host and the values.
    """
    mine = {name: json.dumps(value) for name, value in values.items()}
    first = on_rank_0(lambda: mine, group)
    differences = [
        f"{name} is {shortened(mine.get(name, 'missing'), 200)}, rank 0 has {shortened(first.get(name, 'none'), 200)}"
        for name in first | mine
        if mine.get(name) != first.get(name)
    ]
    found: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)  # of each rank: host, differences
    dist.all_gather_object(found, (platform.node(), "; ".join(differences)), group=group)
    differing = [rank for rank, (_, text) in enumerate(found) if text]
    if differing:
        host, text = found[differing[0]]
        others = f" ({plural(len(differing) - 1, 'more rank')} differ too)" if len(differing) > 1 else ""
        raise ConfigError(
            f"rank {differing[0]} on {host}: {text}{others}: start all ranks with the same command, files and versions"
        )


def _settings(config: Config, device: torch.device) -> dict[str, Any]:
    settings = config.flat()
    for name in (*_PER_NODE, *_BY_CONTENT):
        del settings[name]
    for name in _DIRECTORIES:
        settings[name] = settings[name] and "a directory"
    settings["hooks.user"] = hook_names(config.hooks.user)
    settings["run.device"] = device.type  # which `auto` chose
    return settings


def hook_names(hooks: Sequence[Callable[[], Any]]) -> list[str]:
    """Return the names of hooks, which are the same in every process: a functools.partial has only an address."""
    return [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks]


def _files(config: Config, checkpoint: Path | None) -> dict[str, str]:
    """Return digests of the files that the config names. Raises UserError, OSError: one cannot be read."""
    manifest = read_manifest(config.data)
    recipe = recipe_settings(config)
    digests = {
        "the dataset": dataset_content(manifest),
        "the classes": names_content(manifest.class_names),
        **{name: value for name, value in recipe.items() if name.partition(" ")[0] in _BY_CONTENT},
    }
    if checkpoint is not None:
        digests["the checkpoint"] = sha256(checkpoint / MANIFEST)[:16]
    return digests


def _code(config: Config) -> dict[str, str]:
    package = Path(dali_train.__file__).parent
    sources = [
        f"{path.relative_to(package)}\n{path.read_text(encoding='utf-8')}" for path in sorted(package.rglob("*.py"))
    ]
    return {
        "the config file": _digest(*(content.decode(errors="replace") for content in config.files.values())),
        "dali_train": f"{dali_train.__version__}, code {_digest(*sources)}",
        **library_versions(),
    }


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
