"""An exact evaluation with several labels an image: average precision by class, and F1 at a probability.

Every rank has the scores of its own images; their sum over the ranks is the scores of all, each image once, from which
every rank computes the same numbers in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dali_train.config import Config
from dali_train.data.dataset.index import Split
from dali_train.errors import ConfigError
from dali_train.extras.several_labels.sets_of_classes import SetsOfClasses
from dali_train.text import printable
from dali_train.training.metrics import EvaluationResult, Evaluator, Totals, classes_ahead


@dataclass(frozen=True, kw_only=True)
class SeveralLabelsResult(EvaluationResult):
    """The loss is binary cross-entropy, the mean over images and classes. Top-1 and top-5 are shares of the images with
    any label: one of these is the most probable class, or among the five. All other measures are of all images."""

    mean_ap: float  # mean of `average_precisions` over the classes that have images
    micro_f1: float
    macro_f1: float
    sample_f1: float
    f1_threshold: float  # probability over which an image counts as of a class

    MEASURES: ClassVar[tuple[str, ...]] = (*EvaluationResult.MEASURES, "mean_ap", "micro_f1", "macro_f1", "sample_f1")

    @property
    def more(self) -> str:
        f1 = f"{self.micro_f1:.2%} micro, {self.macro_f1:.2%} macro, {self.sample_f1:.2%} per image"
        at = "" if self.f1_threshold == 0.5 else f" at {self.f1_threshold:g}"
        return f"  mAP {self.mean_ap:.2%}  F1{at} {f1}{super().more}"


class SeveralLabelsEvaluator(Evaluator):
    """An evaluator of a split whose labels number sets of classes. It has no `details`.

    Raises:
        ConfigError: no image has a label.
    """

    MEASURES: ClassVar[tuple[str, ...]] = SeveralLabelsResult.MEASURES

    def __init__(self, split: Split, config: Config, *arguments: Any, **options: Any) -> None:
        super().__init__(split, config, *arguments, **{**options, "num_shown": 0})
        self._threshold = config.run.f1_threshold
        is_there = _padded(split)[self._labels] >= 0
        self._num_labelled = int(is_there.any(axis=1).sum())
        if not self._num_labelled:
            raise _without_labels(split)
        self.class_scores: NDArray[np.float64] | None = None

    def _zeros(self) -> Totals:
        dtype = self._dtype or torch.float32
        return Totals(
            sums=torch.zeros(4, dtype=torch.float64, device=self._device),
            correct=torch.zeros(0, dtype=torch.int64, device=self._device),
            predictions=torch.zeros(0, dtype=torch.int64, device=self._device),
            scores=torch.zeros(self._num_images, self._num_classes, dtype=dtype, device=self._device),
        )

    def _add(self, totals: Totals, logits: torch.Tensor, labels: torch.Tensor, numbers: NDArray[np.int64]) -> None:
        """As the base class's, with (n, classes) `labels`: 1 for the classes of an image, else 0."""
        totals.scores[int(numbers[0]) : int(numbers[-1]) + 1] = logits  # images that follow each other in the split
        own = labels.to(logits.dtype)
        ahead = classes_ahead(logits, labels > 0)
        loss = F.binary_cross_entropy_with_logits(logits, own, reduction="none").mean(dim=1).sum().double()
        top1 = (ahead < 1).sum().double()
        top5 = (ahead < 5).sum().double()
        count = torch.full((), len(labels), dtype=torch.float64, device=self._device)
        totals.sums.add_(torch.stack([loss, top1, top5, count]))

    def _result(self, totals: Totals, seconds: float) -> SeveralLabelsResult:
        loss, top1, top5, count = totals.sums.tolist()
        assert count == self._num_images, f"evaluated {count} of {self._num_images} images"
        scores = totals.scores.cpu().numpy()
        own = own_classes(self._split)
        self.class_scores = average_precisions(scores, own)
        micro, macro, sample = f1_scores(scores > math.log(self._threshold / (1 - self._threshold)), own)
        labelled = max(1, self._num_labelled)
        return SeveralLabelsResult(
            loss=loss / count,
            top1=top1 / labelled,
            top5=top5 / labelled,
            balanced_top1=top1 / labelled,  # which class an image counts for is not defined: not another number
            num_images=int(count),
            num_views=len(self._views),
            seconds=seconds,
            mean_ap=float(np.nanmean(self.class_scores)),
            micro_f1=micro,
            macro_f1=macro,
            sample_f1=sample,
            f1_threshold=self._threshold,
        )

    def describe_classes(self, names: Sequence[str]) -> list[str]:
        """Return lines to print: the classes with the lowest average precision of the last evaluation."""
        assert self.class_scores is not None
        return [lowest_precisions(self.class_scores, self._split.count_classes(self._labels), names)]


def own_classes(split: Split) -> NDArray[np.bool_]:
    """Return which classes each image of a split with several labels has, (images, classes). Raises ConfigError: none
    has any."""
    padded = _padded(split)
    table = np.zeros((len(padded), split.num_classes + 1), dtype=np.bool_)
    np.put_along_axis(table, padded, values=True, axis=1)  # -1, the padding, is the last column
    own: NDArray[np.bool_] = table[split.rows["label"], :-1]
    if not own.any():
        raise _without_labels(split)
    return own


def _padded(split: Split) -> NDArray[np.int32]:
    assert isinstance(split.label_kind, SetsOfClasses)
    return split.label_kind.padded


def _without_labels(split: Split) -> ConfigError:
    return ConfigError(
        f"none of the {len(split)} images of the {split.name} split of {split.root} has a label, so there is nothing "
        "to measure: use a dataset whose validation split has labels, or one without that split"
    )


def lowest_precisions(scores: NDArray[np.float64], counts: NDArray[np.int64], names: Sequence[str]) -> str:
    """Return a line with the five classes that have the lowest average precision.

    Args:
        scores, counts: (classes,) average precisions and images.
    """
    lowest = sorted(np.flatnonzero(counts).tolist(), key=lambda number: scores[number])[:5]
    words = [f"{printable(names[one])} ({scores[one]:.1%} of {counts[one]})" for one in lowest]
    return f"lowest average precision: {', '.join(words)}"


def average_precisions(scores: NDArray[np.floating], own: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the average precision of each class, (classes,): the sum over the distinct scores, from the highest down,
    of the precision there times the increase in recall, as scikit-learn's ``average_precision_score``. NaN for classes
    without images.

    Args:
        scores: (images, classes). NaN, which scikit-learn refuses, counts as the lowest score: a broken network ranks
            all images alike.
        own: which classes each image has, (images, classes).
    """
    result = np.full(scores.shape[1], np.nan)
    for number in np.flatnonzero(own.any(axis=0)):
        column = np.where(np.isnan(scores[:, number]), -np.inf, scores[:, number])
        order = np.argsort(-column, kind="stable")
        found_scores = column[order]
        # The last image of each distinct score; images with equal scores, infinite ones too, are found together.
        last = np.append(np.flatnonzero(found_scores[1:] != found_scores[:-1]), len(order) - 1)
        found = np.cumsum(own[order, number])[last].astype(np.float64)
        precision = found / (last + 1)
        recall = found / found[-1]
        result[number] = np.sum(np.diff(recall, prepend=0.0) * precision)
    return result


def f1_scores(predicted: NDArray[np.bool_], own: NDArray[np.bool_]) -> tuple[float, float, float]:
    """Return F1 of all pairs of image and class together, the mean over the classes, and the mean over the images, as
    scikit-learn's ``f1_score`` with average micro, macro and samples, and 0 where it is not defined.

    Args:
        predicted, own: (images, classes).
    """
    hits = predicted & own

    def f1(axis: int | None) -> NDArray[np.float64]:
        both = np.sum(predicted, axis=axis) + np.sum(own, axis=axis)
        return np.where(both > 0, 2 * np.sum(hits, axis=axis) / np.maximum(both, 1), 0.0)

    return float(f1(None)), float(f1(0).mean()), float(f1(1).mean())
