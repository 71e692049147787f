"""Parallel styles, in the sense of `torch.distributed.tensor.parallel`, that torch lacks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from dali_train.parallel.shardwise import Shardwise

IMAGES, TOKENS, FEATURES = range(3)  # the dimensions of an activation
OUT, IN = range(2)  # the dimensions of a weight
NUM_FUSED = 3  # queries, keys and values, which timm fuses in the rows of attn.qkv

LocalMap = Callable[[str, torch.Tensor], torch.Tensor]


def gather(tensor: torch.Tensor, dim: int, axis: DeviceMesh) -> torch.Tensor:
    """All-gather the shards along `axis`, a mesh of one dimension; the gradient is reduce-scattered."""
    sharded = DTensor.from_local(tensor, axis, [Shard(dim)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def scatter(tensor: torch.Tensor, dim: int, axis: DeviceMesh) -> torch.Tensor:
    """Reduce-scatter summands along `axis`, a mesh of one dimension; the gradient is all-gathered."""
    summands = DTensor.from_local(tensor, axis, [Partial()], run_check=False)
    return summands.redistribute(placements=[Shard(dim)]).to_local()


class LocalParallel(ParallelStyle):
    """Keep a layer's parameters as DTensors and compute it on plain tensors, this rank's shards.

    Where a parameter is replicated, each rank's gradient is a summand of the total (Partial).

    Args:
        placements: of each parameter, by name.
        prepare_parameter: maps the local shard of a parameter to the tensor that the layer uses.
        prepare_input, prepare_output: map the layer's input and output.
    """

    def __init__(
        self,
        placements: Mapping[str, Sequence[Placement]],
        *,
        prepare_parameter: LocalMap | None = None,
        prepare_input: Callable[[Any], torch.Tensor] | None = None,
        prepare_output: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.placements = placements
        self.prepare_parameter = prepare_parameter
        self.prepare_input, self.prepare_output = prepare_input, prepare_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), device_mesh, self.placements[name], src_data_rank=None)
            with Shardwise():
                module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        compute = module.forward

        def forward(x: Any) -> torch.Tensor:
            parameters = module._parameters
            try:
                module._parameters = {name: self._local(name, parameter) for name, parameter in parameters.items()}
                output: torch.Tensor = compute(x if self.prepare_input is None else self.prepare_input(x))
            finally:  # recomputation may stop in the middle of a layer
                module._parameters = parameters
            return output if self.prepare_output is None else self.prepare_output(output)

        module.forward = forward
        return module

    def _local(self, name: str, parameter: Any) -> Any:
        if parameter is None:
            return None
        gradients = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
        shard: torch.Tensor = parameter.to_local(grad_placements=gradients)
        return shard if self.prepare_parameter is None else self.prepare_parameter(name, shard)


def fused_placements(weight: Sequence[Placement]) -> dict[str, Sequence[Placement]]:
    """Return the placements of attn.qkv's parameters, given those of an unfused `weight`.

    A rank gets its heads' rows of queries, keys and values. The bias stays replicated: FSDP can shard a vector only
    along its rows, which DTensor cannot combine with this placement.
    """
    strided = _StridedShard(OUT, split_factor=NUM_FUSED)
    return {
        "weight": [strided if placement.is_shard(OUT) else placement for placement in weight],
        "bias": [Replicate()] * len(weight),
    }


def fused_rows(bias: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return the rows of attn.qkv's complete bias for this rank's heads along `axis`."""
    by_rank = bias.unflatten(0, (NUM_FUSED, axis.size(), -1))
    return by_rank[:, axis.get_local_rank()].flatten()


class OneProcessMasks(ParallelStyle):
    """Dropout or stochastic depth of a sharded activation, with the same masks as in a single process.

    Every rank draws the complete mask from the same seed, and uses its shard of it.

    Args:
        placements: of an activation given as a plain tensor, with shards of equal size; a DTensor has its own.
    """

    def __init__(self, placements: Sequence[Placement] = ()) -> None:
        self.placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        draw = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not module.training:
                return x
            placed = x
            if not isinstance(placed, DTensor):
                placed = DTensor.from_local(x.detach(), device_mesh, self.placements, run_check=False)
            dims = range(x.ndim) if isinstance(module, nn.Dropout) else (IMAGES,)
            shape = [size if dim in dims else 1 for dim, size in enumerate(placed.shape)]
            complete = draw(torch.ones(shape, dtype=x.dtype, device=x.device))
            placements = [p if any(map(p.is_shard, dims)) else Replicate() for p in placed.placements]
            # Not by `distribute_tensor`, which the compiler cannot trace.
            replicated = DTensor.from_local(complete, placed.device_mesh, run_check=False)
            mask = replicated.redistribute(placements=placements)
            return x * (mask if placed is x else mask.to_local())

        module.forward = forward
        return module
