"""The layout of ranks: the size of each dimension of parallelism, and this process's coordinate in it.

The micro-batches of a rank depend only on its data-parallel coordinate, not on the global rank: ranks with the same
coordinate (pipeline stages, tensor-parallel ranks) work on the same micro-batches.
"""

from dataclasses import dataclass, replace

from dali_train.config import ParallelConfig
from dali_train.errors import ConfigError
from dali_train.runtime.launch import Launch


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the mesh, slowest dimension first, and this process's rank in it.

    Tensor-parallel ranks are adjacent, because they communicate most and adjacent ranks share a host. `shard` ranks
    shard one copy of the model's state, and `replicas` is the number of copies; all of them compute different
    micro-batches.
    """

    rank: int
    pipeline: int = 1
    replicas: int = 1
    shard: int = 1
    tensor: int = 1

    @classmethod
    def from_config(cls, launch: Launch, parallel: ParallelConfig) -> "Layout":
        """Return the layout of all ranks of `launch` with the sizes in `parallel`; the number of replicas follows.

        Raises:
            ConfigError: the sizes do not divide the number of ranks.
        """
        pipeline = parallel.pipeline
        tensor = parallel.tensor.size
        data, rest = divmod(launch.world_size, pipeline * tensor)
        if rest:
            raise ConfigError(
                f"the number of ranks, {launch.world_size}, is not a multiple of parallel.pipeline {pipeline} x "
                f"parallel.tensor.size {tensor} = {pipeline * tensor} ranks per copy of the model: start a multiple of "
                f"{pipeline * tensor} ranks, or use smaller sizes"
            )
        layout = cls(rank=launch.rank, pipeline=pipeline, replicas=data, tensor=tensor)
        if parallel.shard == "none":
            return layout
        shard = parallel.shard_ranks or data
        if data % shard:
            raise ConfigError(
                f"parallel.shard_ranks {shard} does not divide the {data} data-parallel ranks ({layout.describe()}): "
                f"use a divisor of {data}, or leave it out"
            )
        return replace(layout, shard=shard, replicas=data // shard)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, self

    def describe(self) -> str:
        """Describe the layout, as in "8 ranks = pipeline 2 x data 2 x tensor 2, ..."."""
        sizes = {"pipeline": self.pipeline, "data": self.data_size, "tensor": self.tensor}
        factors = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "data")
        shard = f", state sharded over {self.shard} data-parallel ranks" if self.shard > 1 else ""
        return f"{self.world_size} ranks = {factors}{shard}"

    @property
    def splits_model(self) -> bool:
        """True if no rank holds the complete model and its optimizer state."""
        return self.pipeline * self.shard * self.tensor > 1

    @property
    def shards_weights(self) -> bool:
        """True if ranks hold parts of weights."""
        return self.shard * self.tensor > 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.replicas * self.shard * self.tensor

    @property
    def data_size(self) -> int:
        """The number of data-parallel coordinates, which share the micro-batches of a step."""
        return self.replicas * self.shard

    @property
    def data_rank(self) -> int:
        """The data-parallel coordinate of this process: it computes micro-batches data_rank, data_rank + data_size,
        ..."""
        return self.rank // self.tensor % self.data_size

    def num_local_micro_batches(self, num_micro_batches: int) -> int:
        """Return how many of a step's `num_micro_batches` this process's data-parallel coordinate computes."""
        return len(range(self.data_rank, num_micro_batches, self.data_size))

    def describe_idle(self, num_micro_batches: int) -> str:
        """Return the idle time to append to the number of ranks, as in "57 ranks: 25.1% idle; 64 would have none".

        Some ranks wait while others compute one more of the `num_micro_batches`. Empty if they divide evenly."""
        if num_micro_batches % self.data_size == 0:
            return ""
        divisors = [size for size in range(1, num_micro_batches + 1) if num_micro_batches % size == 0]
        nearest = min(divisors, key=lambda size: (abs(size - self.data_size), -size))
        share = 1 - num_micro_batches / self.data_size / -(-num_micro_batches // self.data_size)
        fitting = nearest * self.world_size // self.data_size
        return f": {share:.1%} idle; {fitting} would have none"

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.tensor * self.data_size)

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def is_first_of_coordinate(self) -> bool:
        """True on one of the ranks that share a data-parallel coordinate."""
        return self.pipeline_rank == 0 and self.tensor_rank == 0
