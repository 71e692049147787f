"""Arithmetic on DTensors shard by shard, for optimizers and their hooks.

torch's own operators on DTensors search for the best placements of every operation and shape, in a time that grows
exponentially with the dimensions of the mesh and dominates the first step. Element-wise operations need no search.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dali_train.parallel.mesh import local

_COPIES = {
    "_to_copy",
    "alias",
    "copy_",
    "detach",
    "empty_like",
    "fill_",
    "full_like",
    "ones_like",
    "zero_",
    "zeros_like",
}
_REDUCTIONS = {"linalg_vector_norm", "mean", "norm", "sum"}


class Shardwise(TorchDispatchMode):
    """A mode in which operations on DTensors are computed on this rank's shards.

    Element-wise operations on numbers and tensors with the same placements communicate nothing. A 2-norm, sum or mean
    of a whole tensor is all-reduced and returns a plain tensor, so all ranks must compute it together.

    Raises:
        NotImplementedError: for any other operation on a DTensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        name = func._schema.name.removeprefix("aten::")
        of_lists = name.startswith(("_foreach_", "_fused_"))
        if not sharded and not of_lists:
            return func(*args, **kwargs)
        assert not any(placement.is_partial() for tensor in sharded for placement in tensor.placements), func
        result = func(*map(_shards, args), **{key: _shards(value) for key, value in kwargs.items()})
        if name == "_foreach_norm" and args[1:] in ((), (2,)):
            return [_norm(tensor, norm) for tensor, norm in zip(args[0], result, strict=True)]
        if of_lists:
            return _placed(args[0], result)
        first = sharded[0]
        if name in _REDUCTIONS and result.ndim == 0:
            if name in ("sum", "mean"):
                total = _sum_over_shards(first, local(first).sum())
                return total / first.numel() if name == "mean" else total
            if args[1:2] in ((), (2,)):
                return _norm(first, result)
        elif (name in _COPIES or torch.Tag.pointwise in func.tags) and all(
            tensor.placements == first.placements if isinstance(tensor, DTensor) else tensor.numel() == 1
            for tensor in tensors
        ):
            if name.endswith("_"):
                return args[0]
            return kwargs["out"] if "out" in kwargs else _placed(first, result)
        raise NotImplementedError(f"{func} of a tensor that is sharded over ranks")


def _shards(value: Any) -> Any:
    if isinstance(value, DTensor):
        return local(value)
    return [_shards(one) for one in value] if isinstance(value, list | tuple) else value


def _placed(like: Any, result: Any) -> Any:
    """Return `result`, computed from the shards of `like`, as a DTensor; in lists, tensor by tensor."""
    if isinstance(like, DTensor):
        mesh, placements = like.device_mesh, like.placements
        return DTensor.from_local(result, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    if isinstance(result, list | tuple):
        return [_placed(*pair) for pair in zip(like, result, strict=True)]
    return result


def _norm(tensor: torch.Tensor, norm_of_shard: torch.Tensor) -> torch.Tensor:
    return _sum_over_shards(tensor, norm_of_shard.double().square()).sqrt().to(norm_of_shard.dtype)


def _sum_over_shards(tensor: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' `summand`, counting ranks with the same shard of `tensor` once."""
    if isinstance(tensor, DTensor):
        for dim, placement in enumerate(tensor.placements):
            if not placement.is_replicate() and tensor.device_mesh.size(dim) > 1:
                dist.all_reduce(summand, group=tensor.device_mesh.get_group(dim))
    return summand
