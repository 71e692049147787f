"""model.name and model.kwargs, which a config file, a command line or somebody else's config.json gives to timm.

timm checks few of its arguments. So the model is built on the meta device first, where it has no weights: what fails
there, or would take too much memory, becomes one line that names the argument.
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import psutil
import timm
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from dali_train.config.check import Extra, close_names, load_all
from dali_train.errors import ConfigError
from dali_train.text import printable, shortened

# Arguments of timm.create_model that are not part of the architecture. With some it loads files or fetches URLs, and a
# config.json may come from an untrusted source.
_NOT_FOR_THE_MODEL = {
    *inspect.signature(timm.create_model).parameters,
    "pretrained_strict",
    "pretrained_filter_fn",
    "pretrained_model_args",
} - {"model_name", "kwargs"}
_SETTINGS = {"device": "run.device", "dtype": "precision.dtype"}  # set instead of the argument of that name
_LARGEST = 65_536  # a number in model.kwargs: over the side of any image, the width or depth of any model
_LARGEST_MULTIPLIER = 10  # of EfficientNet's depth or width, 5.3 in the largest; timm takes seconds for thousands
_MAX_MODULES = 3_000  # timm's deepest models have 2,000


EXTRA_MODELS = Extra[object]("dali_train.extras.models")
"""A module that registers models with timm when it is imported."""


def is_model(name: str) -> bool:
    """Return whether timm has a model of that name: one of its own, of extras, or one that a config file registered."""
    load_all([EXTRA_MODELS])  # in any case: a model of a config file may be built on one of them
    return timm.is_model(name)


def check_name(name: str, field: str) -> None:
    """Check that timm has a model of that name.

    Raises:
        ConfigError: it has none.
    """
    if not is_model(name):
        close = close_names(name, timm.list_models(), n=3)
        raise ConfigError(
            f"{field} is {name!r}, which timm does not know; "
            + (f"close: {', '.join(close)}" if close else "see timm.list_models()")
        )


def build_on_meta(name: str, num_classes: int, kwargs: dict[str, Any]) -> nn.Module:
    """Return the model without weights, on the meta device.

    Raises:
        ConfigError: one of `kwargs` is not an argument of the model, or it cannot be built with its value.
    """
    _check_arguments(kwargs)
    try:
        with _Budget():
            model = _build(name, num_classes, kwargs)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        unknown = re.search("unexpected keyword argument '(.*)'", reason)
        if unknown and unknown[1] in kwargs:
            raise ConfigError(_describe_unknown(unknown[1], name)) from error
        wrong = _describe_wrong(name, num_classes, kwargs)
        if wrong is None and unknown:  # a user's own model, since timm's take them
            raise ConfigError(
                f"model.name is {name}: {_shown(reason)}. timm passes {unknown[1]} to every model: let its function "
                "take **kwargs, and leave out what the class does not take"
            ) from error
        if wrong is None:
            raise  # not the fault of `kwargs`
        reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        raise ConfigError(
            f"{wrong}, with which timm cannot build {name} ({_shown(reason)}): use other values"
        ) from error
    return model


def check_host_memory(model: nn.Module, name: str, kwargs: Mapping[str, Any]) -> None:
    """Check that this host has memory for the weights of `model`, which is on the meta device.

    Raises:
        ConfigError: it has not.
    """
    needed = 4 * sum(parameter.numel() for parameter in model.parameters())  # float32
    available = psutil.virtual_memory().total
    if needed > available:
        raise ConfigError(
            f"model.name {name} with model.kwargs {dict(kwargs)} has weights of {needed / 1e9:,.0f} GB, and this host "
            f"has {available / 1e9:,.0f} GB of memory: use smaller values in model.kwargs, or a smaller model"
        )


def argument_names(model_class: type[nn.Module]) -> list[str]:
    """Return the names of the arguments of `model_class` and the classes it is derived from."""
    return [name for cls in model_class.__mro__[:-1] for name in inspect.signature(cls).parameters]


def is_timms(model: nn.Module) -> bool:
    """Return whether `model` is timm's or this package's, so that what it raises is the fault of its arguments."""
    return type(model).__module__.startswith(("timm.", "dali_train."))


def _check_arguments(kwargs: Mapping[str, Any]) -> None:
    for name, value in kwargs.items():
        if name in _NOT_FOR_THE_MODEL:
            raise ConfigError(
                f"model.kwargs has {name}, which is not an argument of the model: set model.weights to load weights"
            )
        if name in _SETTINGS:
            raise ConfigError(f"model.kwargs has {name}: leave it out, and set {_SETTINGS[name]}")
        largest = _LARGEST_MULTIPLIER if name.endswith("_multiplier") else _LARGEST
        if _largest_number(value) > largest:
            raise ConfigError(f"model.kwargs.{name} is {_shown(value)}: use numbers of at most {largest:,} there")


def _largest_number(value: Any) -> float:
    """Return the largest magnitude of a number in nested lists, tuples and dicts; 0 if there is none."""
    left: list[Any] = [value]
    largest: float = 0
    while left:
        one = left.pop()
        if isinstance(one, list | tuple):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, int | float):
            largest = max(largest, abs(one))
    return largest


class _Budget(TorchFunctionMode):
    """Within, models are built that have at most `_MAX_MODULES` modules together: a depth of 50,000 takes minutes.

    Tensors on the meta device are not initialised, which takes most of the time there, and does nothing.

    Raises:
        ValueError: there are more.
    """

    _INITIALISE = {
        *(
            getattr(torch.Tensor, name)
            for name in ("add_", "clamp_", "div_", "erfinv_", "fill_", "mul_", "normal_", "sub_", "uniform_", "zero_")
        ),
        *(nn.init.constant_, nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_),
    }

    def __init__(self) -> None:
        super().__init__()
        self._num_modules = 0

    def __enter__(self) -> "_Budget":
        self._handle = register_module_module_registration_hook(self._count)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._INITIALISE:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)

    def _count(self, *_: Any) -> None:
        self._num_modules += 1
        if self._num_modules > _MAX_MODULES:
            raise ValueError(f"the model would have more than {_MAX_MODULES:,} modules")


def _build(name: str, num_classes: int, kwargs: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = timm.create_model(name, num_classes=num_classes, **kwargs)
    if not isinstance(model, nn.Module):
        raise TypeError(f"it makes a {type(model).__name__}")
    _check_rates(model)
    return model


def _check_rates(model: nn.Module) -> None:
    """Raise ValueError for a rate of dropout or stochastic depth that its layer accepts and then fails with."""
    for module in model.modules():
        # A ResNet and timm's classifiers drop out in their forward pass, at a rate that they keep as drop_rate.
        kept_rates = (getattr(module, name, None) for name in ("drop_prob", "drop_rate"))
        for rate in (module.p if isinstance(module, _DropoutNd) else None, *kept_rates):
            if isinstance(rate, int | float) and not 0 <= rate <= 1:
                raise ValueError(f"its layers would have a drop rate of {rate}, which is not from 0 to 1")


def _describe_wrong(name: str, num_classes: int, kwargs: dict[str, Any]) -> str | None:
    """Return "model.kwargs.NAME is VALUE" for each argument without which the model can be built, or all arguments if
    there is no such; None if it cannot be built without any of them."""

    def fails(some: Mapping[str, Any]) -> bool:
        try:
            _build(name, num_classes, some)
        except Exception:
            return True
        return False

    with _Budget():
        if not kwargs or fails({}):
            return None
        ordered = sorted(
            kwargs, key=lambda key: _largest_number(kwargs[key]), reverse=True
        )  # the likeliest first, while the budget lasts
        wrong = [
            key
            for key in ordered
            if len(kwargs) == 1 or not fails({other: kwargs[other] for other in kwargs if other != key})
        ]
    texts = [f"model.kwargs.{key} is {_shown(kwargs[key])}" for key in wrong]
    return " and ".join(texts) or f"model.kwargs is {_shown(kwargs)}"


def _describe_unknown(argument: str, name: str) -> str:
    with torch.device("meta"), _Budget():
        known = argument_names(type(timm.create_model(name)))
    close = close_names(argument, known, n=3)
    remedy = f"use {' or '.join(f'model.kwargs.{each}' for each in close)}" if close else "leave it out"
    return f"model.kwargs.{argument} is not an argument of {name}: {remedy}"


def _shown(value: Any) -> str:
    return shortened(printable(value if isinstance(value, str) else repr(value)), 200)
