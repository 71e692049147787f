"""The images that weights were trained on: their normalisation and filter, as far as anything tells them.

With another normalisation nothing fails, and the accuracy is some percent lower.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import timm
from torch import nn

from dali_train.checkpoint.format import CheckpointError, CheckpointManifest
from dali_train.checkpoint.run_directory import RunDirectory, named_checkpoint
from dali_train.config import Config
from dali_train.config.check import as_typed
from dali_train.config.sections import NORMALISATIONS, Triple
from dali_train.data.dataset.sample_recipe import value_in
from dali_train.errors import ConfigError
from dali_train.training.model import input_size
from dali_train.training.pretrained import description_beside, is_path

_FINE_WHEN_DRAWN = "fine for random initial weights, wrong for pretrained ones"


@dataclass(frozen=True, kw_only=True)
class TrainedOn:
    mean: Triple  # of pixel values from 0 to 255
    std: Triple
    interpolation: str | None  # bilinear or bicubic; None: both, or another one
    source: str  # what tells it
    is_assumed: bool = False  # nothing tells it of these weights, so it is that of timm's own for this network

    @property
    def normalise(self) -> str | tuple[Triple, Triple]:
        """The value of data.normalise: a name, if it has one."""
        own = self.mean, self.std
        return next((name for name, pair in NORMALISATIONS.items() if _equal(pair, own)), own)


class Difference(NamedTuple):
    """A setting that is not as in the training of the weights."""

    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}"


def differences_from_training(
    config: Config, model: nn.Module | None = None, side: Literal["train_size", "eval_size"] | None = None
) -> list[Difference]:
    """Return how the images of `config` differ from those that model.weights were trained on; without weights, from
    those of timm's own for this network.

    Args:
        model: of `config`, with its weights or without; only with them are those on the hub known.
        side: a size to compare with that of `model`, too.
    """
    data, weights = config.data, config.model.weights
    known = trained_on(config.model.name, weights, getattr(model, "pretrained_cfg", None))
    differences = []
    if model is not None and side is not None and (known is None or known.is_assumed):
        differences += _of_size(config, model, side)
    if known is None:
        return differences
    if not _equal((data.mean, data.std), (known.mean, known.std)):
        differences.append(_difference(weights, known, "data.normalise", data.normalise, known.normalise))
    filters = (None, data.eval_filter)
    if known.interpolation not in filters and data.interpolation != "random" and not known.is_assumed:
        setting = "data.interpolation" if data.eval_interpolation is None else "data.eval_interpolation"
        differences.append(_difference(weights, known, setting, data.eval_filter, known.interpolation))
    return differences


def _of_size(config: Config, model: nn.Module, side: Literal["train_size", "eval_size"]) -> list[Difference]:
    size, ours = input_size(model), getattr(config.data, side)
    if size in (None, ours):
        return []
    text = f"data.{side} is {ours}, and timm's {config.model.name} has images of {size} pixels"
    if config.model.weights is None:
        return [Difference(text, _FINE_WHEN_DRAWN)]
    return [Difference(text, f"set data.{side} {size}, unless {config.model.weights} was trained with {ours}")]


def _difference(weights: str | None, known: TrainedOn, setting: str, ours: object, theirs: object) -> Difference:
    ours, theirs = as_typed(ours), as_typed(theirs)
    whose = known.source if known.is_assumed else f"model.weights {weights}"
    text = f"{setting} is {ours}, and {whose} was trained with {theirs}"
    if weights is None:
        return Difference(text, _FINE_WHEN_DRAWN)
    if known.is_assumed:
        return Difference(text, f"set {setting} {theirs}, unless {weights} was trained with {ours}")
    return Difference(f"{text}, as {known.source} says", f"set {setting} {theirs}")


def trained_on(name: str, weights: str | None, cfg: Mapping[str, Any] | None = None) -> TrainedOn | None:
    """Return what the recipe of their run tells of `weights`, else config.json beside them, else timm; None: nothing.

    Args:
        name: timm's, of the network.
        weights: as for model.weights; None: the initial ones.
        cfg: timm's description of the network, which for weights on the hub is theirs once they are fetched; None: as
            timm describes `name`.
    """
    cfg = cfg or _cfg(name)
    if weights is not None:
        description = description_beside(weights)
        if (known := _of_run(weights, description)) is not None:
            return known
        own = description.get("pretrained_cfg")
        if isinstance(own, dict) and (known := _of_cfg({**cfg, **own}, "its config.json")) is not None:
            return known
        if ":" in weights and cfg.get("source") == "hf-hub":
            return _of_cfg(cfg, "its config.json")
        if ":" not in weights and not is_path(weights):
            return _of_cfg(_cfg(weights), "timm")
    return _of_cfg(cfg, f"timm's {name}", is_assumed=True)


def _of_run(weights: str, description: Mapping[str, Any]) -> TrainedOn | None:
    """Return what the run tells that wrote `weights`, a run, a checkpoint or model.safetensors; None: no run did.

    Args:
        description: of `description_beside`.
    """
    path = Path(weights)
    with suppress(ConfigError, CheckpointError, OSError):  # whoever reads the weights says so
        if is_path(weights) and path.is_dir():
            recipe = CheckpointManifest.read(named_checkpoint(path, "model.weights")).values.recipe
            values = [value_in(recipe, f"data.{name}") for name in ("mean", "std", "interpolation")]
            return _of_values(*values, source="its run's recipe")
        if isinstance(description.get("data"), dict):  # a run's config.json
            data = RunDirectory(path.parent).config.data
            return _of_values(data.mean, data.std, data.interpolation, source="its run's config.json")
    return None


def _cfg(name: str) -> dict[str, Any]:
    """Return timm's description of `name`; empty: it has none."""
    with suppress(RuntimeError):  # an unknown tag
        if (cfg := timm.get_pretrained_cfg(name)) is not None:
            return cfg.to_dict()
    return {}


def _of_cfg(cfg: Mapping[str, Any], source: str, *, is_assumed: bool = False) -> TrainedOn | None:
    values = [cfg.get(name) for name in ("mean", "std", "interpolation")]
    return _of_values(*values, source=source, is_assumed=is_assumed, scale=255)


def _of_values(
    mean: object, std: object, interpolation: object, *, source: str, is_assumed: bool = False, scale: float = 1
) -> TrainedOn | None:
    """Return what values of somebody's file tell; None: they are no normalisation."""
    means, stds = _triple(mean, scale), _triple(std, scale)
    if means is None or stds is None:
        return None
    usual = interpolation if isinstance(interpolation, str) and interpolation in ("bilinear", "bicubic") else None
    return TrainedOn(mean=means, std=stds, interpolation=usual, source=source, is_assumed=is_assumed)


def _triple(values: object, scale: float) -> Triple | None:
    if not isinstance(values, list | tuple) or not all(isinstance(one, float | int) for one in values):
        return None
    match [round(scale * one, 4) for one in values]:
        case [red, green, blue]:
            return red, green, blue
    return None


def _equal(ours: tuple[Triple, Triple], theirs: tuple[Triple, Triple]) -> bool:
    pairs = zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True)
    return all(abs(a - b) <= 0.5 for a, b in pairs)
