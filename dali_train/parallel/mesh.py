"""The one device mesh of a run whose model is divided among ranks, and arithmetic on tensors that lie on it.

A DTensor knows its mesh and which part of it this rank holds. Whatever can be computed part by part is computed on the
parts (`local`), without torch's distributed operators: they refuse to mix meshes, and cost the host a lot.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from dali_train.parallel.layout import Layout

DIMENSIONS = ("pipeline", "replicas", "shard", "tensor")


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The ranks of `layout` with a process group for each dimension. All ranks call this together."""
    return init_device_mesh(device.type, tuple(getattr(layout, name) for name in DIMENSIONS), mesh_dim_names=DIMENSIONS)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`, in the same memory and without a history; a plain tensor is its own part."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def laid_out_like(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, complete on every rank, in the memory format, on the device and in the shards of `target`, if it has its
    shape.

    A norm's last bits depend on the order of its summands, and so on the memory format.
    """
    if value.shape != target.shape:
        return value
    if isinstance(target, DTensor):
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    return torch.empty_like(target, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def total_norm(gradients: Sequence[torch.Tensor], layout: Layout, device: torch.device) -> torch.Tensor:
    """The 2-norm of the gradients of all stages, wherever their parts are: 0-dimensional, on `device`, the same bits on
    every rank. All ranks call this together."""
    ranks_per_stage = layout.world_size // layout.pipeline
    by_parts: dict[int, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        parts = 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            parts = prod(size for size, placement in sizes if not placement.is_replicate())
        by_parts[parts].append(local(gradient))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parts, tensors in by_parts.items():
        squares = torch.stack(torch._foreach_norm(tensors)).double().square()
        # Every part lies on as many ranks as there are copies of all parts; the sum over all ranks counts it once.
        total += squares.sum() * (parts / ranks_per_stage)
    dist.all_reduce(total)
    return total.sqrt().to(gradients[0].dtype if gradients else torch.float32)


def average_gradients(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Each gradient becomes the mean over the ranks of `group`, which all call this together."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
        assert work is not None
        work.wait()
    torch._foreach_div_(gradients, dist.get_world_size(group))
