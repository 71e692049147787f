"""BatchNorm under the invariant: running statistics that do not depend on the number of ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dali_train.training.pretrained import is_frozen


class RunningStatistics:
    """BatchNorm's running mean and variance, updated once per step with the mean over all its micro-batches.

    Otherwise each rank would average in its own micro-batches one after the other, and evaluation would depend on the
    number of ranks. A step with non-finite statistics is skipped, because one infinite value would make them NaN
    forever. Frozen layers are not updated.
    """

    def __init__(self, model: nn.Module) -> None:
        self._running: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._weights: list[float] = []
        for layer in model.modules():
            if not isinstance(layer, _BatchNorm) or layer.momentum is None or is_frozen(layer):
                continue
            for running in (layer.running_mean, layer.running_var):
                if running is not None:
                    self._running.append(running)
                    self._weights.append(layer.momentum)
            if layer.num_batches_tracked is not None:
                self._counts.append(layer.num_batches_tracked)
            layer.momentum = 1.0  # a forward pass leaves the micro-batch's own statistics there
        self._before = [t.clone() for t in self._running]
        self._num_steps = [t.clone() for t in self._counts]  # what they count instead of micro-batches of one rank
        self._sums = [torch.zeros_like(t) for t in self._running]

    def add_micro_batch(self) -> None:
        """Record the statistics of a micro-batch, after its forward pass."""
        if self._running:
            torch._foreach_add_(self._sums, self._running)

    def finish_step(self, num_micro_batches: int) -> None:
        """Update the statistics after the step's last micro-batch, on all ranks; `num_micro_batches` of all of them."""
        if not self._running:
            return
        flat = torch.cat([t.flatten() for t in self._sums])
        if dist.is_initialized():
            dist.all_reduce(flat)
        flat /= num_micro_batches
        # The whole step is skipped on all ranks; the sum shows whether any micro-batch was not finite.
        flat = torch.where(flat.isfinite().all(), flat, torch.cat([t.flatten() for t in self._before]))
        means = flat.split([t.numel() for t in self._sums])
        for running, before, mean, weight in zip(self._running, self._before, means, self._weights, strict=True):
            running.copy_(before.lerp(mean.view_as(before), weight))
        torch._foreach_copy_(self._before, self._running)
        torch._foreach_add_(self._num_steps, 1)
        torch._foreach_copy_(self._counts, self._num_steps)
        torch._foreach_zero_(self._sums)
