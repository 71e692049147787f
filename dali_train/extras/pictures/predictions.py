"""What the network sees and answers, as pictures and tables.

``samples.png`` shows training images: cropped, mirrored and mixed, with their labels. ``predictions/step-NNNNNNNN/``
holds ``predictions.csv`` (always the same validation images), ``classes.csv`` and ``confusion.csv`` (up to 20 classes)
or ``confused_pairs.csv`` (above); ``predictions/images/`` the images once. All tables are of the weights whose accuracy
decides: of their moving average, if the run has one; the column ``weights`` of ``classes.csv`` says which.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from timm.data import ImageNetInfo

from dali_train.config import DataConfig, HooksConfig
from dali_train.data.dataset.index import Split, open_split
from dali_train.data.dataset.storage import open_storage, read_stored
from dali_train.data.loading.pipelines import Batch
from dali_train.extras.image_names import file_names
from dali_train.extras.pictures.sheets import contact_sheet, picture
from dali_train.files import remove_written, write_atomically
from dali_train.hooks import Hook
from dali_train.hooks.records import EvaluationRecord, RunStart, StepRecord
from dali_train.parallel.layout import Layout
from dali_train.text import printable
from dali_train.training.metrics import MAX_SCORES, ClassTables, EvaluationDetails


def make_hooks(config: HooksConfig, layout: Layout) -> list[Hook]:
    if layout.rank != 0:
        return []
    return [SampleImages(), PredictionFiles()] if config.predictions else [SampleImages()]


def class_names(record: RunStart) -> tuple[str, ...]:
    """Return a unique name per class: the dataset's, with WordNet ids replaced by words; without names, the labels."""
    names = record.class_names or tuple(str(number) for number in range(record.num_classes))
    return _in_words(names) if all(re.fullmatch(r"n\d{8}", name) for name in names) else names


def label_names(record: RunStart) -> Callable[[int], str]:
    """Return a function from a label of the index to the name of its class, or the names of several."""
    return partial(record.split.label_text, names=class_names(record))


def _in_words(synsets: tuple[str, ...]) -> tuple[str, ...]:
    """Return "tench" for "n01440764". Words of several classes (crane, maillot) get the number too."""
    info, words = ImageNetInfo(), []  # knows the 21,841 synsets of ImageNet-21k as well
    for name in synsets:
        try:
            words.append(info.label_name_to_description(name).split(",")[0])
        except KeyError:
            words.append(name)
    counts = Counter(words)
    return tuple(word if counts[word] == 1 else f"{word} ({name})" for word, name in zip(words, synsets, strict=True))


_TILE = 224  # pixels


def sample_images(
    batch: Batch, data: DataConfig, names: Callable[[int], str], count: int
) -> list[tuple[NDArray[np.uint8], str]]:
    """Return the first `count` images of a batch, (height, width, 3) with the normalisation undone, and captions."""
    pixels = batch.images[:count].float().permute(0, 2, 3, 1).cpu().numpy() * np.array(data.std) + np.array(data.mean)
    targets, lambdas = batch.targets[:count].tolist(), batch.lambdas[:count].tolist()
    captions = [_caption(classes, weight, names) for classes, weight in zip(targets, lambdas, strict=True)]
    return list(zip(pixels.round().clip(0, 255).astype(np.uint8), captions, strict=True))


def _caption(labels: list[int], weight: float, names: Callable[[int], str]) -> str:
    image, partner = (printable(names(label)) for label in labels)
    if image == partner or weight > 0.995:
        return image
    return partner if weight < 0.005 else f"{weight:.0%} {image} + {1 - weight:.0%} {partner}"


def sheet(images: list[tuple[NDArray[np.uint8], str]]) -> Image.Image:
    """Return a picture of all images in rows of four with their captions below."""
    return contact_sheet([(Image.fromarray(pixels), [caption]) for pixels, caption in images], columns=4, side=_TILE)


NUM_SAMPLES = 16
"""Images of the first step that are kept as the network sees them."""


class SampleImages(Hook):
    """``samples.png``: images of the first step that this process trained."""

    def start(self, record: RunStart) -> None:
        self._start = record
        self._names = label_names(record)

    def step(self, record: StepRecord) -> None:
        if record.step == self._start.start_step + 1:
            images = sample_images(record.batch, self._start.config.data, self._names, NUM_SAMPLES)
            sheet(images).save(self._start.directory / "samples.png")


_THUMBNAIL = 128  # pixels


def prediction_table(
    details: EvaluationDetails, names: Sequence[str], files: Sequence[str]
) -> tuple[list[str], list[list[Any]]]:
    """Return (columns, rows): image number, file, label, prediction, and the scores of all classes or only of these
    two.

    Args:
        names: of the classes.
        files: of the shown images.
    """
    all_scores = len(names) <= MAX_SCORES
    columns = [
        "image",
        "file",
        "truth",
        "prediction",
        *([f"score {name}" for name in names] if all_scores else ["score", "score of truth"]),
    ]
    rows = [
        [
            int(number),
            file,
            names[details.labels[number]],
            names[details.predictions[number]],
            *(round(float(s), 5) for s in scores),
        ]
        for number, file, scores in zip(details.shown, files, details.scores, strict=True)
    ]
    return columns, rows


def thumbnails(split: Split, data: DataConfig, numbers: NDArray[np.int64]) -> list[Image.Image]:
    """Return these images of a split in RGB, shrunk to at most 128 pixels per side.

    Raises:
        DatasetError: one cannot be decoded.
    """
    stored = read_stored(open_storage(split, data), split, numbers)
    images = [picture(split, number, content) for number, content in zip(numbers.tolist(), stored, strict=True)]
    for image in images:
        image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return images


def thumbnail_path(run_directory: Path, number: int) -> Path:
    """Return where `PredictionFiles` keeps image `number` of the validation split, for trackers and reports."""
    return run_directory / "predictions" / "images" / f"{number}.png"


class PredictionFiles(Hook):
    """Writes the files, on one rank."""

    def start(self, record: RunStart) -> None:
        self._start = record
        self._names = class_names(record)
        self._directory = record.directory / "predictions"
        self._files: list[str] | None = None  # of the shown images

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.class_scores is not None:
            self._write_class_scores(record, record.class_scores)
        details = record.details
        if details is None:
            return
        self._save_images(details.shown)
        directory = self._directory / f"step-{record.step:08d}"
        if self._files is None:
            self._files = file_names(self._split, details.shown)
        columns, rows = prediction_table(details, self._names, self._files)
        write_table(directory / "predictions.csv", columns, rows)
        tables = ClassTables(details.labels, details.predictions, len(self._names))
        accuracies = zip(self._names, tables.counts().tolist(), tables.accuracies().tolist(), strict=True)
        weights = "as trained" if record.ema is None else "moving average"
        by_class = ([*row, weights] for row in accuracies)
        write_table(directory / "classes.csv", ["class", "images", "accuracy", "weights"], by_class)
        if len(self._names) <= MAX_SCORES:
            named = ([name, *row] for name, row in zip(self._names, tables.confusion().tolist(), strict=True))
            write_table(directory / "confusion.csv", ["truth", *self._names], named)
        else:
            pairs = (
                (self._names[truth], self._names[predicted], images)
                for truth, predicted, images in tables.most_confused()
            )
            write_table(directory / "confused_pairs.csv", ["truth", "prediction", "images"], pairs)

        self._retire(directory)

    def _write_class_scores(self, record: EvaluationRecord, scores: NDArray[np.float64]) -> None:
        """Write the table of classes with several labels an image, of which there are no other tables."""
        directory = self._directory / f"step-{record.step:08d}"
        weights = "as trained" if record.ema is None else "moving average"
        by_class = zip(self._names, self._images_per_class, scores.tolist(), strict=True)
        columns = ["class", "images", "average precision", "weights"]
        write_table(directory / "classes.csv", columns, ([*row, weights] for row in by_class))
        self._retire(directory)

    @cached_property
    def _split(self) -> Split:
        return open_split(self._start.config.data, "validation")

    @cached_property
    def _images_per_class(self) -> list[int]:
        return self._split.count_classes(self._split.rows["label"]).tolist()

    def _retire(self, newest: Path) -> None:
        """Remove the tables of evaluations whose checkpoints are gone: 300 epochs would leave 900 files."""
        for path in self._directory.glob("step-*"):
            if path != newest and not (self._start.directory / "checkpoints" / path.name).is_dir():
                remove_written(path, r"(predictions|classes|confusion|confused_pairs)\.csv")

    def _save_images(self, shown: NDArray[np.int64]) -> None:
        directory = self._directory / "images"
        if directory.exists():
            return
        partial = directory.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        images = thumbnails(self._split, self._start.config.data, shown)
        for number, image in zip(shown.tolist(), images, strict=True):
            image.save(partial / f"{number}.png")
        partial.rename(directory)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file, complete or not at all."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows([columns, *rows])
    write_atomically(path, text.getvalue().encode())  # a report that reads it meanwhile must not find half a row
