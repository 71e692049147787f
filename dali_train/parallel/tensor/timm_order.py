"""timm's order of a tensor-parallel model's rows, which is that of checkpoints."""

import torch
from torch import nn

from dali_train.parallel.tensor.layers import ParallelLinear


class TimmOrder:
    """Between the order of the DTensors of `tensor_parallel` and timm's, for parameters and for whatever has their
    shape, such as an optimizer's moments or a moving average.

    timm joins queries, keys and values in the rows of one weight. Here each rank holds its heads' rows of all three, so
    in the DTensor they stand rank by rank. All other parameters are in timm's order anyway.

    Args:
        model: after `tensor_parallel`. Names are those of its `named_parameters`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._joined: dict[str, tuple[int, int]] = {}  # parameter -> (layers joined in its rows, ranks that share them)
        for module_name, module in model.named_modules():
            if isinstance(module, ParallelLinear) and module.num_joined > 1 and module.plan.out is not None:
                for name, _ in module.named_parameters(recurse=False):
                    self._joined[f"{module_name}.{name}"] = module.num_joined, module.plan.out.size

    def __contains__(self, name: str) -> bool:
        """Whether the rows of parameter `name` are in another order here."""
        return name in self._joined

    def to_timm(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The complete `tensor` of parameter `name`, as DTensor.full_tensor gives it, with its rows in timm's order."""
        if name not in self._joined or tensor.ndim == 0:
            return tensor
        num_joined, num_ranks = self._joined[name]
        return tensor.unflatten(0, (num_ranks, num_joined, -1)).transpose(0, 1).flatten(0, 2)

    def from_timm(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse: what distribute_tensor takes with the DTensor's mesh and placements."""
        if name not in self._joined or tensor.ndim == 0:
            return tensor
        num_joined, num_ranks = self._joined[name]
        return tensor.unflatten(0, (num_joined, num_ranks, -1)).transpose(0, 1).flatten(0, 2)
