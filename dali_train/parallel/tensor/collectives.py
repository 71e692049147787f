"""Collectives with a gradient, along one dimension of the mesh.

Each pair is its own transpose: where forward hands a tensor to several ranks, backward sums what they send back, and
the other way around. A dimension of one rank costs nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh, as this rank sees it."""

    mesh_dim: int
    size: int
    rank: int
    group: dist.ProcessGroup


Splits = tuple[tuple[int, Axis], ...]
"""How an activation (images, tokens, features) is split: tensor dimensions with the axis they are split along, the
outermost split first where one dimension has several."""


def axes_of(mesh: DeviceMesh) -> tuple[Axis, ...]:
    return tuple(Axis(dim, mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim)) for dim in range(mesh.ndim))


def copy(tensor: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """What all ranks along `axes` hold, each of which computes a part of the result: their gradients are summed."""
    for axis in axes:
        if axis.size > 1:
            tensor = _Copy.apply(tensor, axis)
    return tensor


def reduce(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over the axis, which all of its ranks then use in the same way."""
    return _Reduce.apply(tensor, axis) if axis.size > 1 else tensor


def gather(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """The parts of all ranks along `axis`, joined in `dim`; each rank computes a part of the result, so gradients are
    summed."""
    return _Gather.apply(tensor, dim, axis) if axis.size > 1 else tensor


def scatter(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """This rank's part, in `dim`, of the sum over `axis`."""
    return _Scatter.apply(tensor, dim, axis) if axis.size > 1 else tensor


def enter(tensor: torch.Tensor, splits: Splits) -> torch.Tensor:
    """This rank's part of a tensor that all ranks hold. Dimensions that do not divide are padded with zeros at the
    end."""
    return _Enter.apply(tensor, splits) if splits else tensor


def leave(tensor: torch.Tensor, splits: Splits, sizes: Sequence[int]) -> torch.Tensor:
    """The complete tensor, without padding, from the parts. All ranks then use it in the same way.

    Args:
        sizes: of the complete tensor.
    """
    return _Leave.apply(tensor, splits, tuple(sizes)) if splits else tensor


def part(tensor: torch.Tensor, splits: Splits) -> torch.Tensor:
    """What `enter` gives, as a tensor of its own and with the ordinary gradient: for masks, and where gradients are
    summed later."""
    for dim in sorted({dim for dim, _ in splits}):
        tensor = padded(tensor, dim, prod(axis.size for other, axis in splits if other == dim))
    for dim, axis in splits:
        length = tensor.shape[dim] // axis.size
        tensor = tensor.narrow(dim, axis.rank * length, length)
    return tensor.clone() if splits else tensor


def padded(tensor: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """With zeros at the end of `dim`, so that `multiple` divides it."""
    missing = -tensor.shape[dim] % multiple
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, missing)) if missing else tensor


def _joined(tensor: torch.Tensor, splits: Splits, sizes: Sequence[int]) -> torch.Tensor:
    for dim, axis in reversed(splits):
        tensor = _all_gather(tensor, dim, axis)
    for dim in {dim for dim, _ in splits}:
        tensor = tensor.narrow(dim, 0, sizes[dim])
    return tensor.contiguous()


def _all_reduce(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def _all_gather(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    if axis.size == 1:
        return tensor
    own = tensor.movedim(dim, 0).contiguous()
    together = own.new_empty((axis.size * own.shape[0], *own.shape[1:]))
    dist.all_gather_into_tensor(together, own, group=axis.group)
    return together.movedim(0, dim)


def _reduce_scatter(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    together = tensor.movedim(dim, 0).contiguous()
    own = together.new_empty((together.shape[0] // axis.size, *together.shape[1:]))
    dist.reduce_scatter_tensor(own, together, group=axis.group)
    return own.movedim(0, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(gradient, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        return _all_reduce(tensor, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
        ctx.dim, ctx.axis = dim, axis
        return _all_gather(tensor, dim, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _reduce_scatter(gradient, ctx.dim, ctx.axis), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
        ctx.dim, ctx.axis = dim, axis
        return _reduce_scatter(tensor, dim, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_gather(gradient, ctx.dim, ctx.axis), None, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Splits) -> torch.Tensor:
        ctx.splits, ctx.sizes = splits, tensor.shape
        return part(tensor, splits)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _joined(gradient, ctx.splits, ctx.sizes), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Splits, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.splits = splits
        return _joined(tensor, splits, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return part(gradient, ctx.splits), None, None
