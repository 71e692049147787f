"""How many parameters one of the ranks has that share each layer, without any rank: for plans."""

import math
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Shard

from dali_train.config.parallel import TensorMode
from dali_train.parallel.tensor.collectives import Axis
from dali_train.parallel.tensor.modes import make_plan


def parameters_per_rank(model: nn.Module, mode: TensorMode, sizes: tuple[int, ...]) -> int:
    """Of a VisionTransformer, or a stage of one, before `tensor_parallel`."""
    axes = tuple(Axis(dim, size, 0, None) for dim, size in enumerate(sizes))  # type: ignore[arg-type]  # nothing communicates
    plan = make_plan(mode, axes, sequence_parallel=False)
    count = sum(parameter.numel() for parameter in model.parameters())

    def elsewhere(parameter: Any, placements: list[Placement]) -> int:
        parts = math.prod(size for size, place in zip(sizes, placements, strict=True) if isinstance(place, Shard))
        return 0 if parameter is None else parameter.numel() - parameter.numel() // parts

    blocks: Any = model.get_submodule("blocks").children()
    for block in blocks:
        layers = (
            (block.attn.qkv, plan.first),
            (block.attn.proj, plan.second),
            (block.mlp.fc1, plan.first),
            (block.mlp.fc2, plan.second),
        )
        for linear, spread in layers:
            count -= elsewhere(linear.weight, spread.placements(len(sizes)))
            count -= elsewhere(linear.bias, spread.bias_placements(len(sizes)))
    return count
