"""A moving average of the weights: tensors by name, with the same placements as the model's, for all kinds of
parallelism.

It is a function of the step and of tensors that checkpoints hold. The update rule is that of timm's ModelEmaV3, which
keeps a copy of the module instead.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from dali_train.config import EmaConfig
from dali_train.parallel.mesh import laid_out_like, local
from dali_train.parallel.shardwise import Shardwise


def ema_decay(config: EmaConfig, step: int) -> float:
    """Return the decay applied at the end of optimizer step number `step` (from 0)."""
    assert config.decay is not None
    if step == 0:
        return 0.0
    return min(1 - (1 + step) ** (-2 / 3), config.decay) if config.warmup else config.decay


class Ema:
    """The average of everything in the model's state dict: weights and buffers. Integers are copied.

    Args:
        model: not wrapped, on its device, with the weights that the run starts or resumes from.
    """

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        self._config = config
        live = model.state_dict()  # the model's own tensors, which are only ever written in place
        self._averages = _copies(live)
        floats = [name for name, tensor in live.items() if tensor.is_floating_point()]
        others = [name for name in live if name not in set(floats)]
        self._live_floats, self._live_others = (
            [local(live[name]) for name in floats],
            [local(live[name]) for name in others],
        )
        averages = self._averages
        self._floats, self._others = (
            [local(averages[name]) for name in floats],
            [local(averages[name]) for name in others],
        )

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average at the end of optimizer step number `step` (from 0), without making the host wait."""
        torch._foreach_lerp_(self._floats, self._live_floats, 1 - ema_decay(self._config, step))
        if self._others:
            torch._foreach_copy_(self._others, self._live_others)

    @contextmanager
    def weights_in(self, model: nn.Module) -> Iterator[None]:
        """Swap the averages into the memory of the model's weights for the duration of the context, so that compiled
        code and CUDA graphs stay valid."""
        before = _copies(model.state_dict())
        _copy(self._averages, model)
        try:
            yield
        finally:
            _copy(before, model)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the averages by the names of the weights, for a checkpoint."""
        return self._averages

    @torch.no_grad()
    def load(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Take `averages` from a checkpoint."""
        for name, tensor in self._averages.items():
            tensor.copy_(laid_out_like(tensor, averages[name]))


@torch.no_grad()
def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with Shardwise():
        return {name: tensor.clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _copy(tensors: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    weights = model.state_dict()
    with Shardwise():
        for name, tensor in weights.items():
            tensor.copy_(tensors[name])
