"""Which network trained weights are for, and the images that they were trained on."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.config.sections import NORMALISATIONS
from dali_train.errors import ConfigError
from dali_train.training.model_arguments import is_model
from dali_train.training.pretrained import description_beside, is_path, preprocessing_beside
from dali_train.training.weight_files import is_timms_hub_name

Triple = tuple[float, float, float]


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
    for directory in (path, *path.parents[:2]):  # a run, or one of its checkpoints
        if path.is_dir() and (directory / "config.json").exists() and (directory / "status.json").exists():
            config = RunDirectory(directory).config
            interpolation = config.data.eval_filter
            return Pretrained(
                weights=weights,
                model=config.model.name,
                kwargs=dict(config.model.kwargs),
                normalise=config.data.normalise,
                interpolation=interpolation,
            )
    architecture = description_beside(weights).get("architecture")
    described = architecture if isinstance(architecture, str) and is_model(architecture) else None
    name = model or described or _named_by(path)
    if name is None:
        raise ConfigError(
            f"--weights {weights}: its name begins with no timm model's, and no config.json beside it says which "
            "network it is for: name it with --model"
        )
    return Pretrained(weights=weights, model=name, **_preprocessing(name, preprocessing_beside(weights)))


def _of_timm(weights: str, model: str | None) -> Pretrained:
    if ":" in weights:  # hf-hub: and local-dir:, whose architecture timm reads
        if model is None:
            raise ConfigError(f"--weights {weights}: name its network with --model, a timm name")
        return Pretrained(weights=weights, model=model, **_preprocessing(model, preprocessing_beside(weights)))
    name = weights.removeprefix("timm/").partition(".")[0]
    if not is_model(name):
        raise ConfigError(f"--weights {weights}: neither a file, a run directory, nor a timm model")
    return Pretrained(weights=weights, model=model or name, **_preprocessing(weights.removeprefix("timm/"), {}))


def _named_by(file: Path) -> str | None:
    """Return the timm model with whose name a file's begins: resnet50-0676ba61.pth, resnet50_a1_0.pth; the longest."""
    stem = file.name.lower()
    beginnings = [name for name in timm.list_models() if re.match(rf"{re.escape(name)}(?![a-z0-9])", stem)]
    return max(beginnings, key=len, default=None)


def _preprocessing(name: str, described: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as `described`, else those of timm's model `name`."""
    cfg = timm.get_pretrained_cfg(name)
    own = {**(cfg.to_dict() if cfg is not None else {}), **described}
    if not {"mean", "std"} <= {*own}:
        return {}
    mean, std = (tuple(round(255 * value, 4) for value in own[name]) for name in ("mean", "std"))
    known = [key for key, value in NORMALISATIONS.items() if _equal(value[0], mean) and _equal(value[1], std)]
    interpolation = own["interpolation"] if own.get("interpolation") in ("bilinear", "bicubic") else "bilinear"
    return {"normalise": known[0] if known else (mean, std), "interpolation": interpolation}


def _equal(ours: Triple, theirs: tuple[float, ...]) -> bool:
    return all(abs(a - b) < 0.5 for a, b in zip(ours, theirs, strict=True))
