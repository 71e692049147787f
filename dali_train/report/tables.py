"""The prediction tables of a run's newest evaluation, parsed row by row."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dali_train.errors import ConfigError
from dali_train.files import read_limited

Row = TypeVar("Row")
_LARGEST_TABLE = 50_000_000  # bytes; that of 21,841 classes has 2 MB


class Prediction(NamedTuple):
    image: int  # its number in the validation split
    truth: str
    predicted: str
    score: float  # of the predicted class, a probability


class ClassAccuracy(NamedTuple):
    name: str
    images: int
    accuracy: float  # a fraction; NaN without images


class ConfusedPair(NamedTuple):
    truth: str
    predicted: str
    images: int


class PredictionTables:
    """The files in ``predictions/step-NNNNNNNN/``, see `dali_train.hooks.predictions`; a missing file has no rows.

    Raises:
        ConfigError: a table is not what a run writes; the message names file and line.
    """

    def __init__(self, run_directory: Path) -> None:
        newest = max(run_directory.glob("predictions/step-*"), default=run_directory / "predictions")
        self.predictions = _read(newest / "predictions.csv", _prediction)
        self.classes = _read(
            newest / "classes.csv", lambda head, row: ClassAccuracy(row[0], _count(row[1]), float(row[2]))
        )
        self.pairs = _read(
            newest / "confused_pairs.csv", lambda head, row: ConfusedPair(row[0], row[1], _count(row[2]))
        )
        confusion = _read(newest / "confusion.csv", lambda head, row: (row[0], [*map(_count, row[1:])]))
        self.confusion_classes = [name for name, _ in confusion]
        # (truth, predicted)
        self.confusion: NDArray[np.int64] = np.array([counts for _, counts in confusion], dtype=np.int64)
        if confusion and self.confusion.shape != (len(confusion), len(confusion)):
            raise ConfigError(f"{newest / 'confusion.csv'} is not square, as a run writes it: move it away")


def _count(text: str) -> int:
    count = int(text)
    if not 0 <= count < 1 << 63:
        raise ValueError(f"{text[:20]} is not a count")
    return count


def _prediction(head: list[str], row: list[str]) -> Prediction:
    score = row[3] if head[3] == "score" else row[head.index(f"score {row[2]}", 3)]
    return Prediction(_count(row[0]), row[1], row[2], float(score))


def _read(path: Path, parse: Callable[[list[str], list[str]], Row]) -> list[Row]:
    if not path.is_file():
        return []
    head: list[str] = []
    rows: list[Row] = []
    try:
        text = read_limited(path, _LARGEST_TABLE).decode()
        for row in csv.reader(io.StringIO(text, newline=""), strict=True):
            if not head:
                head = row
            elif len(row) != len(head):
                raise ValueError(f"{len(row)} of {len(head)} columns")
            else:
                rows.append(parse(head, row))
    except (OSError, ValueError, IndexError, csv.Error) as error:
        raise ConfigError(f"{path}, row {len(rows) + 1}, is not what a run writes ({error}): move it away") from None
    return rows
