"""``dali-train predict RUN --mistakes FILE``: the validation images that a model gets most wrong, as a picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dali_train.checkpoint.run_directory import local_run
from dali_train.checkpoint.trained_model import TrainedModel, Weights, load_trained
from dali_train.config.check import Extra
from dali_train.data.dataset.index import Split, open_split
from dali_train.extras.image_names import file_names
from dali_train.extras.pictures.predictions import thumbnails
from dali_train.extras.pictures.sheets import contact_sheet
from dali_train.extras.predict.classify import batches_of, logits
from dali_train.text import aligned, printable
from dali_train.training.metrics import MAX_SCORES, ClassTables

_SHOWN = 5
_TILE = 224  # pixels


class Judgement(Protocol):
    """What a model says of all images of a split."""

    def worst(self, count: int) -> NDArray[np.int64]:
        """Return the numbers of the most wrong images, at most `count`."""
        ...

    def describe(self, names: Sequence[str]) -> list[str]:
        """Return lines on the accuracy."""
        ...

    def captions(self, image: int, names: Sequence[str]) -> tuple[str, str]:
        """Return what the image is, and what the model takes it for."""
        ...


JUDGE_SEVERAL = Extra[Callable[[TrainedModel, Split], Judgement]](
    "dali_train.extras.several_labels.judged:judge_several", "a dataset with several labels an image"
)


@dataclass(frozen=True)
class _Judged:
    """Of one label an image; arrays are (images,)."""

    labels: NDArray[np.int64]
    predictions: NDArray[np.int64]
    scores: NDArray[np.float32]  # probabilities of the predictions
    of_truth: NDArray[np.float32]  # probabilities of the labels

    def worst(self, count: int) -> NDArray[np.int64]:
        """Return the numbers of the wrong images whose label has the smallest probability, at most `count`."""
        wrong = np.flatnonzero(self.predictions != self.labels)
        return wrong[np.argsort(self.of_truth[wrong], kind="stable")[:count]]

    def describe(self, names: Sequence[str]) -> list[str]:
        """Return lines on the accuracy, also by class."""
        top1 = float((self.predictions == self.labels).mean())
        lines = [f"top-1 {top1:.2%} of {len(self.labels):,} validation images"]
        tables = ClassTables(self.labels, self.predictions, len(names))
        if len(names) > MAX_SCORES:
            return [*lines, *tables.describe(names)]
        counts = tables.counts().tolist()
        accuracies = tables.accuracies().tolist()
        rows = [
            [name, f"{share:.1%}" if count else "-", f"of {count:,}"]
            for name, share, count in zip(names, accuracies, counts, strict=True)
        ]
        return [*lines, *(f"  {line}" for line in aligned(rows))]

    def captions(self, image: int, names: Sequence[str]) -> tuple[str, str]:
        """Return what the image is, and what the model takes it for."""
        truth = f"is {names[self.labels[image]]}: {self.of_truth[image]:.1%}"
        return truth, f"taken for {names[self.predictions[image]]}: {self.scores[image]:.1%}"


def show_mistakes(run: Path | str, picture: Path, checkpoint: str | None, weights: Weights | None) -> None:
    """Print the accuracy by class on the validation split, and the five worst mistakes, and draw these; with several
    labels an image, average precisions and the largest errors of a class's probability.

    Args:
        run: a run directory, or the URL of a run's mirror.
        picture: the PNG file to write.
        checkpoint, weights: see `load_trained`.

    Raises:
        CheckpointError, ConfigError: see `load_trained`.
        DatasetError: there is no validation split, or an image cannot be decoded.
    """
    with local_run(run, checkpoint) as run_dir:
        trained = load_trained(run_dir, checkpoint, weights)
    split = open_split(trained.config.data, "validation")
    judge = _judge if split.label_kind.is_class else JUDGE_SEVERAL.load()
    judged = judge(trained, split)
    names = [printable(name) for name in trained.class_names]
    print("\n".join(judged.describe(names)))
    worst = judged.worst(_SHOWN)
    if not len(worst):
        print("no mistakes to draw")
        return
    files = file_names(split, worst)
    tiles = []
    for number, file, image in zip(worst.tolist(), files, thumbnails(split, trained.config.data, worst), strict=True):
        truth, taken = judged.captions(number, names)
        name = file or f"image {number}"
        print(f"  {name}: {truth}, {taken}")
        tiles.append((image, [truth, taken, Path(name).name]))
    contact_sheet(tiles, columns=len(tiles), side=_TILE).save(picture, "PNG")
    print(picture)


@torch.inference_mode()
def _judge(trained: TrainedModel, split: Split) -> _Judged:
    labels = torch.from_numpy(split.rows["label"].astype(np.int64))
    predictions, scores, of_truth = [], [], []
    done = 0
    for images in batches_of(split, trained.config.data, channels_last=trained.config.model.channels_last):
        probabilities = logits(trained.model, images, trained.config.data).softmax(dim=-1)
        best = probabilities.max(dim=-1)
        scores.append(best.values)
        predictions.append(best.indices)
        of_truth.append(probabilities.gather(1, labels[done : done + len(images), None]).squeeze(1))
        done += len(images)
    return _Judged(
        labels=labels.numpy(),
        predictions=torch.cat(predictions).numpy(),
        scores=torch.cat(scores).numpy(),
        of_truth=torch.cat(of_truth).numpy(),
    )
