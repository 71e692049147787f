"""The device mesh of a run whose model is split over ranks, and arithmetic on DTensors.

torch's own operators on DTensors refuse to mix meshes, and search for the best placements of every operation and shape,
in a time that grows exponentially with the dimensions of the mesh and dominates the first step. Whatever can be
computed shard by shard is therefore computed on the local shards: by `local`, or in optimizers and their hooks by the
mode `Shardwise`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from dali_train.parallel.layout import Layout

DIMENSIONS = ("pipeline", "replicas", "shard", "tensor")


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the mesh of `layout`, with a process group for each dimension. All ranks call this together."""
    return init_device_mesh(device.type, tuple(getattr(layout, name) for name in DIMENSIONS), mesh_dim_names=DIMENSIONS)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `tensor`, in the same memory and detached; a plain tensor is returned as it is."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def laid_out_like(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value`, which is complete on every rank, with the memory format, device and placements of `target`, or
    unchanged if the shapes differ.

    The last bits of a norm depend on the order of summation, and so on the memory format.
    """
    if value.shape != target.shape:
        return value
    if isinstance(target, DTensor):
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    return torch.empty_like(target, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def in_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` redistributed so that every rank's shard is a contiguous block of rows, as DCP needs. All ranks
    call this together.

    timm's attention has one matrix for queries, keys and values. Of each of the three a rank holds some heads: with 12
    rows on 2 ranks, the first has rows 0, 1, 4, 5, 8, 9 (`_StridedShard`), and DCP would record only the block 0, 1.
    Blocks are 0 to 5 and 6 to 11. FSDP's own strided placements, of rows that another mesh dimension shards too, are
    blocks already.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    is_fused = [
        isinstance(placement, _StridedShard)
        and not any(other.is_shard(placement.dim) for other in placements[dim + 1 :])
        for dim, placement in enumerate(placements)
    ]
    if not any(is_fused):
        return tensor

    def with_fused(replacement: Placement, others: Sequence[Placement]) -> list[Placement]:
        return [replacement if fused else other for fused, other in zip(is_fused, others, strict=True)]

    # torch 2.11 cannot redistribute a strided shard. As (3, 4, ...), with queries, keys and values along a dimension of
    # their own, the rows are an ordinary shard of the second dimension.
    num_fused = next(p.split_factor for p in placements if isinstance(p, _StridedShard))
    by_layer = DTensor.from_local(
        tensor.to_local().unflatten(0, (num_fused, -1)),
        mesh,
        [Shard(p.dim + 1) if isinstance(p, Shard | _StridedShard) else p for p in placements],
        run_check=False,
    )
    gathered = by_layer.redistribute(placements=with_fused(Replicate(), by_layer.placements))
    # Now every rank has all rows, as (12, ...) in their own order again, and keeps its block of them.
    whole = DTensor.from_local(
        gathered.to_local().flatten(0, 1), mesh, with_fused(Replicate(), placements), run_check=False
    )
    return whole.redistribute(placements=with_fused(Shard(0), placements))


def total_norm(gradients: Sequence[torch.Tensor], layout: Layout, device: torch.device) -> torch.Tensor:
    """Return the 2-norm of the gradients of all stages and shards: 0-dimensional, on `device`, the same bits on every
    rank. All ranks call this together."""
    ranks_per_stage = layout.world_size // layout.pipeline
    by_shards: dict[int, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        shards = 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            shards = prod(size for size, placement in sizes if not placement.is_replicate())
        by_shards[shards].append(local(gradient))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for shards, tensors in by_shards.items():
        squares = torch.stack(torch._foreach_norm(tensors)).double().square()
        # Each shard is replicated on ranks_per_stage / shards ranks; the sum over all ranks counts it once.
        total += squares.sum() * (shards / ranks_per_stage)
    dist.all_reduce(total)
    return total.sqrt().to(gradients[0].dtype if gradients else torch.float32)


def reduce_partial_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """All-reduce Partial gradients in place. All ranks call this together."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def average_gradients(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the ranks of `group`, which all call this together."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
        assert work is not None
        work.wait()
    torch._foreach_div_(gradients, dist.get_world_size(group))


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
