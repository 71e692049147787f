"""Pretrained weights, and which of them stay frozen."""

import fnmatch
import logging
import math
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dali_train.config.check import close_names
from dali_train.errors import ConfigError
from dali_train.files import ForeignFileError, read_json
from dali_train.text import plural, printable
from dali_train.training.model_arguments import build_on_meta, check_name
from dali_train.training.weight_files import SUFFIXES, Tensors, is_timms_hub_name, read_weights

_log = logging.getLogger("dali_train")
_MAX_DESCRIPTION_BYTES = 1 << 28  # of a config.json, which may have a million class names
LOCAL_DIRECTORY = "local-dir:"
"""timm's prefix for a directory with config.json and model.safetensors."""
ALL_BUT_HEAD = "all-but-head"
"""In model.freeze: all weights except the classifier's, or the classifiers', if there are several."""
BATCH_NORM = "batch-norm"
"""In model.freeze: those of all BatchNorms."""


def is_path(weights: str) -> bool:
    """Return whether `weights` is the path of a file or directory, which need not exist, and not a timm name."""
    if not weights or ":" in weights:  # local-dir: and hf-hub:
        return False
    return "/" in weights or weights.endswith(SUFFIXES) or (Path(weights).exists() and not timm.is_model(weights))


def is_missing_file(weights: str | None) -> bool:
    """Return whether `weights` is a path at which there is nothing, such as a run that has not been started."""
    if weights is None or not is_path(weights) or is_timms_hub_name(weights):
        return False
    return not Path(weights).exists()


def create_pretrained(
    name: str,
    weights: str,
    num_classes: int,
    kwargs: dict[str, Any],
    *,
    field: str,
    keep_classifier: bool = False,
    tensors: Tensors | None = None,
) -> tuple[Any, bool]:
    """Return timm's model `name` with trained weights; timm resamples position embeddings to another resolution.

    Args:
        weights: see `weights_that_fit`; empty for the weights that `name` itself names.
        field: the setting, for messages.
        keep_classifier: refuse weights with other classes, for which the classifier would be a new one.
        tensors: the tensors of `weights`, if they have been read already.

    Returns:
        A module, and whether its classifier is a new one, with random weights. A timm model has timm's attributes, such
        as `pretrained_cfg`.

    Raises:
        ConfigError: the weights are missing, cannot be fetched, or do not fit.
    """
    tensors = weights_that_fit(name, weights, num_classes, kwargs, field=field, tensors=tensors)
    source = weights or name
    if tensors is not None:
        num_trained = num_classes_of(name, tensors)
        if keep_classifier and num_trained is None and _classifiers_of(name):
            raise ConfigError(f"{field}: {source} has no classifier: use weights trained on the dataset's classes")
    else:
        described = timm.get_pretrained_cfg(source) if ":" not in source else None
        num_trained = described.num_classes if described else None

    def check_classes(num_trained: int | None) -> None:
        if keep_classifier and num_trained not in (num_classes, None):
            raise ConfigError(
                f"{field}: {source} has {num_trained} classes, the dataset {num_classes}: use weights trained on these "
                "classes"
            )

    check_classes(num_trained)  # before anything is fetched
    if tensors is not None:
        is_new = bool(_classifiers_of(name)) and num_trained != num_classes
        return _create_with(tensors, name, num_classes, kwargs), is_new
    try:
        model = timm.create_model(source, pretrained=True, num_classes=num_classes, **kwargs)
        num_trained = model.pretrained_cfg.get("num_classes")
        if num_trained not in (num_classes, None):
            _check_all_fit(lambda: timm.create_model(source, pretrained=True, num_classes=num_trained, **kwargs))
    except (OSError, RuntimeError, ValueError, TypeError, AssertionError, KeyError) as error:
        raise _misfit(error, source, name, kwargs, field) from error
    check_classes(num_trained)
    return model, num_trained not in (num_classes, None)


def weights_that_fit(
    name: str, weights: str, num_classes: int, kwargs: dict[str, Any], *, field: str, tensors: Tensors | None = None
) -> Tensors | None:
    """Return the tensors of `weights`, which fit the model `name` except for the number of classes.

    A classifier may be absent, too.

    Args:
        weights: a file, see `read_weights`, or a timm name with the same architecture
            (``vit_base_patch16_224.augreg_in1k``, ``local-dir:DIRECTORY``, ``hf-hub:OWNER/NAME``).
        num_classes: of the model, used if the number cannot be told from `weights`.
        tensors: the tensors of `weights`, if they have been read already.

    Returns:
        None for a timm name, of which only the architecture is known until timm fetches it.

    Raises:
        ConfigError: the weights are missing, or do not fit.
    """
    if tensors is None and is_path(weights):
        tensors = read_weights_of(name, weights, num_classes, kwargs, field)
    if tensors is None:
        if ":" not in (weights or name):
            check_name(weights or name, field)
            if weights and weights.partition(".")[0] != name.partition(".")[0]:
                raise ConfigError(
                    f"{field}: {weights} are weights of another architecture than {name}: use weights of {name}"
                )
        return None
    check_name(name, field)
    shapes = {key: tensor.to("meta") for key, tensor in tensors.items()}
    if num_classes_of(name, tensors) is None:
        own = build_on_meta(name, num_classes, kwargs).state_dict()
        heads = tuple(f"{classifier}." for classifier in _classifiers_of(name))
        shapes |= {key: tensor for key, tensor in own.items() if key.startswith(heads)}
    try:
        _check_all_fit(lambda: _create_with(shapes, name, num_classes_of(name, tensors) or num_classes, kwargs))
    except RuntimeError as error:
        raise _misfit(error, weights, name, kwargs, field) from error
    return tensors


def read_weights_of(name: str, weights: str, num_classes: int, kwargs: dict[str, Any], field: str) -> Tensors:
    """Return the tensors of the model `name` in a file, see `read_weights`, by timm's names, if timm knows the file's.

    Raises:
        ConfigError: see `read_weights`, or the file has other names, which timm does not know.
    """
    check_name(name, field)
    own = build_on_meta(name, num_classes, kwargs).state_dict()
    tensors = read_weights(weights, field, own.keys(), _classifiers_of(name))
    decoder = {key for key in tensors.keys() - own.keys() if key.startswith("decoder")}  # of MAE's pretraining
    if decoder:
        _log.info("%s: without the decoder of %s (%s)", field, weights, plural(len(decoder), "tensor"))
        tensors = {key: tensor for key, tensor in tensors.items() if key not in decoder}
    heads = tuple(f"{classifier}." for classifier in _classifiers_of(name))
    if timm.get_pretrained_cfg(name) is None or all(key in tensors or key.startswith(heads) for key in own):
        return tensors
    try:
        return _by_timms_names(tensors, name, num_classes, kwargs)
    except Exception as error:  # whatever a file with other names makes of timm's functions
        if _misfits(str(error)) and own.keys() & tensors.keys():
            return tensors  # the caller lists what does not fit
        shown = ", ".join(printable(key) for key in list(tensors)[:3])
        raise ConfigError(
            f"{field}: {weights} has other names than timm's {name} ({shown}, ...), and timm does not translate them: "
            f"set {_chosen_by(field)} to the architecture of these weights, or give them timm's names"
        ) from error


def _by_timms_names(tensors: Tensors, name: str, num_classes: int, kwargs: dict[str, Any]) -> Tensors:
    """Return the tensors by the names of the model `name`: timm translates those of DINOv2, OpenCLIP, ConvNeXt's
    authors and others when it loads them, by a function of each architecture. Raises RuntimeError: they do not fit."""
    shapes = {key: tensor.to("meta") for key, tensor in tensors.items()}
    num_trained = num_classes
    try:
        _check_all_fit(lambda: _load_into(shapes, name, num_classes, num_classes, kwargs))
    except RuntimeError as error:
        heads = "|".join(map(re.escape, _classifiers_of(name)))
        trained = re.search(rf"size mismatch for (?:{heads})\.weight: .*?Size\(\[(\d+)", str(error))
        num_trained = int(trained[1]) if trained else 0  # without a classifier
    return dict(_load_into(tensors, name, num_trained, num_trained, kwargs).state_dict())


def _check_all_fit(create: Callable[[], Any]) -> None:
    """Call `create` on the meta device, with the weights' own number of classes: with another one timm silently loads
    only what fits.

    Raises:
        RuntimeError: not all weights fit the model.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # copies nothing
            create()
    except RuntimeError as error:
        if _misfits(str(error)):  # not an operation that the meta device lacks
            raise


def _misfit(error: Exception, weights: str, name: str, kwargs: dict[str, Any], field: str) -> ConfigError:
    """Return the error for weights that timm could not load; for a wrong architecture, three names and a count."""
    if not (misfits := _misfits(str(error))):
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")
        return ConfigError(
            f"{field}: {weights} cannot be loaded into timm's {name} with {kwargs}: {reason}. If the hub cannot be "
            "reached, use a file of weights"
        )
    more = f" and {len(misfits) - 3} more" if len(misfits) > 3 else ""
    return ConfigError(
        f"{field}: {weights} does not fit {name} with {kwargs}: {'; '.join(misfits[:3])}{more}. Set "
        f"{_chosen_by(field)} to the architecture of these weights, or use other weights"
    )


def _chosen_by(field: str) -> str:
    """Return what sets the architecture, where `field` sets the weights."""
    return "model.name and model.kwargs" if field.startswith("model") else field


def description_beside(weights: str) -> dict[str, Any]:
    """Return timm's config.json beside a file of weights, as `export` and timm's save_for_hf write it, or in the
    directory of ``local-dir:``; empty if there is none, or `weights` is neither."""
    if weights.startswith(LOCAL_DIRECTORY):
        directory = Path(weights.removeprefix(LOCAL_DIRECTORY))
    elif is_path(weights) and not Path(weights).is_dir():
        directory = Path(weights).parent
    else:
        return {}
    try:
        description = read_json(directory / "config.json", _MAX_DESCRIPTION_BYTES)
    except (OSError, ForeignFileError):
        return {}
    return description


def class_names_beside(weights: str) -> list[str]:
    """Return the class names of a file of weights, see `description_beside`; none if it names none."""
    names = description_beside(weights).get("label_names")
    return [str(name) for name in names] if isinstance(names, list) else []


def match_classes(
    tensors: Tensors, name: str, theirs: Sequence[str], ours: Sequence[str], source: str, *, evaluates: bool = False
) -> Tensors:
    """Return weights of the model `name` with the classes in our order, matched by their names.

    Args:
        theirs, ours: class names in the order of the labels, of the weights and of the dataset. Without names, and
            with none in common, nothing is known, and nothing is changed.
        source: the setting and its value, for messages.
        evaluates: the classifier is not trained any more, so all of its classes must be ours.

    Raises:
        ConfigError: the order differs and timm does not know the classifier, or `evaluates` and other classes.
    """
    known = {*theirs}
    common = known.intersection(ours)
    if [*theirs] == [*ours] or not common:
        return tensors
    if len(common) < max(len(theirs), len(ours)):
        if evaluates and len(theirs) == len(ours):
            unknown = next(one for one in ours if one not in known)
            raise ConfigError(
                f"{source}: its {len(theirs)} classes are not those of the dataset, {unknown!r} is not among them: use "
                "the dataset that it was trained on, or one with its class names"
            )
        return tensors
    heads = _classifiers_of(name)
    rows = [f"{head}.{kind}" for head in heads for kind in ("weight", "bias") if f"{head}.{kind}" in tensors]
    if not rows:
        raise ConfigError(
            f"{source}: its classes have another order than the dataset's, and the classifier of {name} is unknown: "
            "index the dataset in that order, with --class-names FILE"
        )
    place = {one: number for number, one in enumerate(theirs)}
    order = torch.tensor([place[one] for one in ours])
    return {key: tensor[order] if key in rows else tensor for key, tensor in tensors.items()}


def image_settings(model: nn.Module, *, eval_size: int | None = None, for_tests: bool = False) -> dict[str, Any]:
    """Return the data settings for the preprocessing in the model's ``pretrained_cfg``.

    Args:
        eval_size: in pixels, instead of the model's; the cropped fraction stays the same.
        for_tests: use timm's size and crop fraction for tests, if the model has them.
    """
    cfg = resolve_data_config({}, model=model, use_test_size=for_tests)
    size = eval_size or cfg["input_size"][-1]
    return {
        "eval_size": size,
        "eval_resize_to": math.floor(size / cfg["crop_pct"]),
        "eval_resize": "squash" if cfg["crop_mode"] == "squash" else "short-side",
        "interpolation": cfg["interpolation"],
        "normalise": tuple(tuple(255 * value for value in cfg[name]) for name in ("mean", "std")),
    }


def _create_with(tensors: Tensors, name: str, num_classes: int, kwargs: dict[str, Any]) -> Any:
    """Return the model with `tensors`, except for the classifier if it is absent or has another number of classes.

    Raises:
        RuntimeError: the tensors do not fit, see `_misfits`; with the same number of classes all of them must.
    """
    if timm.get_pretrained_cfg(name) is None:  # the user's own model, into which timm does not load weights
        model = timm.create_model(name, num_classes=num_classes, **kwargs)
        model.load_state_dict(tensors)
        return model
    num_trained = num_classes_of(name, tensors)
    if num_trained is None:  # 0 classes are others than the model's, so that timm leaves its classifier as it is
        num_trained = 0 if _classifiers_of(name) else num_classes
    return _load_into(tensors, name, num_classes, num_trained, kwargs)


def _load_into(tensors: Tensors, name: str, num_classes: int, num_trained: int, kwargs: dict[str, Any]) -> Any:
    """Return timm's model with `tensors`, without their classifier if `num_trained`, its classes, are others."""
    # A copy, since timm removes the classifier from it.
    overlay = {"state_dict": dict(tensors), "num_classes": num_trained, "source": "timm"}
    model = timm.create_model(name, pretrained=True, num_classes=num_classes, pretrained_cfg_overlay=overlay, **kwargs)
    model.pretrained_cfg.update(state_dict=None)
    return model


def _misfits(message: str) -> list[str]:
    """Return the misfits in the error of torch's load_state_dict, each as "NAME THERE, HERE"; shapes first."""
    sizes = re.findall(r"size mismatch for (\S+): .*?Size\((\[.*?\])\).*?Size\((\[.*?\])\)", message)
    absent = [
        f"{key} absent {where}"
        for kind, where in (("Missing", "there"), ("Unexpected", "here"))
        for line in re.findall(rf"{kind} key\(s\) in state_dict: (.*)", message)
        for key in re.findall('"(.*?)"', line)
    ]
    return [f"{key} {theirs} there, {ours} here" for key, theirs, ours in sizes] + absent


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze weights whose name matches one of `patterns` (``*`` matches anything; or `ALL_BUT_HEAD`, `BATCH_NORM`).

    A BatchNorm with no trained weights stays in evaluation mode: it normalises with its running statistics and does not
    update them.

    Raises:
        ConfigError: a pattern matches nothing, or all of them everything.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        for name in _frozen_by(pattern, model, parameters):
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"model.freeze {patterns} leaves nothing to train: freeze fewer weights")
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and is_frozen(layer):
            layer.eval()
            layer.train = lambda mode=True, layer=layer: layer  # type: ignore[method-assign, misc]


def _frozen_by(pattern: str, model: nn.Module, names: Collection[str]) -> list[str]:
    """Return the `names` of a model's weights that one pattern of model.freeze means."""
    if pattern == BATCH_NORM:
        norms = {name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
        if not norms:
            raise ConfigError(f"model.freeze {BATCH_NORM}: the model has no BatchNorm, leave it out")
        return [name for name in names if name.rpartition(".")[0] in norms]
    if pattern == ALL_BUT_HEAD:
        heads = classifiers(getattr(model, "pretrained_cfg", None))
        matches = [name for name in names if name.rpartition(".")[0] not in heads]
        if len(matches) == len(names):
            raise ConfigError(
                f"model.freeze {ALL_BUT_HEAD}: timm does not know the classifier of this model: list the weights to "
                "freeze by name"
            )
        return matches
    return matching_names(names, pattern, "model.freeze")


def matching_names(names: Collection[str], pattern: str, setting: str) -> list[str]:
    """Return the `names` of weights that `pattern` matches, where ``*`` matches anything.

    Raises:
        ConfigError: there are none.
    """
    if matches := [name for name in names if fnmatch.fnmatchcase(name, pattern)]:
        return matches
    close = close_names(pattern, names, n=3, cutoff=0.3)
    raise ConfigError(
        f"{setting}: {pattern} matches no weight of the model; names are like {', '.join(close or list(names)[:3])}"
    )


def is_frozen(layer: nn.Module) -> bool:
    """Return whether a layer has weights, none of which is trained."""
    parameters = list(layer.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def num_classes_of(name: str, tensors: Tensors) -> int | None:
    """Return the number of classes of the classifier in `tensors`; None if there is no classifier, or none is known."""
    weights = [tensors.get(f"{classifier}.weight") for classifier in _classifiers_of(name)]
    return len(weights[0]) if weights and weights[0] is not None else None


def _classifiers_of(name: str) -> list[str]:
    """Return the names of the classifier layers of timm's model `name`; none if timm does not describe it."""
    cfg = timm.get_pretrained_cfg(name)
    return classifiers(cfg.to_dict() if cfg is not None else None)


def classifiers(cfg: dict[str, Any] | None) -> list[str]:
    """Return the names of the classifier layers in timm's description of a model; none if there is no description."""
    names = (cfg or {}).get("classifier") or []
    return [names] if isinstance(names, str) else list(names)


@torch.no_grad()
def initialise_classifier(model: nn.Module, *, scale: float, bias: float | None) -> None:
    """Multiply the weights and biases of the classifiers by `scale`, and then set their biases to `bias`.

    Raises:
        ConfigError: timm does not know the classifier, or it has no bias.
    """
    if scale == 1 and bias is None:
        return
    parameters = dict(model.named_parameters())
    for head in classifiers(getattr(model, "pretrained_cfg", None)) or [""]:
        weight, own_bias = parameters.get(f"{head}.weight"), parameters.get(f"{head}.bias")
        if weight is None or (bias is not None and own_bias is None):
            setting = (
                f"model.head_scale is {scale:g}" if weight is None and bias is None else f"model.head_bias is {bias}"
            )
            raise ConfigError(
                f"{setting}, but timm knows no classifier of {type(model).__name__} that has one: leave it out"
            )
        weight.mul_(scale)
        if own_bias is not None:
            own_bias.mul_(scale) if bias is None else own_bias.fill_(bias)
