"""Sharded data parallelism (ZeRO 1 to 3) by torch's FSDP2: each rank keeps a shard of weights and optimizer state.

A block's weights are gathered before they are needed, and gradients are reduce-scattered. Between steps every parameter
is a DTensor with its usual name.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dali_train.errors import ConfigError

Level = Literal["optimizer", "gradients", "full"]


def shard_model(model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, level: Level) -> None:
    """Shard the parameters of `model` over the mesh's dimension "shard", in place. Those on the host move to the mesh's
    device block by block, so that no device ever holds all of them.

    Raises:
        ConfigError: weights that tensor parallelism has sharded already are not divisible by the number of ranks.
    """
    data = mesh["replicas", "shard"] if mesh["replicas"].size() > 1 else mesh["shard"]
    place = partial(_placement, num_shards=mesh["shard"].size())
    for module in (*blocks, model):
        fully_shard(module, mesh=data, reshard_after_forward=level == "full", shard_placement_fn=place)


def _placement(parameter: nn.Parameter, num_shards: int) -> Shard | None:
    """Return the first dimension that divides evenly; None if none does, so that FSDP pads the first one.

    Always sharding the first one would put position embeddings, (1, tokens, width), on a single rank."""
    if not isinstance(parameter, DTensor):
        return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size % num_shards == 0), None)
    if not any(isinstance(placement, _StridedShard) for placement in parameter.placements):
        return None
    if parameter.shape[1] % num_shards:  # rows of a strided shard cannot be sharded again
        raise ConfigError(
            f"parallel.shard has {num_shards} ranks to shard the model's {parameter.shape[1]} features, as tensor "
            "parallelism has the rows of its weights, and they do not divide them: set parallel.shard_ranks to a "
            f"divisor of {parameter.shape[1]}"
        )
    return Shard(1)


def prepare_backward(model: nn.Module, level: Level, *, last: bool) -> None:
    """Set whether a backward pass reshards weights and gradients; after the `last` of a step, all are sharded."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last or level != "optimizer")
    model.set_reshard_after_backward(last or level == "full")
