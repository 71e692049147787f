"""Exact evaluation: every image once, on any number of ranks.

The split is cut into batches once; coordinate r of W takes batches r, r + W, ... A rank may have one batch less than
another, or none: ranks meet only in the sum at the end.
"""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dali_train.config import Config
from dali_train.data.index import Split
from dali_train.data.loader import pixel_format
from dali_train.data.pipeline import EvaluationPipeline


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Means over all `num_images`; the accuracies are fractions."""

    loss: float
    top1: float
    top5: float
    num_images: int
    seconds: float


class Evaluator:
    """Evaluates one split again and again; its decoding pipeline stays up and is ready for the next time."""

    def __init__(self, split: Split, config: Config, device: torch.device, *, dp_rank: int, dp_size: int, num_threads: int) -> None:
        size = config.batch.micro_batch
        starts = range(dp_rank * size, len(split), dp_size * size)
        self._batches = [np.arange(start, min(start + size, len(split))) for start in starts]
        self._num_images = len(split)
        self._device = device
        self._dtype = torch.float64 if config.precision.dtype == "fp64" else None
        self._pipeline = (
            EvaluationPipeline(split, self._batches, config.data, pixel_format(config, device, num_threads))
            if self._batches
            else None
        )

    @torch.inference_mode()
    def run(self, model: nn.Module, autocast: AbstractContextManager[None]) -> EvaluationResult:
        """Evaluate `model` (not wrapped for parallelism), in eval mode meanwhile. All ranks call this together."""
        start = time.perf_counter()
        training = model.training
        model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)  # loss, top-1, top-5, images
        for _ in self._batches:
            assert self._pipeline is not None
            images, labels = self._pipeline.run()
            images, labels = images.to(self._device, self._dtype, non_blocking=True), labels.to(self._device, non_blocking=True)
            with autocast:
                logits = model(images)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            ranks = (logits > logits.gather(1, labels[:, None])).sum(dim=1)  # classes that score above the true one
            sums += torch.stack(
                [
                    F.cross_entropy(logits, labels, reduction="sum").double(),
                    (ranks < 1).sum().double(),
                    (ranks < 5).sum().double(),
                    torch.tensor(len(labels), dtype=torch.float64, device=self._device),
                ]
            )
        if dist.is_initialized():
            dist.all_reduce(sums)
        model.train(training)
        loss, top1, top5, count = sums.tolist()
        assert count == self._num_images, f"evaluated {count} of {self._num_images} images"
        return EvaluationResult(
            loss=loss / count, top1=top1 / count, top5=top5 / count, num_images=int(count), seconds=time.perf_counter() - start
        )
