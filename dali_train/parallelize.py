"""How the model is spread over the ranks. The only place that knows; other kinds of parallelism slot in here.

What the trainer needs from it: a model to call, a data-parallel coordinate, gradients that are the mean over the
step's micro-batches whoever computed them, and statistics that do not depend on the number of ranks.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from dali_train.config import ParallelConfig
from dali_train.launch import Launch


@dataclass(frozen=True)
class Parallel:
    """The model as the trainer calls it, and this process's data-parallel coordinate."""

    model: nn.Module
    dp_rank: int
    dp_size: int
    static_graph: bool = False  # DDP was told that the graph never changes

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward: gradients are exchanged only after the last micro-batch of a step."""
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()


def parallelize(model: nn.Module, launch: Launch, config: ParallelConfig) -> Parallel:
    """Data parallelism over all ranks: DDP, or nothing for a single process."""
    if launch.world_size > 1:
        with warnings.catch_warnings():
            # torch 2.15 renames the option, earlier versions know only this name.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            # Buffers are not broadcast: rank 0's would win over the others'. RunningStatistics keeps them equal.
            model = DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=config.bucket_mb,
                static_graph=config.static_graph,
            )  # fmt: skip
        if config.exchange_dtype == "bf16":
            model.register_comm_hook(None, bf16_compress_hook)
    return Parallel(model, launch.rank, launch.world_size, static_graph=config.static_graph and launch.world_size > 1)


def warm_up(
    parallel: Parallel, images: torch.Tensor, autocast: AbstractContextManager[None], *, keep_gradients: bool = False
) -> None:
    """A forward and backward pass that leaves no trace, so that the first step sums like every other.

    DDP orders its gradient buckets anew after the first backward pass, and with three or more ranks the order of a
    sum depends on a gradient's place in its bucket. Without this pass a resumed run would sum its first step
    differently from a run that was never stopped. With a static graph DDP looks for it in the first pass, which must not
    accumulate (pytorch/pytorch#187732), and orders its buckets only in the second, so then there are two.

    Args:
        images: blank, in the form in which the loader gives them, so that a compiled model is compiled for it.
        keep_gradients: leave gradients of zero behind instead of none.
    """
    model = parallel.model
    if keep_gradients:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    buffers = [buffer.clone() for buffer in model.buffers()]
    for _ in range(2 if parallel.static_graph else 1):
        with autocast:
            output = model(images)
        (output.float().sum() * 0).backward()
        model.zero_grad(set_to_none=not keep_gradients)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)


class RunningStatistics:
    """BatchNorm's running mean and variance, updated once a step with the mean over all its micro-batches.

    Left alone, each rank would fold its own micro-batches in one after the other, and what evaluation sees would
    depend on the number of ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._running: list[torch.Tensor] = []
        self._weights: list[float] = []
        for layer in model.modules():
            if not isinstance(layer, _BatchNorm) or layer.momentum is None:
                continue
            for running in (layer.running_mean, layer.running_var):
                if running is not None:
                    self._running.append(running)
                    self._weights.append(layer.momentum)
            layer.momentum = 1.0  # a forward pass leaves the micro-batch's own statistics there
        self._before = [t.clone() for t in self._running]
        self._sums = [torch.zeros_like(t) for t in self._running]

    def add_micro_batch(self) -> None:
        """After each forward pass."""
        if self._running:
            torch._foreach_add_(self._sums, self._running)

    def finish_step(self, num_micro_batches: int) -> None:
        """After the step's last micro-batch, on all ranks; `num_micro_batches` of all of them together."""
        if not self._running:
            return
        if dist.is_initialized():
            flat = torch.cat([t.flatten() for t in self._sums])
            dist.all_reduce(flat)
            for total, part in zip(self._sums, flat.split([t.numel() for t in self._sums]), strict=True):
                total.copy_(part.view_as(total))
        torch._foreach_div_(self._sums, float(num_micro_batches))
        for running, before, mean, weight in zip(self._running, self._before, self._sums, self._weights, strict=True):
            running.copy_(before.lerp(mean, weight))
        torch._foreach_copy_(self._before, self._running)
        torch._foreach_zero_(self._sums)
