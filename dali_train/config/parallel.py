"""Parallelism: pipeline stages, tensor parallelism, sharded and replicated data parallelism."""

from dataclasses import dataclass, field
from math import isqrt, prod
from typing import Annotated, Literal

from dali_train.config.check import OVER_0, Count, Rule, refuse, require, section

TensorMode = Literal["1d", "2d", "2.5d", "3d"]


@section("parallel.tensor")
@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """Tensor parallelism: each linear layer is sharded over ranks, which compute the same micro-batches."""

    mode: TensorMode = "1d"
    """1d: attention sharded by heads and the MLP by hidden units. 2d, 2.5d, 3d: weights and activations sharded over a
    square, several squares or a cube of ranks."""
    size: Count = 1
    """Ranks that each layer is sharded over. 1: no tensor parallelism."""
    depth: Count | None = None
    """The number of squares in mode 2.5d: size is depth x q x q."""
    sequence_parallel: bool = False
    """With mode 1d, also shard norms, dropout and residual additions by tokens: less memory."""

    def __post_init__(self) -> None:
        mode, size, depth = self.mode, self.size, self.depth
        name = f"parallel.tensor.size is {size} with mode {mode}"
        remedy = "only mode 2.5d has a depth, leave it out"
        refuse(depth is not None and mode != "2.5d", self, "depth mode", remedy)
        remedy = "only mode 1d supports it, the others shard the images of a micro-batch; set it to false"
        refuse(self.sequence_parallel and mode != "1d", self, "sequence_parallel mode", remedy)
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

    @property
    def grid_sizes(self) -> tuple[int, ...]:
        """The sizes of the dimensions of the tensor-parallel mesh."""
        if self.mode == "1d":
            return (self.size,)
        if self.mode == "3d":
            return (round(self.size ** (1 / 3)),) * 3
        side = isqrt(self.size // (self.depth or 1))
        return (self.depth, side, side) if self.depth is not None else (side, side)

    @property
    def image_shards(self) -> int:
        """The number of shards of a micro-batch's images."""
        sizes = self.grid_sizes
        return {"1d": 1, "2d": sizes[0], "2.5d": prod(sizes[:2]), "3d": sizes[0] ** 2}[self.mode]


def _near(size: int, power: int) -> str:
    side = 1
    while (side + 1) ** power < size:
        side += 1
    return f"{side**power} or {(side + 1) ** power}"


@section("parallel")
@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks = pipeline x tensor.size x data; the number of data-parallel ranks follows."""

    pipeline: Count = 1
    """Ranks of the pipeline: each has one or more stages (groups of blocks), and the micro-batches of a step pass
    through all stages."""
    num_chunks: Count = 1
    """Stages per rank. 1: the 1F1B schedule (one forward, one backward). More: interleaved 1F1B, with a smaller
    pipeline bubble."""
    shard: Literal["none", "optimizer", "gradients", "full"] = "none"
    """State that is sharded over data-parallel ranks instead of replicated. optimizer: the optimizer's state, and the
    weights between steps (ZeRO 1). gradients: gradients too (ZeRO 2). full: weights are gathered block by block when
    they are needed (ZeRO 3)."""
    shard_ranks: Count | None = None
    """Ranks that one copy of the state is sharded over. None: all data-parallel ranks."""
    tensor: TensorConfig = field(default_factory=TensorConfig)
    """Tensor parallelism: parallel.tensor.mode, size and depth."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of DDP's all-reduce. bf16 halves the traffic. Ranks still accumulate in float32, but the mean has rounding
    errors (0.3 % on 2 ranks, 0.43 % on 4) that depend on the number of ranks; resuming on the same number stays
    bit-identical."""
    timeout_s: Annotated[float, Rule("a number of seconds over 0, at most 30 days", OVER_0, 30 * 86_400)] = 600
    """The run ends if a collective waits longer than this for a rank."""

    @property
    def schedule(self) -> Literal["1f1b", "interleaved"]:
        """The pipeline schedule."""
        return "interleaved" if self.num_chunks > 1 else "1f1b"

    @property
    def num_stages(self) -> int:
        """The number of stages, over all ranks of the pipeline."""
        return self.pipeline * self.num_chunks

    @property
    def kind(self) -> str:
        """The first setting that splits the model over ranks, with its value; empty if none does."""
        kinds = {"pipeline": (self.pipeline, 1), "tensor.size": (self.tensor.size, 1), "shard": (self.shard, "none")}
        return next((f"parallel.{name} {value}" for name, (value, off) in kinds.items() if value != off), "")

    @property
    def shares_images(self) -> bool:
        """True if several ranks compute the same micro-batches."""
        return self.pipeline * self.tensor.size > 1

    @property
    def smallest_world_size(self) -> int:
        return self.pipeline * self.tensor.size * (self.shard_ranks or 1)

    def check_micro_batch(self, num_images: int) -> None:
        """Check that a micro-batch of `num_images` can be split.

        Raises:
            ConfigError: tensor parallelism shards the images, but their number is not divisible.
        """
        shards = self.tensor.image_shards
        require(
            num_images % shards == 0,
            f"batch.micro_batch is {num_images} with parallel.tensor.size {self.tensor.size} and parallel.tensor.mode "
            f"{self.tensor.mode}: its images are split into {shards} shards, use a multiple of {shards}",
        )

    def __post_init__(self) -> None:
        remedy = "set parallel.pipeline to the number of ranks in the pipeline, at least 2"
        refuse(self.num_chunks > 1 and self.pipeline == 1, self, "num_chunks pipeline", remedy)
        remedy = "set parallel.shard to the state to shard, or leave it out"
        refuse(self.shard_ranks is not None and self.shard == "none", self, "shard_ranks shard", remedy)
        remedy = "only mode 1d can be sharded as well; set parallel.shard none, or parallel.tensor.mode 1d"
        grid = self.tensor.mode != "1d" and self.tensor.size > 1
        refuse(self.shard != "none" and grid, self, "shard tensor.mode", remedy)
        require(
            not self.kind or self.grad_reduce_dtype == "fp32",
            f"parallel.grad_reduce_dtype is {self.grad_reduce_dtype} with {self.kind}, which does not use DDP: set it "
            "to fp32",
        )
