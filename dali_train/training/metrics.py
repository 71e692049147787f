"""Training metrics, summed on the device, and tables of accuracy by class.

Only `TrainingMetrics.read` makes the host wait for the device; the loop calls it on logging steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dali_train.errors import RunError
from dali_train.parallel.mesh import local
from dali_train.text import printable

# Where the first non-finite value was, as one number: step * _PER_STEP + micro-batch, so that the minimum over the
# ranks is the first of all. Step 3, micro-batch 5 is 3 * 2**20 + 5. A step whose losses are finite and whose gradient
# is not has the last number of the step, 4 * 2**20 - 1. The numbers are float64 like all that is reduced with them,
# which holds whole numbers up to 2**53 exactly.
_PER_STEP = 1 << 20
_NEVER = float(1 << 52)
MAX_NONFINITE_STEPS = 50  # in a row; FP16 needs about 10 to find its scale


class NonFiniteError(RunError):
    """Loss, gradients or weights are infinite or not a number; the message names the step."""


@dataclass(frozen=True, kw_only=True)
class TrainingSums:
    """Means since the last reading, over all ranks."""

    loss: float
    top1: float  # against each image's own class, Mixup partners ignored; a fraction
    grad_norm: float  # of the last step, before clipping
    loss_scale: float  # after the last step
    skipped_steps: int  # since the run began or resumed


class TrainingMetrics:
    """Sums losses and correct predictions on the device, and watches for values that are not finite."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, hits, images
        self._grad_norm = torch.zeros((), device=device)
        self._loss_scale = torch.ones((), device=device)
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)
        self._streak = torch.zeros((), dtype=torch.float64, device=device)  # steps in a row that were not finite
        self._first = torch.full((), _NEVER, dtype=torch.float64, device=device)  # where they began
        self._step_is_finite = torch.ones((), dtype=torch.bool, device=device)

    def add_micro_batch(self, loss: torch.Tensor, correct: torch.Tensor, num_images: int, *, step: int, k: int) -> None:
        """Add the mean `loss` over `num_images`, and the number `correct`; both 0-dimensional, on the device."""
        loss = loss.detach().double()
        finite = loss.isfinite()
        self._sums += torch.stack([loss * num_images, correct.double(), torch.full_like(loss, num_images)])
        self._step_is_finite &= finite
        here = float(step * _PER_STEP + k)
        self._first = torch.where(finite, self._first, self._first.clamp(max=here))

    def finish_step(self, grad_norm: torch.Tensor, loss_scale: torch.Tensor, *, step: int) -> None:
        """End a step. `grad_norm` is equal on all ranks, so a non-finite loss on one of them shows on all."""
        finite = grad_norm.isfinite()
        self._skipped += ~finite
        finite = finite & self._step_is_finite
        self._streak = (self._streak + 1) * ~finite
        in_gradients = float((step + 1) * _PER_STEP - 1)  # larger than any micro-batch of this step
        self._first = torch.where(finite, _NEVER, self._first.clamp(max=in_gradients))
        self._step_is_finite = torch.ones_like(self._step_is_finite)
        self._grad_norm = grad_norm.detach()
        self._loss_scale = loss_scale.detach()

    def read(self) -> TrainingSums:
        """Wait for the device, sum over all ranks and reset to zero. All ranks call this together.

        Raises:
            NonFiniteError: the last `MAX_NONFINITE_STEPS` steps or more had a loss or gradient that is not finite.
        """
        sums, streak, first = self._sums.clone(), self._streak.clone(), self._first.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(streak, op=dist.ReduceOp.MAX)
            dist.all_reduce(first, op=dist.ReduceOp.MIN)
        last = torch.stack([streak, first, self._grad_norm.double(), self._loss_scale.double(), self._skipped])
        loss, correct, num_images, nonfinite, number, grad_norm, loss_scale, skipped = torch.cat([sums, last]).tolist()
        self._sums.zero_()
        if nonfinite >= MAX_NONFINITE_STEPS:
            step, k = divmod(int(number), _PER_STEP)
            where = f"micro-batch {k}" if k < _PER_STEP - 1 else "in the gradients only"
            raise NonFiniteError(
                f"loss or gradients were not finite in {nonfinite:.0f} steps in a row, first in step {step}, "
                f"{where}. The checkpoints before are good: resume from one with a lower optimizer.lr, a longer "
                "schedule.warmup_epochs, or precision.dtype bf16"
            )
        return TrainingSums(
            loss=loss / num_images,
            top1=correct / num_images,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            skipped_steps=int(skipped),
        )

    def last_step_was_finite(self) -> bool:
        """Wait for the device, and return whether loss and gradients of the last step were finite on this rank."""
        return self._streak.item() == 0


def all_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return whether all floating-point `tensors` are finite, as far as this rank holds them: 0-dimensional bool, on
    their device, without waiting for it."""
    floating = [t for t in map(local, tensors) if t.is_floating_point() and t.numel()]
    if not floating:
        return torch.ones((), dtype=torch.bool)
    # The largest magnitude of each, in a few kernels and without a copy; NaN counts as the largest.
    return torch.stack(torch._foreach_norm(floating, float("inf"))).isfinite().all()


NUM_PAIRS = 50
"""The number of most frequently confused pairs of classes in tables."""


@dataclass(frozen=True)
class ClassTables:
    """Statistics by class, computed from labels and predictions, both (images,)."""

    labels: NDArray[np.int64]
    predictions: NDArray[np.int64]
    num_classes: int

    def counts(self) -> NDArray[np.int64]:
        """Return the number of images of each class."""
        return np.bincount(self.labels, minlength=self.num_classes)

    def accuracies(self) -> NDArray[np.float64]:
        """Return the accuracy of each class, a fraction; NaN for classes without images."""
        correct = np.bincount(self.labels[self.labels == self.predictions], minlength=self.num_classes)
        return class_accuracies(correct, self.counts())

    def confusion(self) -> NDArray[np.int64]:
        """Return the number of images by (label, prediction)."""
        flat = np.bincount(self.labels * self.num_classes + self.predictions, minlength=self.num_classes**2)
        return flat.reshape(self.num_classes, self.num_classes)

    def most_confused(self) -> list[tuple[int, int, int]]:
        """Return the NUM_PAIRS most frequent (label, prediction, images), most images first."""
        wrong = self.labels != self.predictions
        pairs, images = np.unique(self.labels[wrong] * self.num_classes + self.predictions[wrong], return_counts=True)
        order = np.argsort(-images, kind="stable")[:NUM_PAIRS]
        return [(*divmod(int(pairs[i]), self.num_classes), int(images[i])) for i in order]

    def describe(self, names: Sequence[str]) -> list[str]:
        """Return lines to print: the mean over classes, the lowest accuracies, and the most confused pairs."""
        accuracies, counts = self.accuracies(), self.counts()
        lowest = sorted(np.flatnonzero(counts).tolist(), key=lambda number: accuracies[number])[:5]
        words = [f"{printable(names[number])} ({accuracies[number]:.1%} of {counts[number]})" for number in lowest]
        confused = [
            f"{printable(names[truth])} mistaken for {printable(names[predicted])} ({images})"
            for truth, predicted, images in self.most_confused()[:5]
        ]
        lines = [f"mean over classes {np.nanmean(accuracies):.2%}", f"lowest: {', '.join(words)}"]
        return lines + ([f"most confused: {', '.join(confused)}"] if confused else [])


def class_accuracies(correct: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return correct / counts, both by class; NaN where there are no images."""
    return np.where(counts > 0, correct / np.maximum(counts, 1), np.nan)
