"""Which network trained weights are for, and the images that they were trained on."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.checkpoint.trained_on import trained_on
from dali_train.config.sections import Triple
from dali_train.errors import ConfigError
from dali_train.training.model_arguments import is_model
from dali_train.training.pretrained import description_beside, is_path
from dali_train.training.weight_files import is_timms_hub_name


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """What the section model and the section data of a config need to start from `weights`."""

    weights: str
    model: str  # timm's name
    kwargs: dict[str, Any] = field(default_factory=dict)
    normalise: str | tuple[Triple, Triple] = "imagenet"
    interpolation: str = "bilinear"


def describe_weights(weights: str, model: str | None) -> Pretrained:
    """Return the network of trained weights, as far as it can be told.

    Args:
        weights: as for model.weights: a file, a run directory or a checkpoint in one, or a timm name.
        model: timm's name of the network; None: that which the weights, or the name of their file, tell.

    Raises:
        ConfigError: there is no such file, or nothing tells the network.
    """
    if not is_path(weights) or is_timms_hub_name(weights):
        return _of_timm(weights, model)
    path = Path(weights)
    if not path.exists():
        raise ConfigError(f"--weights {weights}: there is no such file or directory")
    for directory in (path, *path.parents[:2]):  # a run, its model.safetensors, or one of its checkpoints
        is_inside = path.is_dir() or directory == path.parent
        if is_inside and (directory / "config.json").exists() and (directory / "status.json").exists():
            network = RunDirectory(directory).config.model
            of_images = _preprocessing(network.name, weights)
            return Pretrained(weights=weights, model=network.name, kwargs=dict(network.kwargs), **of_images)
    architecture = description_beside(weights).get("architecture")
    described = architecture if isinstance(architecture, str) and is_model(architecture) else None
    name = model or described or _named_by(path)
    if name is None:
        raise ConfigError(
            f"--weights {weights}: its name begins with no timm model's, and no config.json beside it says which "
            "network it is for: name it with --model"
        )
    return Pretrained(weights=weights, model=name, **_preprocessing(name, weights))


def _of_timm(weights: str, model: str | None) -> Pretrained:
    if ":" in weights:  # hf-hub: and local-dir:, whose architecture timm reads
        if model is None:
            raise ConfigError(f"--weights {weights}: name its network with --model, a timm name")
        return Pretrained(weights=weights, model=model, **_preprocessing(model, weights))
    name = weights.removeprefix("timm/")
    architecture = name.partition(".")[0]
    if not is_model(architecture):
        raise ConfigError(f"--weights {weights}: neither a file, a run directory, nor a timm model")
    return Pretrained(weights=weights, model=model or architecture, **_preprocessing(architecture, name))


def _named_by(file: Path) -> str | None:
    """Return the timm model with whose name a file's begins: resnet50-0676ba61.pth, resnet50_a1_0.pth; the longest."""
    stem = file.name.lower()
    beginnings = [name for name in timm.list_models() if re.match(rf"{re.escape(name)}(?![a-z0-9])", stem)]
    return max(beginnings, key=len, default=None)


def _preprocessing(name: str, weights: str) -> dict[str, Any]:
    """Return the settings of the images that `weights` of timm's model `name` were trained on, if they are known."""
    known = trained_on(name, weights)
    return {"normalise": known.normalise, "interpolation": known.interpolation or "bicubic"} if known else {}
