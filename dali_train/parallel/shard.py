"""Sharded data parallelism (ZeRO 1 to 3) by torch's FSDP2: each rank keeps a shard of weights and optimizer state.

A block's weights are gathered before they are needed, and gradients are reduce-scattered. Between steps every parameter
is a DTensor with its usual name.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dali_train.errors import ConfigError

Level = Literal["optimizer", "gradients", "full"]

# Layers whose weights autocast casts. Subclasses may use them in float32 first, for example to standardise them.
_COMPUTE_IN_HALF = (nn.Linear, nn.Conv2d)


def shard_model(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, level: Level, half: torch.dtype | None = None
) -> None:
    """Shard the parameters of `model` over the mesh's dimension "shard", in place. Those on the host move to the mesh's
    device block by block, so that no device ever holds all of them.

    Args:
        half: the half-precision dtype that linear layers and convolutions compute in, if any. Their parameters are then
            cast before the all-gather instead of after it, which halves its bytes and changes no bit of the result.
            All others, and gradients, travel in their own dtype. Without effect before torch 2.15, where FSDP has one
            dtype for all parameters of a block.

    Raises:
        ConfigError: weights that tensor parallelism has sharded already are not divisible by the number of ranks.
    """
    data = mesh["replicas", "shard"] if mesh["replicas"].size() > 1 else mesh["shard"]
    placement_of = partial(_placement, num_shards=mesh["shard"].size())
    policy = MixedPrecisionPolicy()
    if half is not None and hasattr(policy, "param_dtype_override_fn"):
        layers = [layer for layer in model.modules() if type(layer) in _COMPUTE_IN_HALF]
        # Not the parameters themselves: each is freed when it is sharded.
        cast = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
        chosen: dict[str, Any] = {  # not keywords, which a type checker refuses where torch is older
            "param_dtype_override_fn": lambda parameter: half if id(parameter) in cast else parameter.dtype
        }
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False, **chosen)
    for module in (*blocks, model):
        fully_shard(
            module, mesh=data, reshard_after_forward=level == "full", shard_placement_fn=placement_of, mp_policy=policy
        )


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
