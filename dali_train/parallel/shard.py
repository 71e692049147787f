"""Sharded data parallelism (ZeRO 1 to 3) by torch's FSDP2: each rank keeps a part of the weights and of the optimizer's
state.

A block's weights are gathered before they are needed, and gradients are scattered as they are summed. Between steps
every parameter is a DTensor under the name that it always had.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

Level = Literal["optimizer", "gradients", "full"]


def shard_model(model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, level: Level) -> None:
    """Divide the parameters of `model` among the ranks of the mesh's dimension "shard", in place. Those on the host
    move to the mesh's device block by block, so that no device ever holds all of them."""
    data = mesh["replicas", "shard"] if mesh["replicas"].size() > 1 else mesh["shard"]
    place = partial(_placement, num_parts=mesh["shard"].size())
    for module in (*blocks, model):
        fully_shard(module, mesh=data, reshard_after_forward=level == "full", shard_placement_fn=place)


def _placement(parameter: nn.Parameter, num_parts: int) -> Shard | None:
    """The first dimension that divides evenly; by default, where there is none, the first one, with parts of different
    sizes. Of position embeddings, (1, tokens, width), a single rank would have all."""
    if isinstance(parameter, DTensor):
        return None
    return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size % num_parts == 0), None)


def prepare_backward(model: nn.Module, level: Level, *, last: bool) -> None:
    """Before a backward pass: what becomes of weights and gradients in it. `last` of the step, all end up divided."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last or level != "optimizer")
    model.set_reshard_after_backward(last or level == "full")
