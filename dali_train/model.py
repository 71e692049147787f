"""The network: any model that timm knows, with the same first weights on every rank."""

import difflib

import timm
import torch
from torch import nn

from dali_train.config import Config, ConfigError
from dali_train.data.draws import Purpose, torch_seed


def build_model(config: Config, num_classes: int, device: torch.device) -> nn.Module:
    """The model on `device` in float32 (float64 with precision.dtype fp64), initialised from data.seed.

    Raises:
        ConfigError: timm does not know the name, or the model refuses the arguments.
    """
    name = config.model.name
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise ConfigError(
            f"model.name is {name!r}, which timm does not know; "
            + (f"close: {', '.join(close)}" if close else "see timm.list_models()")
        )
    torch.manual_seed(torch_seed(config.data.seed, Purpose.INITIALISATION))
    try:
        with torch.device("meta" if device.type == "meta" else "cpu"):  # drawn on the CPU: the same on every kind of GPU
            model = timm.create_model(name, num_classes=num_classes, **config.model.kwargs)
    except (TypeError, AssertionError) as error:
        raise ConfigError(f"model.kwargs {config.model.kwargs} do not fit model.name {name}: {error}") from error
    model.to(
        device=device,
        dtype=torch.float64 if config.precision.dtype == "fp64" else torch.float32,
        memory_format=torch.channels_last if config.model.channels_last else torch.preserve_format,
    )
    if config.model.compile:
        model.compile()  # in place: the weights keep their names
    return model
