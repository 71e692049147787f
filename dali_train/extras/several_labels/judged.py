"""What ``dali-train predict`` says of a validation split with several labels an image."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dali_train.checkpoint.trained_model import TrainedModel
from dali_train.data.dataset.index import Split
from dali_train.extras.predict.classify import Decoded, Scores, batches_of, logits
from dali_train.extras.several_labels.evaluation import average_precisions, lowest_precisions, own_classes
from dali_train.text import aligned
from dali_train.training.metrics import MAX_SCORES


def compare_several(trained: TrainedModel, split: Split, decoded: Decoded) -> tuple[list[str], Scores]:
    """Return lines on the mean average precision with each of two decoders, and the scores with the first."""
    own = own_classes(split)
    scores = {name: _logits(trained, batches) for name, batches in decoded.items()}
    precisions = {name: average_precisions(values, own) for name, values in scores.items()}
    (first, second), (one, other) = decoded, scores.values()
    by_first, by_second = (float(np.nanmean(values)) for values in precisions.values())
    num_changed = int(((one > 0) != (other > 0)).any(axis=1).sum())
    lines = [
        f"{len(split)} validation images of {trained.config.data.root}: mAP {by_first:.2%} decoded by {first}, "
        f"{by_second:.2%} by {second}, a difference of {abs(by_first - by_second) * 100:.2f} points; {num_changed} "
        "images have other classes with a probability over one half",
        lowest_precisions(precisions[first], split.class_counts, trained.class_names),
    ]
    order = np.argsort(-one, axis=1, kind="stable")
    return lines, (order, _probabilities(np.take_along_axis(one, order, axis=1)))


@dataclass(frozen=True)
class JudgedSeveral:
    """What a model says of all images of a split; arrays are (images, classes). See `show_mistakes`."""

    own: NDArray[np.bool_]
    scores: NDArray[np.float32]  # logits

    def describe(self, names: Sequence[str]) -> list[str]:
        precisions = average_precisions(self.scores, self.own)
        lines = [f"mAP {np.nanmean(precisions):.2%} of {len(self.own):,} validation images"]
        counts = self.own.sum(axis=0).tolist()
        if len(names) > MAX_SCORES:
            return [*lines, lowest_precisions(precisions, np.array(counts), names)]
        shown = ["-" if np.isnan(value) else f"{value:.1%}" for value in precisions]
        rows = [[name, text, f"of {count:,}"] for name, text, count in zip(names, shown, counts, strict=True)]
        return [*lines, *(f"  {line}" for line in aligned(rows))]

    def worst(self, count: int) -> NDArray[np.int64]:
        """Return the numbers of the images with the largest error of a class's probability, at most `count`; only those
        in which one is on the wrong side of one half."""
        errors = np.where(self.own, -self.scores, self.scores).max(axis=1)
        wrong = np.flatnonzero(errors > 0)
        return wrong[np.argsort(-errors[wrong], kind="stable")[:count]]

    def captions(self, image: int, names: Sequence[str]) -> tuple[str, str]:
        """Return the least probable class that the image has, and the most probable one that it has not."""
        scores, own = self.scores[image], self.own[image]
        missed = int(np.where(own, scores, np.inf).argmin())
        added = int(np.where(own, -np.inf, scores).argmax())
        missed_p, added_p = _probabilities(scores[[missed, added]])
        truth = f"is {names[missed]}: {missed_p:.1%}" if own.any() else "has no class"
        return truth, "has all classes" if own.all() else f"taken for {names[added]}: {added_p:.1%}"


def judge_several(trained: TrainedModel, split: Split) -> JudgedSeveral:
    batches = batches_of(split, trained.config.data, channels_last=trained.config.model.channels_last)
    return JudgedSeveral(own_classes(split), _logits(trained, batches))


@torch.inference_mode()
def _logits(trained: TrainedModel, batches: Iterable[torch.Tensor]) -> NDArray[np.float32]:
    """Return the logits of all images, (images, classes)."""
    parts = [logits(trained.model, images, trained.config.data).float() for images in batches]
    return torch.cat(parts).numpy()


def _probabilities(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    return torch.from_numpy(scores).sigmoid().numpy()
