"""What is measured of a model: sums over training steps, the gradient noise scale, and an exact evaluation, with tables
of accuracy by class.

Training metrics are summed on the device. Only their `read` makes the host wait for it; the loop calls it on logging
steps.

An evaluation takes every image once, on any number of ranks. The split is cut into batches once; coordinate r of W
takes batches r, r + W, ... A rank may have one batch less than another, or none: the only collective is the sum at the
end. If the model is split over ranks, every forward pass has collectives, so a rank that has run out of batches passes
a blank image through the model.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from dali_train.config import Config
from dali_train.data.dataset.index import Split
from dali_train.data.loading.cache import Node
from dali_train.data.loading.loader import EvalLoader
from dali_train.data.loading.loader_arguments import Place
from dali_train.data.loading.pipelines import without_waiting
from dali_train.errors import RunError
from dali_train.parallel.layout import Layout
from dali_train.parallel.mesh import local
from dali_train.parallel.parallelize import Parallel
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

    def num_skipped(self) -> int:
        """Wait for the device, and return the steps with an overflow since the run began or resumed."""
        return int(self._skipped.item())

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

    def describe(self, names: Sequence[str], mean: float | None = None) -> list[str]:
        """Return lines to print: the mean over classes, the lowest accuracies, and the most confused pairs.

        Args:
            mean: that of an evaluation, in which scores that are not numbers are never right; None: by the predictions.
        """
        accuracies, counts = self.accuracies(), self.counts()
        lowest = sorted(np.flatnonzero(counts).tolist(), key=lambda number: accuracies[number])[:5]
        words = [f"{printable(names[number])} ({accuracies[number]:.1%} of {counts[number]})" for number in lowest]
        confused = [
            f"{printable(names[truth])} mistaken for {printable(names[predicted])} ({images})"
            for truth, predicted, images in self.most_confused()[:5]
        ]
        mean = float(np.nanmean(accuracies)) if mean is None else mean
        lines = [f"mean over classes {mean:.2%}", f"lowest: {', '.join(words)}"]
        return lines + ([f"most confused: {', '.join(confused)}"] if confused else [])


def class_accuracies(correct: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return correct / counts, both by class; NaN where there are no images."""
    return np.where(counts > 0, correct / np.maximum(counts, 1), np.nan)


VIEWS = {"one": [1.0], "mirrored": [0.5] * 2, "mirrored-and-shifted": [0.25] * 2 + [0.125] * 4}
"""The weights of the views of data.eval_views, in the order of `views_of`."""
MAX_SCORES = 20
"""With more classes than this, prediction tables hold only the scores of the predicted and the true class."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Means over all `num_images`; the accuracies are fractions."""

    loss: float
    top1: float
    top5: float
    balanced_top1: float  # mean over classes of the class's top-1, so that rare classes count as much as others
    num_images: int
    num_views: int  # whose logits were averaged, of each image
    seconds: float

    MEASURES: ClassVar[tuple[str, ...]] = ("loss", "top1", "top5", "balanced_top1")

    @property
    def more(self) -> str:
        """``  mean of 6 views``, to follow accuracies in a line; empty for one view."""
        return f"  mean of {self.num_views} views" if self.num_views > 1 else ""


@dataclass(frozen=True, kw_only=True)
class EvaluationDetails:
    """The model's predictions per image, in the order of the split's index. The same on all ranks."""

    labels: NDArray[np.int64]
    predictions: NDArray[np.int64]
    shown: NDArray[np.int64]  # indices of a few images, spread evenly over the split, the same at every evaluation
    # Probabilities (shown, classes); with over MAX_SCORES classes (shown, 2), of the prediction and of the true class.
    scores: NDArray[np.float32]


def views_of(images: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return the first `count` views of `images`, (n, 3, h, w): the images, mirrored, both shifted by one pixel up and
    left, and both down and right; what a shift uncovers is reflected."""
    views = [images]
    if count > 2 and images.numel():  # later stages of a pipeline have no pixels
        bordered = F.pad(images, (1, 1, 1, 1), "reflect")
        views += [bordered[..., :-2, :-2], bordered[..., 2:, 2:]]
    else:
        views *= max(1, count // 2)
    if count == 1:
        return views
    return [each for view in views for each in (view, view.flip(-1))]


def weighted_mean(outputs: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the mean of the logits of all views with these `weights`, at least in float32."""
    wide = [logits if logits.dtype == torch.float64 else logits.float() for logits in outputs]
    if len(wide) == 1:
        return wide[0]
    return torch.stack([logits * weight for logits, weight in zip(wide, weights, strict=True)]).sum(dim=0)


def classes_ahead(scores: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return how many classes come before the best of each image's own, (n,) int64: 0 if the prediction is right.

    Of classes with equal scores the one with the lowest number comes first, as in ``torch.argmax``, by which training
    and `predict` count. An order that knows the true class would favor formats with many ties: of digits in bfloat16, 2
    in 1,000 have one for the first place. With a NaN among the scores, or no class of its own, an image is never right.

    Args:
        scores: (n, classes), of any float type.
        own: the classes of each image, (n, classes) bool.
    """
    num_classes = scores.shape[1]
    numbers = torch.arange(num_classes, device=scores.device)
    best = scores.masked_fill(~own, -math.inf).amax(dim=1, keepdim=True)
    first = torch.where(own & (scores == best), numbers, num_classes).amin(dim=1, keepdim=True)
    before = (scores > best) | ((scores == best) & (numbers < first))
    behind_all = num_classes + 5  # of few classes, too, not among the first five
    return before.sum(dim=1).masked_fill(scores.isnan().any(dim=1) | ~own.any(dim=1), behind_all)


class Evaluator:
    """Repeated evaluation of one split; the decoding pipeline is kept from one evaluation to the next.

    Args:
        num_shown: images whose scores go into `details`; 0 collects no details.
        node: this process's part in the cache of its node, if it has one.
        classes: the model's class of each class of `split`, (classes,) int64; only these compete. None: the same.
        labels: all right classes of each image, (images, most) int64, padded with -1; an image without any is left out.
            A prediction is right if it is among them, and the loss is that of their common probability. None: the
            index has the only one.
    """

    MEASURES: ClassVar[tuple[str, ...]] = EvaluationResult.MEASURES

    def __init__(
        self,
        split: Split,
        config: Config,
        device: torch.device,
        layout: Layout,
        *,
        num_threads: int,
        num_shown: int = 0,
        node: Node | None = None,
        classes: NDArray[np.int64] | None = None,
        labels: NDArray[np.int64] | None = None,
    ) -> None:
        assert labels is None or num_shown == 0, "tables need batches without gaps, and `labels` leaves images out"
        self._classes = None if classes is None else torch.from_numpy(classes).to(device)
        self._right = None if labels is None else torch.from_numpy(labels)
        images = np.arange(len(split)) if labels is None else np.flatnonzero((labels >= 0).any(axis=1))
        place = Place(dp_rank=layout.data_rank, dp_size=layout.data_size, device=device, num_threads=num_threads)
        decodes = layout.pipeline_rank == 0  # later stages get no images, but what the first makes of them
        self._loader = EvalLoader.of_split(split, config, place, node=node, decodes=decodes, images=images)
        self._loader.prepare()
        most = -(-len(images) // (layout.data_size * config.batch.micro_batch))
        self._num_blank = most - len(self._loader) if layout.splits_model else 0
        self._blank = (1, 3, config.data.eval_size, config.data.eval_size)
        self._split = split
        self._num_images = len(images)
        self._num_classes = split.num_classes
        self._labels = split.rows["label"].astype(np.int64)
        self._class_counts = split.count_classes(self._labels[images])
        self._shown = np.unique(np.linspace(0, len(split) - 1, min(num_shown, len(split))).round().astype(np.int64))
        self.details: EvaluationDetails | None = None
        self._balanced_top1: float | None = None
        # Of each class in the last evaluation, (classes,): its average precision, if the evaluator measures that.
        self.class_scores: NDArray[np.float64] | None = None
        self._views = VIEWS[config.data.eval_views]
        self._device = device
        self._dtype = torch.float64 if config.precision.dtype == "fp64" else None
        # Count once among ranks with the same logits, and not on ranks without logits.
        self._is_counted = layout.pipeline_rank == layout.pipeline - 1 and layout.tensor_rank == 0

    @torch.no_grad()  # not inference_mode: the buffers of gathered weights are used in training again
    def run(self, model: nn.Module, autocast: AbstractContextManager[None]) -> EvaluationResult:
        """Evaluate `model` (not wrapped for parallelism), in eval mode during the call. All ranks call this
        together."""
        start = time.perf_counter()
        training = model.training
        model.eval()
        totals = self._zeros()
        for images, labels in self._loader:
            with autocast:
                outputs = [model(view) for view in views_of(images.to(self._dtype or images.dtype), len(self._views))]
            if not self._is_counted:
                continue
            logits = weighted_mean(outputs, self._views)
            if self._classes is not None:
                logits = logits[:, self._classes]
            self._add(totals, logits, labels, self._loader.indices)
        # Other ranks have another batch, and where a pass has collectives all take part.
        for _ in range(self._num_blank * len(self._views)):
            with autocast:
                model(torch.zeros(self._blank, device=self._device, dtype=self._dtype))
        if dist.is_initialized():
            for total in (totals.sums, totals.correct, totals.predictions, totals.scores):
                if total.numel():
                    dist.all_reduce(total)
        model.train(training)
        return self._result(totals, time.perf_counter() - start)

    def _result(self, totals: "Totals", seconds: float) -> EvaluationResult:
        """Return the result of complete sums, and keep the details."""
        if len(self._shown):
            self.details = EvaluationDetails(
                labels=self._labels,
                predictions=totals.predictions.cpu().numpy(),
                shown=self._shown,
                scores=totals.scores.cpu().numpy()[self._shown],
            )
        loss, top1, top5, count = totals.sums.tolist()
        assert count == self._num_images, f"evaluated {count} of {self._num_images} images"
        by_class = class_accuracies(totals.correct.cpu().numpy(), self._class_counts)
        self._balanced_top1 = float(np.nanmean(by_class))
        return EvaluationResult(
            loss=loss / count,
            top1=top1 / count,
            top5=top5 / count,
            balanced_top1=self._balanced_top1,
            num_images=int(count),
            num_views=len(self._views),
            seconds=seconds,
        )

    def describe_classes(self, names: Sequence[str]) -> list[str]:
        """Return lines to print on the classes in the last evaluation, which needs details."""
        assert self.details is not None
        return ClassTables(self.details.labels, self.details.predictions, len(names)).describe(
            names, self._balanced_top1
        )

    def _zeros(self) -> "Totals":
        rows = self._num_images if len(self._shown) else 0
        columns = self._num_classes if self._num_classes <= MAX_SCORES else 2
        return Totals(
            sums=torch.zeros(4, dtype=torch.float64, device=self._device),
            correct=torch.zeros(self._num_classes, dtype=torch.int64, device=self._device),
            predictions=torch.zeros(rows, dtype=torch.int64, device=self._device),
            scores=torch.zeros(rows, columns, device=self._device),
        )

    def _add(self, totals: "Totals", logits: torch.Tensor, labels: torch.Tensor, numbers: NDArray[np.int64]) -> None:
        """Add a batch to `totals`, on the device.

        Args:
            logits: (n, classes).
            labels: (n,), of the index.
            numbers: the images' in the split, (n,).
        """
        if len(self._shown):
            self._note_predictions(totals, logits, labels, numbers)
        right = labels[:, None]
        if self._right is not None:
            right = without_waiting(self._right[numbers], self._device)
        is_padding = right < 0
        right = right.clamp(min=0)
        log_probabilities = logits.log_softmax(dim=-1).gather(1, right).masked_fill(is_padding, -math.inf)
        classes = torch.arange(logits.shape[1], device=self._device)
        is_own = (right[:, :, None] == classes) & ~is_padding[:, :, None]
        ahead = classes_ahead(logits, is_own.any(dim=1))
        totals.correct.scatter_add_(0, labels, (ahead < 1).long())
        loss = -log_probabilities.logsumexp(dim=1).sum().double()
        top1 = (ahead < 1).sum().double()
        top5 = (ahead < 5).sum().double()
        count = torch.full((), len(labels), dtype=torch.float64, device=self._device)  # made there: nothing to wait for
        totals.sums.add_(torch.stack([loss, top1, top5, count]))

    def _note_predictions(
        self, totals: "Totals", logits: torch.Tensor, labels: torch.Tensor, numbers: NDArray[np.int64]
    ) -> None:
        rows = slice(int(numbers[0]), int(numbers[-1]) + 1)  # a batch has images that follow each other in the split
        predicted = logits.argmax(dim=-1)
        totals.predictions[rows] = predicted
        probabilities = logits.softmax(dim=-1).float()
        if self._num_classes > MAX_SCORES:
            probabilities = probabilities.gather(1, torch.stack([predicted, labels], dim=-1))
        totals.scores[rows] = probabilities


@dataclass(frozen=True)
class Totals:
    """What an evaluation adds up, on the device: the sum over ranks is complete."""

    sums: torch.Tensor  # loss, top-1, top-5, images; (4,) float64
    correct: torch.Tensor  # by class, (classes,) int64
    # With tables, else empty; each rank fills in its own rows.
    predictions: torch.Tensor  # (images,) int64
    scores: torch.Tensor  # (images, scores), see `EvaluationDetails`


def evaluate_all(
    evaluators: Mapping[str, Evaluator], model: nn.Module, autocast: Callable[[], torch.autocast]
) -> dict[str, EvaluationResult]:
    """Return the results of several evaluators by name. All ranks call this together."""
    return {name: evaluator.run(model, autocast()) for name, evaluator in evaluators.items()}


NOISE_EVERY_STEPS = 4
"""Measured on a CPU core: 5.5 ms for ViT-S/16, where the passes of 2 x 8 images take 5.6 s, so 0.02 % of a step. On an
H100, by estimate, 0.1 ms for ViT-B/16 (344 MB at 3 TB/s), and under 1 ms gradient by gradient, as DDP with one
micro-batch per rank needs it; 256 images take 100 ms or more."""
_NOISE_DECAY = 0.98  # of the averages at each measurement, which span about 50 measurements


class NoiseScale:
    """The gradient noise scale, an estimate of the batch up to which more images per step save steps.

    McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv 1812.06162): with G the true gradient and S
    the covariance of the gradients of single images, B_simple = tr(S) / |G|^2 images. At a batch of B_simple a step
    makes half of the progress that a step with the true gradient would. Appendix A.1 estimates it from the squared
    norms of two gradients, of b and of B images, since E|G_b|^2 = |G|^2 + tr(S) / b:

        |G|^2 ~ (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) ~ (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

    Here B is the global batch, whose norm every step computes anyway, and b is micro-batch 0. That is as good as a norm
    of all K micro-batches within a factor of 2 in variance (with Gaussian noise, |G_B|^2 alone varies as much as
    |G_b|^2 / K), costs one more pass over the gradients, and does not depend on the number of ranks.

    The state is averages of |G_b|^2 and |G_B|^2 on the device, of which the noise scale is a ratio.

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
        self._measures = self._has_first and step % NOISE_EVERY_STEPS == 0
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
        updated = self._averages.lerp(torch.stack([small, large]), 1 - _NOISE_DECAY)
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
