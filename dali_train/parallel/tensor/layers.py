"""The layers of a block on a part of the activations. Parameters keep the names that timm gives them."""

import copy as copying
from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.drop import drop_path
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from dali_train.parallel.tensor.collectives import Axis, Splits, Step, copy, gather, part
from dali_train.parallel.tensor.modes import FEATURES, IMAGES, IN, LinearPlan


class ParallelLinear(nn.Module):
    """A linear layer whose weight and bias are DTensors and whose input and output are this rank's parts.

    Args:
        num_joined: how many layers are joined in its rows, 3 where they are queries, keys and values. Each rank gets a
            part of every one of them, so the rows of the DTensor are those of timm regrouped by rank: see `TimmOrder`.
    """

    def __init__(self, linear: nn.Linear, plan: LinearPlan, mesh: DeviceMesh, num_joined: int = 1) -> None:
        super().__init__()
        self.plan = plan
        self.num_joined = num_joined
        self.weight = _distributed(linear.weight, mesh, plan.placements(mesh.ndim), num_joined)
        self.bias = (
            None
            if linear.bias is None
            else _distributed(linear.bias, mesh, plan.bias_placements(mesh.ndim), num_joined)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = copy(_local(self.weight), self.plan.weight_copies)
        if self.plan.stored is not None:
            weight = gather(weight, IN, self.plan.stored)
        bias = None if self.bias is None else copy(_local(self.bias), self.plan.bias_copies)
        for step in self.plan.before:
            inputs = step(inputs)
        if not self.plan.after:
            return F.linear(inputs, weight, bias)
        outputs = F.linear(inputs, weight)
        for step in self.plan.after:
            outputs = step(outputs)
        return outputs if bias is None else outputs + bias.to(outputs.dtype)


class OnParts(nn.Module):
    """A layer with vectors for parameters, such as a norm, that all ranks hold and use on parts of the activations.

    Args:
        axes: along which each rank's gradient is a part of the sum.
        splits: of the parameters.
        before, after: what happens to the layer's input and output.
    """

    def __init__(
        self,
        layer: nn.Module,
        axes: Sequence[Axis],
        *,
        splits: Splits = (),
        before: Sequence[Step] = (),
        after: Sequence[Step] = (),
    ) -> None:
        super().__init__()
        for name, parameter in layer.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        bare = copying.copy(layer)  # what the layer computes, without parameters and hooks of its own
        bare._forward_pre_hooks, bare._forward_hooks = OrderedDict(), OrderedDict()
        bare._parameters = {
            name: nn.Parameter(p.detach().to("meta")) for name, p in layer.named_parameters(recurse=False)
        }
        self._layer = (bare,)  # in a tuple: not a child of this module
        self._axes, self._splits, self._before, self._after = tuple(axes), splits, tuple(before), tuple(after)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for step in self._before:
            inputs = step(inputs)
        parameters = {name: part(copy(p, self._axes), self._splits) for name, p in self.named_parameters(recurse=False)}
        outputs: torch.Tensor = torch.func.functional_call(self._layer[0], parameters, (inputs,))
        for step in self._after:
            outputs = step(outputs)
        return outputs


class ParallelDropout(nn.Module):
    """This rank's part of the mask that one process would draw: every rank draws the complete mask."""

    def __init__(self, dropout: nn.Dropout, splits: Splits, sizes: list[int]) -> None:
        super().__init__()
        self.p = dropout.p
        self._splits, self._sizes = splits, sizes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return inputs
        mask = F.dropout(inputs.new_ones(_complete_shape(inputs, self._splits, self._sizes)), self.p)
        return inputs * part(mask, self._splits)


class ParallelDropPath(nn.Module):
    """The same for stochastic depth, which drops a layer for entire images."""

    def __init__(self, layer: Any, splits: Splits, sizes: list[int]) -> None:
        super().__init__()
        self.drop_prob, self._scale_by_keep = layer.drop_prob, layer.scale_by_keep
        self._splits = tuple((dim, axis) for dim, axis in splits if dim == IMAGES)
        self._sizes = sizes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training or self.drop_prob == 0:
            return inputs
        num_images = _complete_shape(inputs, self._splits, self._sizes)[IMAGES]
        ones = inputs.new_ones((num_images,) + (1,) * (inputs.ndim - 1))
        return inputs * part(drop_path(ones, self.drop_prob, True, self._scale_by_keep), self._splits)


def _complete_shape(tensor: torch.Tensor, splits: Splits, sizes: list[int]) -> list[int]:
    """Without padding. Features are never padded."""
    shape = list(tensor.shape)
    for dim in {dim for dim, _ in splits}:
        shape[dim] = (
            shape[dim] * prod(axis.size for other, axis in splits if other == dim) if dim == FEATURES else sizes[dim]
        )
    return shape


def _distributed(
    parameter: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], num_joined: int
) -> nn.Parameter:
    """`parameter`, which every rank holds, as a DTensor of which this rank keeps only its part."""
    local = parameter.detach()
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            size, rank, dim = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim), placement.dim
            if dim == 0 and num_joined > 1:
                local = local.unflatten(0, (num_joined, -1)).chunk(size, dim=1)[rank].flatten(0, 1)
            else:
                local = local.chunk(size, dim=dim)[rank]
    local = local.clone(memory_format=torch.contiguous_format)  # the rest of the parameter is freed
    tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
