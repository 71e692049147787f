"""Activation checkpointing: recomputing activations in the backward pass instead of keeping them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dali_train.config import ModelConfig
from dali_train.errors import ConfigError

_aten = torch.ops.aten
# Most of a block's arithmetic and about a third of its activations. Everything else is cheap to compute again.
KEPT_RESULTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def recompute_activations(model: nn.Module, blocks: list[nn.Module], config: ModelConfig) -> None:
    """Apply model.activation_checkpointing to `model`. Call this before the model is compiled.

    Args:
        blocks: the repeated blocks of the model.

    Raises:
        ConfigError: the model does not support it.
    """
    setting = config.activation_checkpointing
    if setting == "selective":
        if not blocks:
            raise ConfigError(
                f"model.activation_checkpointing is selective, but {config.name} has no repeated blocks: set it to "
                "true or false"
            )
        for block in blocks:
            block.forward = partial(_selectively, block, block.forward)
    elif setting:
        timm_model: Any = model
        try:
            timm_model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError) as error:
            raise ConfigError(
                f"model.activation_checkpointing is true, but timm's {config.name} does not support it: set it to "
                "false, and use a smaller batch.micro_batch if memory is short"
            ) from error


def _selectively(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **named)
    contexts = partial(
        create_selective_checkpoint_contexts, KEPT_RESULTS if _draws_nothing_in_attention(block) else KEPT_RESULTS[:3]
    )
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)


def _draws_nothing_in_attention(block: nn.Module) -> bool:
    """Return whether attention draws no dropout, which a kept result would not redraw, shifting all later draws."""
    dropout = getattr(getattr(block, "attn", None), "attn_drop", None)
    return getattr(dropout, "p", 0) == 0
