"""Files in the run directory: metrics.jsonl and the sample trace. A resumed run goes on in the same files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from dali_train.evaluate import EvaluationResult
from dali_train.hooks.base import Hook, RunEnd, RunStart, StepRecord


class MetricsFile(Hook):
    """One JSON line an event, flushed at once: train, eval, end."""

    def start(self, record: RunStart) -> None:
        self._file = continue_jsonl(record.directory / "metrics.jsonl", lambda line: line["step"] <= record.start_step)

    def step(self, record: StepRecord) -> None:
        if record.train is not None:
            self._write({"event": "train", "step": record.step, "epoch": record.epoch, **vars(record.train)})

    def evaluation(self, step: int, epoch: float, result: EvaluationResult) -> None:
        self._write({"event": "eval", "step": step, "epoch": epoch, **vars(result)})

    def end(self, record: RunEnd) -> None:
        error = None if record.error is None else f"{type(record.error).__name__}: {record.error}"
        self._write({"event": "end", "step": record.step, "epoch": record.epoch, "seconds": record.seconds, "error": error})
        self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


class SampleTrace(Hook):
    """``samples.rank{r}.jsonl``: which images each micro-batch of this rank had, and where in the epoch."""

    def start(self, record: RunStart) -> None:
        self._num_images = record.num_images
        path = record.directory / f"samples.rank{record.launch.rank}.jsonl"
        self._file = continue_jsonl(path, lambda line: line["step"] < record.start_step)

    def step(self, record: StepRecord) -> None:
        for batch in record.micro_batches:
            line = {
                "step": batch.step,
                "k": batch.k,
                "epoch_positions": (batch.positions % self._num_images).tolist(),
                "images": batch.images.tolist(),
            }
            self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def end(self, record: RunEnd) -> None:
        self._file.close()


def continue_jsonl(path: Path, keep: Callable[[dict[str, Any]], bool]) -> TextIO:
    """Open a JSON-lines file for appending, without the lines that `keep` refuses or that a killed run left half."""
    lines = []
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if keep(line):
                lines.append(text + "\n")
        partial = path.with_suffix(".partial")
        partial.write_text("".join(lines))
        partial.replace(path)
    return path.open("a")
