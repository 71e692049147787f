"""Dropout masks as a pure function of the micro-batch and the block, on any rank and however often it is computed.

The trainer seeds torch's generators once per micro-batch. That alone lets the masks of a block depend on what its
process has drawn before, so a pipeline stage without the first blocks would draw others. Here every block seeds the
generator when it is entered, by `block_seed`. What that needs to know of the micro-batch stands in the generator's
own seed, which activation checkpointing restores: recomputing a block of an earlier micro-batch draws the masks of that
micro-batch.
"""

from typing import Any, Literal

import torch
from torch import nn

from dali_train.config import ModelConfig
from dali_train.training.model import repeated_blocks

DropoutSeeding = Literal["block", "micro-batch"]
"""What the masks are a function of, besides the micro-batch."""

_RATES = ("p", "drop_prob", "prob", "drop_rate")  # where torch's and timm's layers keep the share that they drop


def choose_seeding(config: ModelConfig, saved: str | None) -> DropoutSeeding:
    """Return how a run seeds its dropout.

    A model that is compiled in one piece has no place between its blocks, so there it is one seed per micro-batch.

    Args:
        saved: how the run that it resumes did, so that its masks do not change; None for a new run.
    """
    return "micro-batch" if saved == "micro-batch" or config.compile == "model" else "block"


def seed_each_block(model: nn.Module, device: torch.device) -> None:
    """Let every repeated block of `model`, and every dropout layer outside them, seed the generator of `device` when
    entered.

    Call it for the complete model, before stages of a pipeline are cut out of it: a block keeps its number. A model
    that drops nothing is left as it is.

    Args:
        device: where the model will run; it may still be on the meta device.
    """
    if not drops(model):
        return
    blocks = repeated_blocks(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    layers = [m for m in model.modules() if id(m) not in inside and not list(m.children()) and _drops(m)]
    for number, module in enumerate([*blocks, *layers], 1):
        _seed_when_entered(module, number, device)


def seed_micro_batch(seed: int, device: torch.device) -> None:
    """Seed the generators of the host and of `device`, as ``torch.manual_seed`` would.

    That one notes its caller's stack for each kind of device which is not there: 0.5 ms per call without a GPU (torch
    2.15), this takes a microsecond.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        _generator(device).manual_seed(seed)


def drops(model: nn.Module) -> bool:
    """Return whether `model` draws masks in training: dropout of any kind, stochastic depth, dropped patches."""
    return any(_drops(module) for module in model.modules())


def _drops(module: nn.Module) -> bool:
    rates = [getattr(module, name, 0) for name in _RATES]
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


def block_seed(seed: int, number: int) -> int:
    """Return the seed of block `number` (from 1), from `seed` of its micro-batch or of any of the micro-batch's blocks.

    The upper 32 bits are the micro-batch's. The lower 32 depend on them and on the block: torch's generator on CPUs
    uses no others.
    """
    upper = seed >> 32
    return upper << 32 | (upper * 0x9E3779B1 + number * 0x85EBCA77) & 0xFFFFFFFF  # odd, so each bit of both counts


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _seed_when_entered(module: nn.Module, number: int, device: torch.device) -> None:
    def seed(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        # The compiler traces the hooks of a compiled block and cannot trace this, so there it happens around the code.
        if module.training and not torch.compiler.is_compiling():
            generator = _generator(device)
            generator.manual_seed(block_seed(generator.initial_seed(), number))

    module.register_forward_pre_hook(seed)
    compiled = module._compiled_call_impl
    if compiled is not None:

        def call(*inputs: Any, **named: Any) -> Any:
            seed(module, inputs)
            return compiled(*inputs, **named)

        module._compiled_call_impl = call
