"""Everything in half precision over float32 weights, without autocast's exceptions: ColossalAI's NAIVE mode.

The model's parameters stay float32: they are what the optimizer, checkpoints and moving averages know, and gradients
gather in float32. While a module computes, it finds copies in half precision in their place.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let `model` compute in `dtype` from its first layer to its logits, which it gives as float32.

    Call it before the model is divided or wrapped. Batch normalisation keeps its parameters, as it keeps its
    statistics.
    """
    for module in model.modules():
        if module._parameters and not isinstance(module, _BatchNorm):
            _compute_with_copies(module, dtype)
    model.register_forward_pre_hook(lambda module, inputs: tuple(_cast(value, dtype) for value in inputs))
    model.register_forward_hook(lambda module, inputs, output: _cast(output, torch.float32))


def _compute_with_copies(module: nn.Module, dtype: torch.dtype) -> None:
    kept: list[dict[str, Any]] = []

    def put_copies(module: nn.Module, inputs: Any) -> None:
        kept.append(module._parameters)
        module._parameters = {name: _cast(parameter, dtype) for name, parameter in module._parameters.items()}

    def take_back(module: nn.Module, inputs: Any, output: Any) -> None:
        module._parameters = kept.pop()

    module.register_forward_pre_hook(put_copies)
    module.register_forward_hook(take_back, always_call=True)  # also after an error


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(one, dtype) for one in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
