"""Layers under the invariant: dropout and BatchNorm whose results do not depend on the number of ranks.

Dropout masks are a pure function of the micro-batch and the block, on any rank and in every recomputation. The trainer
seeds torch's generators once per micro-batch. With that alone, a block's masks would depend on the blocks computed
before it in the same process, so a pipeline stage without the first blocks would draw different masks. Therefore every
block seeds the generator when it is entered, by `block_seed`. It derives its seed from the generator's current seed,
which identifies the micro-batch and which activation checkpointing restores: recomputing a block of an earlier
micro-batch draws the masks of that micro-batch.

BatchNorm's running statistics are updated once per step, see `RunningStatistics`.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dali_train.config import ModelConfig
from dali_train.training.model import repeated_blocks
from dali_train.training.pretrained import is_frozen

DropoutSeeding = Literal["block", "micro-batch"]
"""What the masks are a function of, besides the micro-batch."""

_RATES = ("p", "drop_prob", "prob", "drop_rate")  # torch's and timm's attributes for the dropout rate


def choose_seeding(config: ModelConfig, saved: str | None) -> DropoutSeeding:
    """Return how a run seeds its dropout.

    A model compiled as a whole cannot be seeded between its blocks, so it gets one seed per micro-batch.

    Args:
        saved: the choice of the run that is resumed, which is kept so that the masks do not change; None for a new run.
    """
    return "micro-batch" if saved == "micro-batch" or config.compiles_as_a_whole else "block"


def seed_each_block(model: nn.Module, device: torch.device) -> None:
    """Let every repeated block of `model`, and every dropout layer outside them, seed the generator of `device` when
    entered.

    Call it on the complete model, before it is cut into pipeline stages, so that each block keeps its number. A model
    without dropout is left as it is.

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

    ``torch.manual_seed`` records the call stack for each kind of device that is not present: 0.5 ms per call without a
    GPU (torch 2.15). This takes a microsecond.
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
    """Return the seed of block `number` (from 1), given the `seed` of its micro-batch or of any block in it.

    The upper 32 bits are the micro-batch's. The lower 32 bits depend on them and on the block, because torch's CPU
    generator uses only these.
    """
    upper = seed >> 32
    return upper << 32 | (upper * 0x9E3779B1 + number * 0x85EBCA77) & 0xFFFFFFFF  # odd, so each bit of both counts


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _seed_when_entered(module: nn.Module, number: int, device: torch.device) -> None:
    def seed(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module.training:
            generator = _generator(device)
            generator.manual_seed(block_seed(generator.initial_seed(), number))

    module.register_forward_pre_hook(seed)


class RunningStatistics:
    """BatchNorm's running mean and variance, updated once per step with the mean over all its micro-batches.

    Otherwise each rank would average in its own micro-batches one after the other, and evaluation would depend on the
    number of ranks. A step with non-finite statistics is skipped, because one infinite value would make them NaN
    forever. Frozen layers are not updated.
    """

    def __init__(self, model: nn.Module) -> None:
        self._running: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._weights: list[float] = []
        for layer in model.modules():
            if not isinstance(layer, _BatchNorm) or layer.momentum is None or is_frozen(layer):
                continue
            for running in (layer.running_mean, layer.running_var):
                if running is not None:
                    self._running.append(running)
                    self._weights.append(layer.momentum)
            if layer.num_batches_tracked is not None:
                self._counts.append(layer.num_batches_tracked)
            layer.momentum = 1.0  # a forward pass leaves the micro-batch's own statistics there
        self._before = [torch.empty_like(t) for t in self._running]
        self._num_steps = [torch.empty_like(t) for t in self._counts]  # counted instead of micro-batches of one rank
        self._sums = [torch.zeros_like(t) for t in self._running]
        self.begin()

    def begin(self) -> None:
        """Continue from the statistics that the model has."""
        if self._running:
            torch._foreach_copy_(self._before, self._running)
        if self._counts:
            torch._foreach_copy_(self._num_steps, self._counts)

    def add_micro_batch(self) -> None:
        """Record the statistics of a micro-batch, after its forward pass."""
        if self._running:
            torch._foreach_add_(self._sums, self._running)

    def finish_step(self, num_micro_batches: int) -> None:
        """Update the statistics after the step's last micro-batch, on all ranks; `num_micro_batches` of all of them."""
        if not self._running:
            return
        flat = torch.cat([t.flatten() for t in self._sums])
        if dist.is_initialized():
            dist.all_reduce(flat)
        flat /= num_micro_batches
        # The whole step is skipped on all ranks; the sum shows whether any micro-batch was not finite.
        flat = torch.where(flat.isfinite().all(), flat, torch.cat([t.flatten() for t in self._before]))
        means = flat.split([t.numel() for t in self._sums])
        for running, before, mean, weight in zip(self._running, self._before, means, self._weights, strict=True):
            running.copy_(before.lerp(mean.view_as(before), weight))
        torch._foreach_copy_(self._before, self._running)
        torch._foreach_add_(self._num_steps, 1)
        torch._foreach_copy_(self._counts, self._num_steps)
        torch._foreach_zero_(self._sums)
