"""Which labels a network did not come to believe while it was trained on them.

A label that is wrong contradicts those of similar images. So through most of the training another class has the larger
logit for its image, until the network learns the image by heart. That is measured by the margin, the logit of the label
less the largest other one, in the mean over epochs: the area under the margin of Pleiss et al. (arXiv 2001.10528). The
network has to have learned the other images by then, so the second half of the epochs counts; and a mixed image counts
by its lambda, since of the rest of its pixels nothing can be said.

A label is suspect where the network was at least `_SURE` times as sure of another class as it was, on average, of the
labels that it believed. A list of all negative margins would also have the mistakes of a network that has learned
little, which is sure of nothing (docs/measurements/labels.md).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dali_train.checkpoint.fingerprint import require_draws, samples_of
from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.checkpoint.trained_model import TrainedModel, Weights, load_trained
from dali_train.config import Config
from dali_train.data.dataset.index import Split, open_split
from dali_train.data.progress import SHORT_S, Progress
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.errors import ConfigError
from dali_train.extras.image_names import file_names
from dali_train.extras.ledger.hook import ledger_files, read_epoch, shares
from dali_train.extras.pictures.predictions import thumbnails, write_table
from dali_train.extras.pictures.sheets import contact_sheet
from dali_train.extras.predict.classify import batches_of, logits
from dali_train.extras.proof.prove import with_dataset
from dali_train.text import aligned, printable

_SURE = 0.5
_MANY = 0.2  # of the images: so many labels are not wrong, the network has not learned them
_TILE = 160  # pixels
_NAMES_AT_ONCE = 5000  # that are read between two updates of the bar


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A training image whose label may be wrong."""

    image: int  # row of the training split's index
    file: str  # empty: not known
    margin: float  # the mean, below 0
    label: str
    looks_like: str  # the most likely other class
    probability: float  # of that class


def show_suspects(
    run_dir: Path,
    *,
    dataset: str | None,
    count: int,
    picture: Path | None,
    table: Path | None,
    checkpoint: str | None,
    weights: Weights | None,
) -> list[Suspect]:
    """Print the first `count` suspects, draw them, and write all of them as a list for data.exclude.

    Args:
        dataset: where the run's dataset is now; None: at its data.root.
        picture, table: a PNG and a CSV file; None: in the run directory.
        checkpoint, weights: which model says what an image looks like, see `load_trained`.

    Raises:
        ConfigError: the run has no ledger, or that of another dataset; see also `load_trained`.
        CheckpointError: see `load_trained`.
        DatasetError: the dataset is not here, or an image cannot be decoded.
    """
    run = RunDirectory(run_dir)
    require_draws(run)
    config = with_dataset(run.config, dataset)
    _, micro_batches = samples_of(config)
    split = open_split(config.data, "train")
    split.label_kind.require_class(split.dataset_name)
    margins = mean_margins(run, split, micro_batches)
    numbers = suspicious(margins)
    known = int(np.isfinite(margins).sum())
    print(
        f"{len(numbers):,} of {known:,} images are suspect: the network took them for another class than their label's"
    )
    if not len(numbers):
        return []
    if len(numbers) > _MANY * known:
        print("that is a large part: the network had not learned the images well, and most of them may be right")
    trained = load_trained(run_dir, checkpoint, weights)
    suspects = _described(trained, split, config, numbers, margins)
    shown = suspects[:count]
    _print(shown)
    _write(table or run_dir / "suspects" / "suspects.csv", suspects)
    _draw(picture or run_dir / "suspects" / "suspects.png", shown, split, config)
    return suspects


def mean_margins(run: RunDirectory, split: Split, micro_batches: MicroBatches) -> NDArray[np.float64]:
    """Return the mean margin of each image over the second half of a run, each weighted by its lambda, (N,); NaN: it
    was not trained. The epoch in which that half begins counts as a whole: it may be the only one.

    Raises:
        ConfigError: the run has no ledger of its second half, or it is of another dataset.
    """
    files = ledger_files(run.directory)
    if not files:
        raise ConfigError(f"{run.directory} has no ledger: train with --hooks.ledger true")
    trained = max((event["step"] for event in run.events), default=0) * run.config.batch.global_batch  # images
    middle = trained // 2 // split.num_images
    if middle > max(files):
        raise ConfigError(
            f"{run.directory} has a ledger of epochs up to {max(files)} and was trained for "
            f"{trained / split.num_images:.1f}: the second half is needed, so train to the end with --hooks.ledger true"
        )
    sums = np.zeros(len(split))
    totals = np.zeros(len(split))
    epochs = [epoch for epoch in files if epoch >= middle]
    with Progress(
        "reading the ledger", total=len(epochs) * split.num_images, unit="images", delay_s=SHORT_S
    ) as progress:
        for epoch in epochs:
            margins = read_epoch(files[epoch], len(split))["margin"].astype(np.float64)
            lambdas = shares(micro_batches, epoch, split.num_images, len(split), progress.update)
            is_known = np.isfinite(margins)
            sums[is_known] += (lambdas * margins)[is_known]
            totals[is_known] += lambdas[is_known]
    return np.divide(sums, totals, out=np.full(len(split), np.nan), where=totals > 0)


def suspicious(margins: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the suspects among images with these mean margins, (N,), the smallest margin first."""
    believed = margins[margins > 0]
    if not len(believed):
        return np.zeros(0, np.int64)
    numbers = np.flatnonzero(margins < -_SURE * believed.mean())
    return numbers[np.argsort(margins[numbers], kind="stable")]


@torch.inference_mode()
def _described(
    trained: TrainedModel,
    split: Split,
    config: Config,
    numbers: NDArray[np.int64],
    margins: NDArray[np.float64],
) -> list[Suspect]:
    """Return the suspects with these `numbers`, and what the model takes them for if not for their label."""
    names = [printable(name) for name in trained.class_names]
    labels = split.rows["label"][numbers].astype(np.int64)
    likeliest: list[tuple[int, float]] = []
    with Progress("looking at suspects", total=len(numbers), unit="images") as progress:
        for images in batches_of(split, config.data, numbers, channels_last=config.model.channels_last):
            probabilities = logits(trained.model, images, config.data).softmax(dim=-1)
            own = torch.from_numpy(labels[len(likeliest) : len(likeliest) + len(images)])
            others = probabilities.scatter(1, own[:, None], -1.0).max(dim=-1)
            likeliest += zip(others.indices.tolist(), others.values.tolist(), strict=True)
            progress.update(len(images))
    files: list[str] = []
    with Progress("names of files", total=len(numbers), unit="images", delay_s=SHORT_S) as progress:
        for first in range(0, len(numbers), _NAMES_AT_ONCE):
            files += file_names(split, numbers[first : first + _NAMES_AT_ONCE])
            progress.update(len(files) - first)
    rows = zip(numbers.tolist(), files, labels.tolist(), likeliest, strict=True)
    return [
        Suspect(
            image=image,
            file=file,
            margin=float(margins[image]),
            label=names[label],
            looks_like=names[other],
            probability=probability,
        )
        for image, file, label, (other, probability) in rows
    ]


def _print(suspects: list[Suspect]) -> None:
    rows = [("margin", "label", "looks like", "image", "file")]
    for one in suspects:
        rows.append(
            (f"{one.margin:.2f}", one.label, f"{one.looks_like} {one.probability:.0%}", str(one.image), one.file)
        )
    print("\n".join(aligned(rows)))


def _write(path: Path, suspects: list[Suspect]) -> None:
    columns = ["image", "file", "label", "looks like", "probability", "margin"]
    rows = [
        [one.image, one.file, one.label, one.looks_like, round(one.probability, 4), round(one.margin, 4)]
        for one in suspects
    ]
    write_table(path, columns, rows)
    print(f"{path}: delete the lines of images that are right; without the others trains --data.exclude {path}")


def _draw(path: Path, suspects: list[Suspect], split: Split, config: Config) -> None:
    images = thumbnails(split, config.data, np.array([one.image for one in suspects]))
    captions = [
        [f"is called {one.label}", f"looks like {one.looks_like}", Path(one.file).name or f"image {one.image}"]
        for one in suspects
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    tiles = list(zip(images, captions, strict=True))
    contact_sheet(tiles, columns=min(4, len(tiles)), side=_TILE).save(path, "PNG")
    print(path)
