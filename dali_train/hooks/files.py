"""Files in the run directory: metrics.jsonl and the sample trace. A resumed run goes on in the same files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dali_train.data.micro_batch import MicroBatch
from dali_train.hooks.base import EvaluationRecord, Hook, RunEnd, RunStart, StepRecord


class JsonLines:
    """A JSON-lines file for appending, without the lines that `keep` refuses or that a killed run left half.

    Lines are handed to the operating system at once: a killed run keeps them. One that did not fit on a full disk
    leaves a torn line at most; the next one begins on a line of its own.
    """

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            lines = [text for text in path.read_text().splitlines() if (line := _parse(text)) is not None and keep(line)]
            partial = path.with_suffix(".partial")
            partial.write_text("".join(text + "\n" for text in lines))
            partial.replace(path)
        self._file = path.open("ab", buffering=0)
        self._torn = False

    def write(self, line: dict[str, Any]) -> None:
        data = (b"\n" if self._torn else b"") + json.dumps(line).encode() + b"\n"
        self._torn = True
        written = self._file.write(data)
        self._torn = written != len(data)

    def close(self) -> None:
        self._file.close()


def _parse(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) else None


class MetricsFile(Hook):
    """``metrics.jsonl``: one line an event: start, train, eval, end."""

    def start(self, record: RunStart) -> None:
        self._file = JsonLines(record.directory / "metrics.jsonl", lambda line: line["step"] <= record.start_step)
        epoch = record.start_step * record.config.batch.global_batch / record.num_images
        self._file.write({"event": "start", "step": record.start_step, "epoch": epoch, "startup_s": record.startup_s})

    def step(self, record: StepRecord) -> None:
        if record.train is not None:
            self._file.write({"event": "train", "step": record.step, "epoch": record.epoch, **record.train.scalars()})

    def evaluation(self, record: EvaluationRecord) -> None:
        self._file.write({"event": "eval", "step": record.step, "epoch": record.epoch, **record.scalars()})

    def end(self, record: RunEnd) -> None:
        error = None if record.error is None else f"{type(record.error).__name__}: {record.error}"
        self._file.write({"event": "end", "step": record.step, "epoch": record.epoch, "seconds": record.seconds, "error": error})
        self._file.close()


class SampleTrace(Hook):
    """``samples.rank{r}.jsonl``: which images each micro-batch of this rank had, and where in the epoch."""

    def start(self, record: RunStart) -> None:
        self._num_images = record.num_images
        path = record.directory / f"samples.rank{record.launch.rank}.jsonl"
        self._file = JsonLines(path, lambda line: line["step"] < record.start_step)

    def step(self, record: StepRecord) -> None:
        for batch in record.micro_batches:
            assert isinstance(batch, MicroBatch)  # the config refuses the trace where images have no numbers
            self._file.write(
                {
                    "step": batch.step,
                    "k": batch.k,
                    "epoch_positions": (batch.positions % self._num_images).tolist(),
                    "images": batch.images.tolist(),
                }
            )

    def end(self, record: RunEnd) -> None:
        self._file.close()
