"""Exact evaluation: every image once, on any number of ranks.

The split is cut into batches once; coordinate r of W takes batches r, r + W, ... A rank may have one batch less than
another, or none: the only collective is the sum at the end. If the model is split over ranks, every forward pass has
collectives, so a rank that has run out of batches passes a blank image through the model.
"""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from dali_train.config import Config
from dali_train.data.dataset.index import Split
from dali_train.data.loading.cache import Node
from dali_train.data.loading.loader import pixel_format
from dali_train.data.loading.pipelines import EvaluationPipeline
from dali_train.parallel.layout import Layout
from dali_train.training.metrics import class_accuracies

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
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EvaluationDetails:
    """The model's predictions per image, in the order of the split's index. The same on all ranks."""

    labels: NDArray[np.int64]
    predictions: NDArray[np.int64]
    shown: NDArray[np.int64]  # indices of a few images, spread evenly over the split, the same at every evaluation
    # Probabilities (shown, classes); with over MAX_SCORES classes (shown, 2), of the prediction and of the true class.
    scores: NDArray[np.float32]


class Evaluator:
    """Repeated evaluation of one split; the decoding pipeline is kept from one evaluation to the next.

    Args:
        num_shown: images whose scores go into `details`; 0 collects no details.
        node: this process's part in the cache of its node, if it has one.
    """

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
    ) -> None:
        size, stride = config.batch.micro_batch, layout.data_size * config.batch.micro_batch
        starts = range(layout.data_rank * size, len(split), stride)
        self._batches = [np.arange(start, min(start + size, len(split))) for start in starts]
        self._num_blank = -(-len(split) // stride) - len(self._batches) if layout.splits_model else 0
        self._blank = (1, 3, config.data.eval_size, config.data.eval_size)
        self._num_images = len(split)
        self._num_classes = split.num_classes
        self._labels = split.rows["label"].astype(np.int64)
        self._class_counts = np.bincount(self._labels, minlength=split.num_classes)
        self._shown = np.unique(np.linspace(0, len(split) - 1, min(num_shown, len(split))).round().astype(np.int64))
        self.details: EvaluationDetails | None = None
        self._device = device
        self._dtype = torch.float64 if config.precision.dtype == "fp64" else None
        self._pipeline = (
            EvaluationPipeline(split, self._batches, config.data, pixel_format(config, device, num_threads), node)
            if self._batches
            and layout.pipeline_rank == 0  # later stages get no images, but what the first makes of them
            else None
        )
        # Count once among ranks with the same logits, and not on ranks without logits.
        self._counts = layout.pipeline_rank == layout.pipeline - 1 and layout.tensor_rank == 0

    @torch.no_grad()  # not inference_mode: the buffers of gathered weights are used in training again
    def run(self, model: nn.Module, autocast: AbstractContextManager[None]) -> EvaluationResult:
        """Evaluate `model` (not wrapped for parallelism), in eval mode during the call. All ranks call this
        together."""
        start = time.perf_counter()
        training = model.training
        model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)  # loss, top-1, top-5, images
        correct = torch.zeros(self._num_classes, dtype=torch.int64, device=self._device)  # by class
        # Each rank fills in its own rows of these; the sum over ranks is complete.
        rows, all_scores = self._num_images if len(self._shown) else 0, self._num_classes <= MAX_SCORES
        predictions = torch.zeros(rows, dtype=torch.int64, device=self._device)
        scores = torch.zeros(rows, self._num_classes if all_scores else 2, device=self._device)
        for numbers in self._batches:
            images, labels = self._next(numbers)
            images, labels = (
                images.to(self._device, self._dtype, non_blocking=True),
                labels.to(self._device, non_blocking=True),
            )
            with autocast:
                logits = model(images)
            if not self._counts:
                continue
            logits = logits if logits.dtype == torch.float64 else logits.float()
            if len(self._shown):  # the numbers of a batch are ascending and without gaps
                rows_of_batch = slice(int(numbers[0]), int(numbers[-1]) + 1)
                predictions[rows_of_batch] = predicted = logits.argmax(dim=-1)
                probabilities = logits.softmax(dim=-1).float()
                scores[rows_of_batch] = (
                    probabilities if all_scores else probabilities.gather(1, torch.stack([predicted, labels], dim=-1))
                )
            ranks = (logits > logits.gather(1, labels[:, None])).sum(dim=1)  # classes that score above the true one
            ranks.masked_fill_(logits.isnan().any(dim=1), logits.shape[1])  # NaN would rank first
            correct.scatter_add_(0, labels, (ranks < 1).long())
            sums += torch.stack(
                [
                    F.cross_entropy(logits, labels, reduction="sum").double(),
                    (ranks < 1).sum().double(),
                    (ranks < 5).sum().double(),
                    torch.full(
                        (), len(labels), dtype=torch.float64, device=self._device
                    ),  # made on the device: nothing to wait for
                ]
            )
        for _ in range(self._num_blank):
            with autocast:
                model(torch.zeros(self._blank, device=self._device, dtype=self._dtype))
        if dist.is_initialized():
            for total in (sums, correct, *((predictions, scores) if len(self._shown) else ())):
                dist.all_reduce(total)
        if len(self._shown):
            self.details = EvaluationDetails(
                labels=self._labels,
                predictions=predictions.cpu().numpy(),
                shown=self._shown,
                scores=scores.cpu().numpy()[self._shown],
            )
        model.train(training)
        loss, top1, top5, count = sums.tolist()
        assert count == self._num_images, f"evaluated {count} of {self._num_images} images"
        return EvaluationResult(
            loss=loss / count,
            top1=top1 / count,
            top5=top5 / count,
            balanced_top1=float(np.nanmean(class_accuracies(correct.cpu().numpy(), self._class_counts))),
            num_images=int(count),
            seconds=time.perf_counter() - start,
        )

    def _next(self, numbers: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch: images (n, 3, size, size), with no pixels on ranks that do not decode; labels (n,)."""
        if self._pipeline is not None:
            return self._pipeline.run()
        return torch.empty(len(numbers), 3, 0, 0), torch.from_numpy(self._labels[numbers])
