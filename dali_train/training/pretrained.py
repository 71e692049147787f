"""Pretrained weights, and which of them stay frozen."""

import difflib
import fnmatch
import inspect
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError, safe_open
from torch import nn

from dali_train.errors import ConfigError


def create_pretrained(
    name: str, weights: str, num_classes: int, kwargs: dict[str, Any], *, field: str, keep_classifier: bool = False
) -> Any:
    """Return timm's model `name` with trained weights; timm fits position embeddings to another resolution.

    Args:
        weights: a safetensors file, or a timm name with the same architecture (``vit_base_patch16_224.augreg_in1k``,
            ``local-dir:DIRECTORY``, ``hf-hub:OWNER/NAME``); empty for what `name` itself names.
        field: the setting, for messages.
        keep_classifier: refuse weights for other classes, for which the classifier would be initialised again.

    Returns:
        A module with timm's own attributes, such as `pretrained_cfg`.

    Raises:
        ConfigError: the weights are missing, cannot be fetched, or do not fit.
    """
    check_arguments(kwargs, "model.kwargs")
    overlay: dict[str, Any] | None = None
    source = weights or name
    if weights.endswith(".safetensors"):
        if not Path(weights).is_file():
            raise ConfigError(f"{field}: there is no file {weights}")
        check_name(name, field)
        classes = _num_classes(name, weights) or num_classes
        overlay = {"file": weights, "num_classes": classes, "custom_load": False, "source": "timm"}
        source = name
    elif ":" not in source:
        check_name(source, field)
        if source.partition(".")[0] != name.partition(".")[0]:
            raise ConfigError(
                f"{field}: {weights} are weights of another architecture than {name}: name some of {name}"
            )
    try:
        model = timm.create_model(
            source, pretrained=True, num_classes=num_classes, pretrained_cfg_overlay=overlay, **kwargs
        )
    except (OSError, RuntimeError, ValueError, TypeError, AssertionError, KeyError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{field}: {weights or name} cannot be loaded into timm's {name} with {kwargs}: {reason[-1].strip()}. "
            "Where no hub can be reached, name a safetensors file that fits"
        ) from error
    found = model.pretrained_cfg.get("num_classes")
    if keep_classifier and found != num_classes:
        raise ConfigError(
            f"{field}: {weights or name} has {found} classes, the dataset {num_classes}: use weights for these"
        )
    return model


# Arguments of timm.create_model that are not the architecture's: with some it loads files and fetches URLs, and a
# config.json may be somebody else's.
_NOT_FOR_THE_MODEL = {
    *inspect.signature(timm.create_model).parameters,
    "pretrained_strict",
    "pretrained_filter_fn",
} - {"model_name", "kwargs"}


def check_arguments(kwargs: dict[str, Any], field: str) -> None:
    """Check that `kwargs` only describe an architecture.

    Raises:
        ConfigError: one of them would load weights.
    """
    if names := sorted(_NOT_FOR_THE_MODEL & kwargs.keys()):
        source = "loss.teacher_weights" if field.startswith("loss") else "model.weights"
        raise ConfigError(f"{field} has {names[0]}: it is no argument of the model; weights come from {source}")


def check_name(name: str, field: str) -> None:
    """Check that timm has a model of that name.

    Raises:
        ConfigError: it has none.
    """
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise ConfigError(
            f"{field} is {name!r}, which timm does not know; "
            + (f"close: {', '.join(close)}" if close else "see timm.list_models()")
        )


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Do not train weights whose name matches one of `patterns` (``*`` for anything); norms still update their
    statistics.

    Raises:
        ConfigError: a pattern matches nothing, or all of them everything.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matches = fnmatch.filter(parameters, pattern)
        if not matches:
            close = difflib.get_close_matches(pattern, parameters, n=3, cutoff=0.3)
            raise ConfigError(
                f"model.freeze: {pattern} matches no weight of the model; names are like "
                f"{', '.join(close or parameters)}"
            )
        for name in matches:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"model.freeze {patterns} leaves nothing to train: name fewer weights")


def _num_classes(name: str, weights: str) -> int | None:
    """Return the number of classes of a safetensors file's classifier; None if it has none, or none is known."""
    cfg = timm.get_pretrained_cfg(name)
    classifier = cfg.classifier if cfg is not None else None
    first = classifier[0] if isinstance(classifier, tuple | list) else classifier
    try:
        with safe_open(weights, framework="pt") as file:
            if f"{first}.weight" not in file.keys():  # noqa: SIM118 - it is no mapping
                return None
            return int(file.get_slice(f"{first}.weight").get_shape()[0])
    except SafetensorError as error:
        raise ConfigError(f"{weights} is not a safetensors file: {error}") from error
