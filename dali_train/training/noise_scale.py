"""The gradient noise scale, an estimate of the batch up to which more images per step save steps.

McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv 1812.06162): with G the true gradient and S the
covariance of the gradients of single images, B_simple = tr(S) / |G|^2 images. At a batch of B_simple a step makes half
of the progress that a step with the true gradient would. Appendix A.1 estimates it from the squared norms of two
gradients, of b and of B images, since E|G_b|^2 = |G|^2 + tr(S) / b:

    |G|^2 ~ (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) ~ (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

Here B is the global batch, whose norm every step computes anyway, and b is micro-batch 0. That is as good as a norm of
all K micro-batches within a factor of 2 in variance (with Gaussian noise, |G_B|^2 alone varies as much as
|G_b|^2 / K), costs one more pass over the gradients, and does not depend on the number of ranks.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from dali_train.parallel.parallelize import Parallel

EVERY_STEPS = 4
"""Measured on a CPU core: 5.5 ms for ViT-S/16, where the passes of 2 x 8 images take 5.6 s, so 0.02 % of a step. On an
H100, by estimate, 0.1 ms for ViT-B/16 (344 MB at 3 TB/s), and under 1 ms gradient by gradient, as DDP with one
micro-batch per rank needs it; 256 images take 100 ms or more."""
_DECAY = 0.98  # of the averages at each measurement, which span about 50 measurements


class NoiseScale:
    """Averages of |G_b|^2 and |G_B|^2 on the device, of which the noise scale is a ratio.

    The averages are not saved: a resumed run begins new ones.
    """

    def __init__(self, parallel: Parallel, num_micro_batches: int, micro_batch: int, device: torch.device) -> None:
        """Measure steps of `num_micro_batches`, 2 or more, each of `micro_batch` images."""
        self._num_micro_batches, self._micro_batch = num_micro_batches, micro_batch
        layout = parallel.layout
        self._has_first = layout.data_rank == 0  # this rank, or several in a pipeline, compute micro-batch 0
        self._counts_whole = self._has_first and layout.pipeline_rank == 0
        self._averages = torch.zeros(2, dtype=torch.float64, device=device)  # this rank's part of |G_b|^2, and |G_B|^2
        self._factor = torch.ones((), dtype=torch.float64, device=device)
        self._weight = num_micro_batches / layout.data_size  # by which the trainer divides the loss
        self._squares: list[torch.Tensor] = []  # of the gradients of micro-batch 0
        self._measures = False
        # A rank with one micro-batch has it all-reduced during the backward pass, each gradient after its hooks.
        self._reads_early = num_micro_batches == layout.data_size and not layout.splits_model
        if self._has_first and self._reads_early:
            for parameter in parallel.model.parameters():
                parameter.register_post_accumulate_grad_hook(self._add)

    def begin_step(self, step: int, loss_scale: torch.Tensor) -> None:
        """Decide whether to measure optimizer step `step`.

        Args:
            loss_scale: float16's scale in this step, 0-dimensional, on the device.
        """
        self._measures = self._has_first and step % EVERY_STEPS == 0
        if self._measures:
            self._factor = self._weight / loss_scale.double()

    def add_first_micro_batch(self, module: nn.Module) -> None:
        """Record the gradients of micro-batch 0 after its backward pass through `module`: the model, or a stage."""
        if self._measures and not self._reads_early:
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            self._squares.append(torch.stack(torch._foreach_norm(gradients)).double().square().sum())

    def _add(self, parameter: torch.Tensor) -> None:
        if self._measures and parameter.grad is not None:
            self._squares.append(parameter.grad.norm().double().square())

    def finish_step(self, grad_norm: torch.Tensor) -> None:
        """Update the averages, unless `grad_norm`, |G_B| as a 0-dimensional tensor on the device, is not finite."""
        if not self._squares:
            return
        small = torch.stack(self._squares).sum() * self._factor.square()
        large = grad_norm.double().square() * self._counts_whole
        updated = self._averages.lerp(torch.stack([small, large]), 1 - _DECAY)
        self._averages = torch.where(grad_norm.isfinite(), updated, self._averages)
        self._squares.clear()

    def read(self) -> float | None:
        """Wait for the device and return the noise scale in images. All ranks call this together.

        None: nothing has been measured, or the noise is too large or too small to tell.
        """
        sums = self._averages.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        return noise_scale(*sums.tolist(), num_micro_batches=self._num_micro_batches, micro_batch=self._micro_batch)


def noise_scale(small: float, large: float, *, num_micro_batches: int, micro_batch: int) -> float | None:
    """Return B_simple in images from the means of |G_b|^2, `small`, and |G_B|^2, `large`; None if an estimate of a
    square, which may be off by its noise, is not positive."""
    variance = micro_batch * (small - large) / (1 - 1 / num_micro_batches)  # tr(S)
    signal = (num_micro_batches * large - small) / (num_micro_batches - 1)  # |G|^2
    if not (variance > 0 and signal > 0 and math.isfinite(variance)):
        return None
    return variance / signal
