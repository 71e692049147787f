"""The device mesh of a run whose model is split over ranks, and arithmetic on DTensors.

Whatever can be computed shard by shard is computed on the local shards (`local`), without torch's distributed
operators, which refuse to mix meshes and take much host time.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

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
