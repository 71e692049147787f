"""The global batch and the micro-batches it consists of."""

from dataclasses import dataclass

from dali_train.config.check import Count, require, section
from dali_train.errors import ConfigError


@section("batch")
@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    global_batch: Count
    """Images per optimizer step, over all ranks and all accumulated micro-batches."""
    micro_batch: Count
    """Images per forward and backward pass on one rank."""

    def __post_init__(self) -> None:
        require(
            self.global_batch % self.micro_batch == 0,
            f"batch.global_batch {self.global_batch} is not a multiple of batch.micro_batch {self.micro_batch}; "
            f"use {max(1, round(self.global_batch / self.micro_batch)) * self.micro_batch}",
        )

    def grad_accum_steps(self, data_parallel_size: int) -> int:
        """Micro-batches that each of `data_parallel_size` ranks accumulates per step.

        Raises:
            ConfigError: the global batch does not divide.
        """
        images = self.micro_batch * data_parallel_size
        if self.global_batch % images:
            nearest = sorted({max(1, self.global_batch // images) * images, -(-self.global_batch // images) * images})
            num_micro_batches = self.global_batch // self.micro_batch
            ranks = [n for n in range(1, num_micro_batches + 1) if num_micro_batches % n == 0]
            fitting = sorted(sorted(ranks, key=lambda n: abs(n - data_parallel_size))[:4])
            raise ConfigError(
                f"batch.global_batch {self.global_batch} is not divisible by batch.micro_batch {self.micro_batch} x "
                f"{data_parallel_size} ranks = {images}; use a multiple of {images}, such as "
                f"{' or '.join(map(str, nearest))}, or a number of ranks that fits ({', '.join(map(str, fitting))}), "
                "or another micro_batch"
            )
        return self.global_batch // images
