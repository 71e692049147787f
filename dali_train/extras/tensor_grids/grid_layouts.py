"""Tensor parallelism on grids of ranks: parallel.tensor.mode 2d, 2.5d and 3d, as in ColossalAI.

Weights and activations are sharded over one or several squares, or a cube of ranks:

| mode | mesh | residual stream | inside attention and MLP | weight (out, in) |
|---|---|---|---|---|
| 2d | (row, column) | images by row, features by column | the same | out by column, in stored by row |
| 2.5d | (depth, row, column) | images by depth and row, features by column | the same | as 2d, replicated by depth |
| 3d | (a, b, c) | images by a and c, features by b | images by b and c, features by a | out by a, in by b, c |

In the second layers of 3d, which write to the residual stream, a and b are swapped. "Stored by" means that columns are
sharded further, and gathered before the matrix product; in 3d they are stored by c. Features inside attention are
heads. Each layer communicates 1/q of its activations and weights (2d), 1/(depth q) of its activations (2.5d), or has
all-gathers along two dimensions and a reduce-scatter along the third (3d).
"""

import math
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from dali_train.config import TensorConfig
from dali_train.parallel.tensor import (
    FEATURES,
    IMAGES,
    IN,
    OUT,
    LocalParallel,
    OneProcessMasks,
    fused_placements,
    fused_rows,
)


def gather(tensor: torch.Tensor, dim: int, axis: DeviceMesh) -> torch.Tensor:
    """All-gather the shards along `axis`, a mesh of one dimension; the gradient is reduce-scattered."""
    sharded = DTensor.from_local(tensor, axis, [Shard(dim)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def scatter(tensor: torch.Tensor, dim: int, axis: DeviceMesh) -> torch.Tensor:
    """Reduce-scatter summands along `axis`, a mesh of one dimension; the gradient is all-gathered."""
    summands = DTensor.from_local(tensor, axis, [Partial()], run_check=False)
    return summands.redistribute(placements=[Shard(dim)]).to_local()


_Along = tuple[int, int]  # a dimension of an activation, and one of the mesh


@dataclass(frozen=True, kw_only=True)
class LinearLayout:
    """How one linear layer is sharded."""

    weight: tuple[Placement, ...]
    stored_by: int  # the mesh dimension along which columns are gathered before the matrix product
    gather_input: _Along | None = None
    scatter_output: _Along | None = None

    @property
    def bias(self) -> tuple[Placement, ...]:
        return tuple(placement if placement.is_shard(OUT) else Replicate() for placement in self.weight)


@dataclass(frozen=True, kw_only=True)
class GridLayout:
    """How a block's activations and linear layers are sharded: `first` layers read from the residual stream, `second`
    layers write to it."""

    names: tuple[str, ...]  # of the mesh's dimensions
    residual: tuple[Placement, ...]
    inside: tuple[Placement, ...]
    first: LinearLayout
    second: LinearLayout

    def make_mesh(self, mesh: DeviceMesh, tensor: TensorConfig) -> DeviceMesh:
        """Return the ranks of `mesh`, which has one dimension, as a grid. All ranks call this together."""
        assert math.prod(tensor.grid_sizes) == mesh.size(), (tensor, mesh)
        prefix = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "tensor"
        names = tuple(f"{prefix}_{name}" for name in self.names)
        grid = mesh._unflatten(0, tensor.grid_sizes, names)
        # DTensor can all-reduce over several dimensions at once only if they are flattened into a mesh of their own.
        for dims in chain.from_iterable(combinations(names, length) for length in range(2, len(names) + 1)):
            grid[dims]._flatten()
        return grid

    def shard(self, block: Any, grid: DeviceMesh) -> None:
        """Shard timm's `block` over the ranks of `grid`, in place. Its weights must be equal on all ranks.

        The block then takes and returns local shards as plain tensors, with the placements `residual`.
        """
        replicated = {name: [Replicate()] * grid.ndim for name in ("weight", "bias", "gamma")}
        features = _axis(grid, self.residual.index(Shard(FEATURES)))
        heads = _axis(grid, self.inside.index(Shard(FEATURES)))

        def complete_features(x: torch.Tensor) -> torch.Tensor:
            return gather(x, FEATURES, features)

        def own_features(x: torch.Tensor) -> torch.Tensor:
            return x.chunk(features.size(), dim=-1)[features.get_local_rank()]

        norm = LocalParallel(
            replicated,
            prepare_input=complete_features,
            prepare_output=own_features if self.inside != self.residual else None,
        )
        scale = LocalParallel(replicated, prepare_parameter=lambda name, gamma: own_features(gamma))
        masks, masks_inside = OneProcessMasks(self.residual), OneProcessMasks(self.inside)
        plan: dict[str, ParallelStyle] = {
            "norm1": norm,
            "attn.qkv": _linear(grid, self.first, heads),
            "attn.q_norm": LocalParallel(replicated),
            "attn.k_norm": LocalParallel(replicated),
            "attn.proj": _linear(grid, self.second),
            "attn.proj_drop": masks,
            "ls1": scale,
            "drop_path1": masks,
            "norm2": norm,
            "mlp.fc1": _linear(grid, self.first),
            "mlp.drop1": masks_inside,
            "mlp.fc2": _linear(grid, self.second),
            "mlp.drop2": masks,
            "ls2": scale,
            "drop_path2": masks,
        }
        for name, style in plan.items():
            layer = block.get_submodule(name)
            if not isinstance(layer, nn.Identity):
                style._apply(layer, grid)


_SQUARE = LinearLayout(weight=(Shard(IN), Shard(OUT)), stored_by=0)
_SQUARES = LinearLayout(weight=(Replicate(), Shard(IN), Shard(OUT)), stored_by=1)

GRID_2D = GridLayout(
    names=("row", "column"),
    residual=(Shard(IMAGES), Shard(FEATURES)),
    inside=(Shard(IMAGES), Shard(FEATURES)),
    first=_SQUARE,
    second=replace(_SQUARE, gather_input=(FEATURES, 1)),
)
GRID_2_5D = GridLayout(
    names=("depth", "row", "column"),
    residual=(Shard(IMAGES), Shard(IMAGES), Shard(FEATURES)),
    inside=(Shard(IMAGES), Shard(IMAGES), Shard(FEATURES)),
    first=_SQUARES,
    second=replace(_SQUARES, gather_input=(FEATURES, 2)),
)
GRID_3D = GridLayout(
    names=("a", "b", "c"),
    residual=(Shard(IMAGES), Shard(FEATURES), Shard(IMAGES)),
    inside=(Shard(FEATURES), Shard(IMAGES), Shard(IMAGES)),
    first=LinearLayout(
        weight=(Shard(OUT), Shard(IN), Shard(IN)),
        stored_by=2,
        gather_input=(IMAGES, 0),
        scatter_output=(IMAGES, 1),
    ),
    second=LinearLayout(
        weight=(Shard(IN), Shard(OUT), Shard(IN)),
        stored_by=2,
        gather_input=(IMAGES, 1),
        scatter_output=(IMAGES, 0),
    ),
)


def _linear(grid: DeviceMesh, layout: LinearLayout, fused_by: DeviceMesh | None = None) -> ParallelStyle:
    """Return the style of a linear layer.

    Args:
        fused_by: for attn.qkv, the axis of the grid that shards heads.
    """
    placements = {"weight": layout.weight, "bias": layout.bias}

    def parameter(name: str, shard: torch.Tensor) -> torch.Tensor:
        if name == "weight":
            return gather(shard, IN, _axis(grid, layout.stored_by))
        if fused_by is not None:
            shard = fused_rows(shard, fused_by)
        if layout.scatter_output is not None and _axis(grid, layout.scatter_output[1]).get_local_rank() > 0:
            shard = shard * 0  # only one of the summands includes the bias
        return shard

    def activation(x: torch.Tensor) -> torch.Tensor:
        if layout.gather_input is None:
            return x
        dim, mesh_dim = layout.gather_input
        return gather(x, dim, _axis(grid, mesh_dim))

    def output(x: torch.Tensor) -> torch.Tensor:
        if layout.scatter_output is None:
            return x
        dim, mesh_dim = layout.scatter_output
        return scatter(x, dim, _axis(grid, mesh_dim))

    return LocalParallel(
        placements if fused_by is None else fused_placements(layout.weight),
        prepare_parameter=parameter,
        prepare_input=activation,
        prepare_output=output,
    )


def _axis(grid: DeviceMesh, dim: int) -> DeviceMesh:
    """Return dimension `dim` of `grid` as a mesh of its own."""
    assert grid.mesh_dim_names is not None
    return grid[grid.mesh_dim_names[dim]]
