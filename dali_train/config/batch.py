"""The global batch and its micro-batches."""

from dataclasses import dataclass
from typing import Annotated

from dali_train.config.check import Rule, require, section
from dali_train.errors import ConfigError


@section("batch")
@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    global_batch: Annotated[int, Rule("a whole number from 1 to 16,777,216", 1, 1 << 24)]
    """Images per optimizer step, over all ranks and all accumulated micro-batches."""
    micro_batch: Annotated[int, Rule("a whole number from 1 to 65,536", 1, 1 << 16)]
    """Images per forward and backward pass on one rank."""

    def __post_init__(self) -> None:
        require(
            self.global_batch % self.micro_batch == 0,
            f"batch.global_batch {self.global_batch} is not a multiple of batch.micro_batch {self.micro_batch}; "
            f"use {max(1, round(self.global_batch / self.micro_batch)) * self.micro_batch}",
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step, over all ranks."""
        return self.global_batch // self.micro_batch

    def grad_accum_steps(self, data_parallel_size: int) -> int:
        """Return the micro-batches that each of `data_parallel_size` ranks accumulates per step; if they do not divide
        evenly, some ranks accumulate one less.

        Raises:
            ConfigError: there are more ranks than micro-batches.
        """
        most = self.num_micro_batches
        if data_parallel_size > most:
            fitting = range(self.global_batch // data_parallel_size, 0, -1)
            smaller = next((size for size in fitting if self.global_batch % size == 0), None)
            raise ConfigError(
                f"batch.global_batch {self.global_batch} is {most} x batch.micro_batch {self.micro_batch}, and "
                f"{data_parallel_size} data-parallel ranks need at least one each: start at most {most}"
                + (f", or set batch.micro_batch {smaller}" if smaller is not None else "")
            )
        return -(-most // data_parallel_size)

    def describe_accumulation(self, data_parallel_size: int) -> str:
        """Format `grad_accum_steps`: "4", or "4 or 3" if the micro-batches do not divide evenly among the ranks."""
        steps = self.grad_accum_steps(data_parallel_size)
        return f"{steps} or {steps - 1}" if self.num_micro_batches % data_parallel_size else f"{steps}"
