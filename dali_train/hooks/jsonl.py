"""Files in the run directory: metrics.jsonl and the sample trace. A resumed run continues the same files."""

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dali_train.files import ForeignFileError, write_atomically
from dali_train.hooks import Hook
from dali_train.hooks.records import EvaluationRecord, RunEnd, RunStart, StepRecord
from dali_train.runtime.status import METRICS, json_lines, parse_line, read_events
from dali_train.text import redacted

logger = logging.getLogger("dali_train")


class JsonLines:
    """A JSON-lines file for appending, after removing lines of steps after `last_step` and lines torn by a kill. Lines
    of other programs, which have no step, stay.

    Lines are passed to the operating system at once, so they survive a kill. A full disk leaves at most one torn line,
    and the next line starts on a new one. If the file is deleted during the run, a warning is logged and a new file
    started.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        trim(path, last_step)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._torn = False

    def write(self, line: dict[str, Any]) -> None:
        if not self._is_there():
            logger.warning(
                "%s is gone: was %s deleted or moved during the run? What was recorded there is lost; a new file is "
                "started",
                self._path,
                self._path.parent,
            )
            self._file.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        data = (b"\n" if self._torn else b"") + json.dumps(line).encode() + b"\n"
        self._torn = True
        written = self._file.write(data)
        self._torn = written != len(data)

    def close(self) -> None:
        self._file.close()

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def trim(path: Path, last_step: int) -> None:
    """Remove lines of steps after `last_step`, and torn ones, from a JSON-lines file if there is one."""
    if not path.is_file():
        return
    kept = []
    for _, line in json_lines(path):
        with suppress(ForeignFileError):
            step = parse_line(line).get("step")
            if not (isinstance(step, int) and step > last_step):
                kept.append(line.rstrip(b"\n") + b"\n")
    write_atomically(path, b"".join(kept))


class MetricsFile(Hook):
    """``metrics.jsonl``: one line per event: start, train, eval, end, each with its Unix time in seconds."""

    def start(self, record: RunStart) -> None:
        path = record.directory / METRICS
        before = read_events(path)
        self._file = JsonLines(path, record.start_step)
        epoch = record.start_step * record.config.batch.global_batch / record.num_images
        facts = {"total_steps": record.total_steps, "startup_s": record.startup_s, "ranks": record.launch.world_size}
        texts = {"command": record.command, "machine": record.machine, **_kept(record.fingerprint)}
        if before:
            facts["lost_steps"] = max(0, max(event["step"] for event in before) - record.start_step)
            facts["away_s"] = max(0.0, time.time() - before[-1].get("time", time.time()))
        self._write("start", record.start_step, epoch, facts | texts)

    def step(self, record: StepRecord) -> None:
        if record.train is not None:
            self._write("train", record.step, record.epoch, record.train.scalars() | _kept(record.train.fingerprint))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write("eval", record.step, record.epoch, record.scalars())

    def end(self, record: RunEnd) -> None:
        error = None if record.error is None else redacted(f"{type(record.error).__name__}: {record.error}")
        self._write(
            "end",
            record.step,
            record.epoch,
            {"seconds": record.seconds, "finished": record.finished, "error": error},
        )
        self._file.close()

    def _write(self, event: str, step: int, epoch: float, facts: Mapping[str, Any]) -> None:
        self._file.write({"event": event, "step": step, "epoch": epoch, "time": time.time(), **facts})


def _kept(record: str) -> dict[str, Any]:
    return {"record": record} if record else {}


class SampleTrace(Hook):
    """``samples.rank{r}.jsonl``: which images each micro-batch of this rank had, and where in the epoch.

    Steps count from 0, as those of micro-batches do: step s of metrics.jsonl is s - 1 here.

    Args:
        writes: whether this rank records its micro-batches; of several ranks with the same ones, only one does. The
            others still trim files that they wrote under another layout.
    """

    def __init__(self, *, writes: bool) -> None:
        self._writes = writes

    def start(self, record: RunStart) -> None:
        self._num_images = record.num_images
        last_step = record.start_step - 1
        if record.launch.rank == 0:  # files of ranks that the run had before and has no more
            for path in record.directory.glob("samples.rank*.jsonl"):
                rank = path.name.removeprefix("samples.rank").removesuffix(".jsonl")
                if rank.isdecimal() and int(rank) >= record.launch.world_size:
                    trim(path, last_step)
        path = record.directory / f"samples.rank{record.launch.rank}.jsonl"
        if self._writes:
            self._file = JsonLines(path, last_step)
        else:
            trim(path, last_step)

    def step(self, record: StepRecord) -> None:
        for batch in record.micro_batches if self._writes else ():
            self._file.write(
                {
                    "step": batch.step,
                    "k": batch.k,
                    "epoch_positions": (batch.positions % self._num_images).tolist(),
                    "images": batch.images.tolist(),
                }
            )

    def end(self, record: RunEnd) -> None:
        if self._writes:
            self._file.close()
