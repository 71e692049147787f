"""Where activations and weights lie in each mode, and what a linear layer exchanges.

The transformer's blocks alternate between two layouts: that of the residual stream, and that within attention and MLP,
between the two linear layers of each. `first` layers (queries, keys and values; the MLP's expansion) lead from the one
to the other, `second` layers (projection; contraction) back. Features within attention are heads.

| mode | mesh | residual stream | within | weight (out, in) |
|---|---|---|---|---|
| 1d | (t) | complete, or tokens by t | features by t | first: out by t; second: in by t |
| 2d | (r, c) | images by r, features by c | the same | out by c, in stored by r |
| 2.5d | (d, r, c) | images by d and r, features by c | the same | as 2d, a copy for each d |
| 3d | (a, b, c) | images by a and c, features by b | images by b and c, features by a | first: out by a, in by b,
stored by c |

3d's second layers have a and b exchanged. "Stored by" means that the columns are split further, and gathered before the
layer multiplies. 1d exchanges activations of full size, 2d activations and weights of 1/q of theirs, 2.5d activations
of 1/(d q), 3d gathers along two dimensions and sums over the third.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from dali_train.config.parallel import TensorMode, grid_sizes
from dali_train.errors import ConfigError
from dali_train.parallel.tensor.collectives import Axis, Splits, Step, copy, gather, padded, part, reduce, scatter

IMAGES, TOKENS, FEATURES = range(3)  # the dimensions of an activation
OUT, IN = range(2)  # and of a weight


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """How one linear layer is spread.

    `out`, `inside`: the axes that split the rows and the columns of the weight; `stored`: one that splits the columns
    further, gathered before use. `before` and `after`: what happens to the input and to the product.
    """

    out: Axis | None = None
    inside: Axis | None = None
    stored: Axis | None = None
    weight_copies: tuple[Axis, ...] = ()  # along these each rank's gradient of the weight is a part of the sum
    bias_copies: tuple[Axis, ...] = ()
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()

    def placements(self, num_axes: int) -> list[Placement]:
        """Of the weight; of the bias the same with Shard(1) replaced, see `bias_placements`."""
        found: list[Placement] = [Replicate()] * num_axes
        for axis, dim in ((self.out, OUT), (self.inside, IN), (self.stored, IN)):
            if axis is not None:
                found[axis.mesh_dim] = Shard(dim)
        return found

    def bias_placements(self, num_axes: int) -> list[Placement]:
        return [place if place == Shard(OUT) else Replicate() for place in self.placements(num_axes)]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a block is spread."""

    axes: tuple[Axis, ...]
    stream: Splits
    within: Splits
    first: LinearPlan
    second: LinearPlan
    norm_before: tuple[Step, ...] = ()
    norm_after: tuple[Step, ...] = ()
    stream_copies: tuple[Axis, ...] = ()  # the same for parameters that work on the residual stream, such as a norm's
    sizes: list[int] = field(default_factory=lambda: [0, 0, 0])  # of the complete activation now in the blocks

    @property
    def heads(self) -> int:
        """How many parts the features within attention and MLP are divided into."""
        return math.prod(axis.size for dim, axis in self.within if dim == FEATURES)


def make_grid(mesh: DeviceMesh, mode: TensorMode, depth: int | None = None) -> DeviceMesh:
    """The mesh of `mode` from the one-dimensional `mesh` of the ranks that share each layer. All ranks call it, once.

    Args:
        depth: mode 2.5d only: the number of squares.
    """
    if mode == "1d":
        return mesh
    sizes = grid_sizes(mode, mesh.size(), depth)
    assert math.prod(sizes) == mesh.size(), (mode, mesh.size(), depth)  # the config has checked it
    prefix = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "tensor"
    names = tuple(
        f"{prefix}_{name}" for name in (("a", "b", "c") if mode == "3d" else ("depth", "row", "column")[-len(sizes) :])
    )
    grid = mesh._unflatten(0, sizes, names)
    # DTensor computes a norm in one collective where the dimensions that a weight is divided along are a mesh of their
    # own.
    grid[names if mode == "3d" else names[-2:]]._flatten()
    return grid


def make_plan(mode: TensorMode, axes: tuple[Axis, ...], *, sequence_parallel: bool) -> Plan:
    """The layouts of `mode` on a mesh with these axes."""
    if mode == "1d":
        return _sequence_parallel(*axes) if sequence_parallel else _one_dimension(*axes)
    if sequence_parallel:
        raise ConfigError(
            f"parallel.tensor has sequence_parallel with mode {mode}: only mode 1d takes it, the others split images"
        )
    return _three_dimensions(*axes) if mode == "3d" else _two_dimensions(*axes)


def _one_dimension(t: Axis) -> Plan:
    return Plan(
        axes=(t,),
        stream=(),
        within=((FEATURES, t),),
        first=LinearPlan(out=t, before=(partial(copy, axes=(t,)),)),
        second=LinearPlan(inside=t, after=(partial(reduce, axis=t),)),
    )


def _sequence_parallel(t: Axis) -> Plan:
    """Norms, dropout and the residual additions on a part of the tokens. The number of tokens need not divide."""
    sizes = [0, 0, 0]

    def complete(tensor: torch.Tensor) -> torch.Tensor:
        return gather(tensor, TOKENS, t)[:, : sizes[TOKENS]]

    def share(tensor: torch.Tensor) -> torch.Tensor:
        return scatter(padded(tensor, TOKENS, t.size), TOKENS, t)

    return Plan(
        axes=(t,),
        stream=((TOKENS, t),),
        within=((FEATURES, t),),
        sizes=sizes,
        first=LinearPlan(out=t),
        second=LinearPlan(inside=t, after=(share,), bias_copies=(t,)),
        norm_after=(complete,),
        stream_copies=(t,),
    )


def _two_dimensions(*axes: Axis) -> Plan:
    *copies, r, c = axes
    images = tuple((IMAGES, axis) for axis in (*copies, r))
    whole = partial(gather, dim=FEATURES, axis=c)
    linear = {"out": c, "stored": r, "weight_copies": tuple(copies), "bias_copies": (*copies, r)}
    return Plan(
        axes=axes,
        stream=(*images, (FEATURES, c)),
        within=(*images, (FEATURES, c)),
        first=LinearPlan(**linear),  # type: ignore[arg-type]
        second=LinearPlan(**linear, before=(whole,)),  # type: ignore[arg-type]
        norm_before=(whole,),
        stream_copies=axes,
    )


def _three_dimensions(a: Axis, b: Axis, c: Axis) -> Plan:
    return Plan(
        axes=(a, b, c),
        stream=((IMAGES, a), (IMAGES, c), (FEATURES, b)),
        within=((IMAGES, b), (IMAGES, c), (FEATURES, a)),
        first=LinearPlan(
            out=a,
            inside=b,
            stored=c,
            bias_copies=(b, c),
            before=(partial(gather, dim=IMAGES, axis=a),),
            after=(partial(scatter, dim=IMAGES, axis=b),),
        ),
        second=LinearPlan(
            out=b,
            inside=a,
            stored=c,
            bias_copies=(a, c),
            before=(partial(gather, dim=IMAGES, axis=b),),
            after=(partial(scatter, dim=IMAGES, axis=a),),
        ),
        norm_before=(partial(gather, dim=FEATURES, axis=b),),
        norm_after=(partial(part, splits=((FEATURES, b),)),),
        stream_copies=(a, b, c),
    )
