"""Tensor parallelism on grids of ranks: `parallel.tensor.mode` 2d, 2.5d and 3d, and their settings."""

from dataclasses import dataclass
from math import isqrt, prod
from typing import ClassVar, Literal

from dali_train.config.check import Conflict, Count, OneDimension, require


@dataclass(frozen=True, kw_only=True)
class GridSettings(OneDimension):
    """How the section parallel.tensor arranges its ranks."""

    mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    """1d: attention sharded by heads and the MLP by hidden units. 2d, 2.5d, 3d: weights and activations sharded over a
    square, several squares or a cube of ranks."""
    depth: Count | None = None
    """The number of squares in mode 2.5d: size is depth x q x q."""

    def __post_init__(self) -> None:
        mode, size, depth = self.mode, self.size, self.depth
        name = f"parallel.tensor.size is {size} with mode {mode}"
        if mode == "2d":
            require(isqrt(size) ** 2 == size, f"{name}, which needs q x q ranks: use {_near(size, 2)}")
        elif mode == "3d":
            require(round(size ** (1 / 3)) ** 3 == size, f"{name}, which needs q x q x q ranks: use {_near(size, 3)}")
        elif mode == "2.5d":
            require(depth is not None, f"{name}, which needs a depth: set parallel.tensor.depth, such as 2 for size 8")
            assert depth is not None
            side = isqrt(size // depth)
            require(
                depth * side**2 == size,
                f"{name} and depth {depth}, which needs depth x q x q ranks: use {depth * max(1, side) ** 2} or "
                f"{depth * (side + 1) ** 2}",
            )

    CONFLICTS: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            names=("depth", "mode"),
            when=lambda tensor: tensor.depth is not None and tensor.mode != "2.5d",
            remedy="only mode 2.5d has a depth, leave it out",
        ),
        Conflict(
            names=("sequence_parallel", "mode"),
            when=lambda tensor: tensor.sequence_parallel and tensor.mode != "1d",
            remedy="only mode 1d supports it, the others shard the images of a micro-batch; set it to false",
        ),
    )
    CONFLICTS_OF_RUN: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            names=("parallel.shard", "parallel.tensor.mode"),
            when=lambda config: (
                config.parallel.shard != "none"
                and config.parallel.tensor.mode != "1d"
                and config.parallel.tensor.size > 1
            ),
            remedy="only mode 1d can be sharded as well; set parallel.shard none, or parallel.tensor.mode 1d",
        ),
    )

    @property
    def grid_sizes(self) -> tuple[int, ...]:
        if self.mode == "1d":
            return (self.size,)
        if self.mode == "3d":
            return (round(self.size ** (1 / 3)),) * 3
        side = isqrt(self.size // (self.depth or 1))
        return (self.depth, side, side) if self.depth is not None else (side, side)

    @property
    def image_shards(self) -> int:
        sizes = self.grid_sizes
        return {"1d": 1, "2d": sizes[0], "2.5d": prod(sizes[:2]), "3d": sizes[0] ** 2}[self.mode]


def _near(size: int, power: int) -> str:
    side = 1
    while (side + 1) ** power < size:
        side += 1
    return f"{side**power} or {(side + 1) ** power}"
