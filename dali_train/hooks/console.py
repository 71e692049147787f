"""What a run prints: to the terminal and, by rank, to logs/rank{r}.log."""

import hashlib
import logging
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar, TextIO

import torch.distributed as dist
from tqdm import tqdm

from dali_train.data.progress import size_of_terminal
from dali_train.hooks import Hook
from dali_train.hooks.records import EvaluationRecord, RunEnd, RunPlan, RunStart, StepRecord, TrainRecord
from dali_train.parallel.layout import Layout
from dali_train.runtime.process import device_name
from dali_train.runtime.status import METRICS, OUTSIDE_PHASES, best_evaluation, decisive, read_events
from dali_train.text import duration, plural, printable
from dali_train.training.cost import emulation_warning

logger = logging.getLogger("dali_train")
_WATCHED = ("dali_train", "py.warnings")


class RunLogs(Hook):
    """Installs the log handlers for the duration of the run. Must be the first hook."""

    _handlers: ClassVar[list[logging.Handler]] = []  # the loggers are the process's, too

    def announce(self, record: RunPlan) -> None:
        rank = record.launch.rank
        self._close()  # handlers of an earlier run in this process that ended before its first step
        log = record.directory / "logs" / f"rank{rank}.log"
        self._handlers.append(_Terminal(rank, log))
        try:
            self._handlers.append(_RankFile(log, rank))
        finally:
            logging.captureWarnings(True)
            for name in _WATCHED:
                watched = logging.getLogger(name)
                watched.propagate = False
                for handler in self._handlers:
                    watched.addHandler(handler)
            logger.setLevel(logging.DEBUG)

    def end(self, record: RunEnd) -> None:
        if record.error is not None:
            logger.debug("the run ended with an error", exc_info=record.error)
        self._close()

    def _close(self) -> None:
        for name in _WATCHED:
            watched = logging.getLogger(name)
            watched.propagate = True
            for handler in self._handlers:
                watched.removeHandler(handler)
        logging.captureWarnings(False)
        for handler in self._handlers:
            handler.close()
        self._handlers.clear()


class _RankFile(logging.FileHandler):
    """Writes all messages with time and rank; a resumed run appends to the same file."""

    def __init__(self, path: Path, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        self.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
        self._failed = False

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        if not self._failed:
            self._failed = True  # before the warning, which comes here too
            logger.warning(
                "%s cannot be written (%s). Training continues; free some space, log lines until then are lost",
                self.baseFilename,
                sys.exc_info()[1],
            )


class _Terminal(logging.Handler):
    """Writes rank 0's lines to stdout and all ranks' warnings to stderr, repeated ones only once."""

    def __init__(self, rank: int, log: Path) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self._rank, self._log = rank, log
        self._seen: set[str] = set()
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "file_only", False):
            return
        message = printable(record.getMessage(), keep="\n")
        if record.levelno < logging.WARNING:
            self._write(message, sys.stdout)
        elif self._is_new(message):
            if record.name == "py.warnings":
                message = message.splitlines()[0]
            self._write(f"warning: {f'[rank {self._rank}] ' if self._rank else ''}{message}", sys.stderr)

    def _write(self, text: str, stream: TextIO) -> None:
        """Write a line; a full disk behind the stream, or a reader who left as in `| head`, does not end the run."""
        try:
            tqdm.write(text, file=stream)  # around the progress bar, if there is one
            stream.flush()
        except OSError as error:
            if not self._failed:
                self._failed = True  # before the warning, which comes here too
                logger.warning(
                    "standard output cannot be written (%s). Training continues, and %s has all lines",
                    error.strerror,
                    self._log,
                )

    def _is_new(self, message: str) -> bool:
        """Return True if no rank has shown it yet. Numbers (steps, ranks, sizes) do not make a message new."""
        key = hashlib.sha256(re.sub(r"\d+", "#", message).encode()).hexdigest()
        if key in self._seen:
            return False
        self._seen.add(key)
        if not dist.is_initialized():
            return True
        try:
            return dist.distributed_c10d._get_default_store().add(f"warning/{key}", 1) == 1
        except dist.DistError:
            return True  # rank 0, which holds the store, is gone: better shown twice than not at all


_BAR_FORMAT = "{percentage:3.0f} % |{bar:12}| {desc}"
_BAR_WIDTH = len("100 % |            | ")


class Console(Hook):
    """A progress bar on rank 0's terminal, or plain lines in a file and under Slurm. Other ranks write to their log
    files."""

    def announce(self, record: RunPlan) -> None:
        self._show_plan(record)
        # auto compiles on a GPU only, and says so itself
        compiling = "" if record.config.model.compile in ("none", "auto") else " and compiled, which can take minutes"
        logger.info(f"waiting for the model to be built{compiling}")

    def start(self, record: RunStart) -> None:
        resumed = f", resuming from step {record.start_step}" if record.start_step else ""
        size = (
            f"{record.num_parameters / 1e6:.1f} M" if record.num_parameters >= 100_000 else f"{record.num_parameters:,}"
        )
        logger.info(f"ready      {size} parameters, after {duration(record.startup_s)}{resumed}")
        self._directory = record.directory
        self._best_by = record.config.run.best_by
        self._total = record.total_steps
        self._steps_per_epoch = record.num_images / record.config.batch.global_batch
        self._interval: TrainRecord | None = None
        self._losses: list[tuple[float, int]] = []  # of this epoch's logging intervals, with their steps
        self._result: EvaluationRecord | None = None
        self._rank = record.launch.rank
        self._finished_epoch: int | None = None
        self._last_logged = record.start_step
        self._clock = record.clock
        self._start_step = self._step = record.start_step
        self._epoch = record.start_step / self._steps_per_epoch
        self._begin = self._step_time = time.monotonic()
        self._ended = threading.Event()
        # No control characters in files; srun's output goes to one even if srun has a terminal.
        self._bar = tqdm(
            total=record.total_steps,
            initial=record.start_step,
            **size_of_terminal(),
            bar_format=_BAR_FORMAT,
            disable=record.launch.rank != 0 or not sys.stderr.isatty() or record.launch.launcher == "srun",
        )
        self._ticker = threading.Thread(target=self._tick, name="progress bar", daemon=True)
        if not self._bar.disable:
            self._ticker.start()

    def step(self, record: StepRecord) -> None:
        self._finish_epoch()  # the one before, whose evaluation is known by now
        self._step = record.step
        self._epoch = record.epoch
        self._step_time = time.monotonic()
        self._bar.update(1)
        if record.step == self._start_step + 1:  # the host has waited for the device
            seconds = self._step_time - self._begin
            logger.info(
                f"step {record.step}/{self._total} took {duration(seconds)}, and the next ones take less: at most "
                f"{self._epoch_time(seconds)} per epoch"
            )
        if record.train is not None:
            is_first = self._interval is None or self._last_logged == self._start_step + 1
            self._interval = record.train
            self._losses.append((record.train.loss, record.step - self._last_logged))
            self._last_logged = record.step
            parts = self._parts()
            self._draw(parts)
            if is_first and record.step > self._start_step + 1:  # without the first step, which is the slowest
                parts.append(f"an epoch in {self._epoch_time(record.train.step_s)}")
            logger.info("  ".join([*parts[1:], parts[0]]), extra={"file_only": not self._bar.disable})
        if (
            int(record.epoch + 1e-9) > int(record.epoch - 1 / self._steps_per_epoch + 1e-9)
            or record.step == self._total
        ):
            self._finished_epoch = max(1, int(record.epoch + 1e-9))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._result = record
        if self._finished_epoch is None:  # in the middle of an epoch, whose line is far away
            logger.info(f"evaluation at epoch {record.epoch:.2f}: {_accuracy(record)}")

    def end(self, record: RunEnd) -> None:
        self._finish_epoch()
        self._ended.set()
        if self._ticker.is_alive():
            self._ticker.join()
        self._bar.close()
        state = "failed" if record.error is not None else "finished" if record.finished else "stopped"
        spent = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in record.seconds.items() if seconds >= 0.5)
        logger.info(f"{state} at step {record.step}/{self._total}{': ' if spent else ''}{spent}")
        best = best_evaluation(read_events(self._directory / METRICS), self._best_by) if self._rank == 0 else None
        if best is not None:
            checkpoint = self._directory / "checkpoints" / f"step-{best['step']:08d}"
            kept = checkpoint if checkpoint.is_dir() else "its checkpoint was not kept"
            average = " of the EMA" if "ema_top1" in best else ""
            chosen = "best top-1" if self._best_by == "top1" else f"best by {self._best_by}, top-1"
            logger.info(f"{chosen}{average} {decisive(best, 'top1'):.2%} at step {best['step']}: {kept}")

    def _show_plan(self, record: RunPlan) -> None:
        config = record.config
        batch = record.config.batch
        layout = Layout.from_config(record.launch, record.config.parallel)
        ranks = plural(layout.data_size, "rank")
        if layout.splits_model:
            ranks = f"{layout.data_size} data-parallel of {layout.describe()}"
        if record.launch.launcher != "none":
            ranks += f" ({record.launch.launcher})"
        accumulated = f"{batch.describe_accumulation(layout.data_size)} accumulated"
        idle = layout.describe_idle(batch.num_micro_batches)
        where = " + ".join(config.data.roots)
        lines = {
            "model": f"{config.model.name}, {config.precision.dtype} on {device_name(record.device)}",
            "data": f"{where}: {plural(record.num_images, 'image')}, {plural(record.num_classes, 'class')}",
            "batch": f"{batch.global_batch} = {plural(batch.micro_batch, 'image')} x {accumulated} x {ranks}{idle}",
            "steps": f"{record.total_steps}, {record.num_images / batch.global_batch:.1f} per epoch",
            "directory": config.run.dir,
        }
        logger.info("\n".join(f"{name:<10} {text}" for name, text in lines.items()))
        warning = emulation_warning(config, record.num_classes, record.device) if record.launch.rank == 0 else None
        if warning is not None:
            logger.warning(warning)

    def _tick(self) -> None:
        """Update the bar between logging steps, from what the host knows without waiting for the device."""
        while not self._ended.wait(1.0):
            if self._step > self._start_step:
                self._draw(self._parts())

    def _draw(self, parts: list[str]) -> None:
        self._bar.set_description_str(fitting(parts, _terminal_width() - _BAR_WIDTH))

    def _parts(self) -> list[str]:
        """Return the parts of a line, the most important first; loss and speed are the last logged ones."""
        train = self._interval
        now = time.monotonic()
        step_s = (
            train.step_s if train is not None else (self._step_time - self._begin) / (self._step - self._start_step)
        )
        left = max(0.0, (self._total - self._step) * step_s - (now - self._step_time))
        parts = [
            f"left {duration(round(left))}",
            *([self._clock.phase] if self._clock.phase in OUTSIDE_PHASES else []),
            f"step {self._step}/{self._total}",
            f"epoch {self._epoch:.2f}",
        ]
        if train is None:
            return parts
        waiting = train.data_wait_s / train.step_s if train.step_s else 0.0
        parts += [
            f"loss {train.loss:.4f}",
            f"lr {train.lr:.3g}",
            f"{train.images_per_second:,.0f} images/s",
            *([f"MFU {train.mfu:.1%}"] if train.mfu is not None else []),
            f"data wait {waiting:.0%}",
        ]
        if train.noise_scale is not None:  # estimated to about a tenth
            parts.append(f"critical batch {float(f'{train.noise_scale:.2g}'):,.0f}")
        return parts + ([f"skipped {train.skipped_steps}"] if train.skipped_steps else [])

    def _epoch_time(self, step_s: float) -> str:
        return duration(step_s * self._steps_per_epoch)

    def _finish_epoch(self) -> None:
        if self._finished_epoch is None:
            return
        repeated = self._bar.disable and len(self._losses) == 1  # by the line of the one step that was logged
        if self._result is None and (repeated or not self._losses):
            self._finished_epoch = None
            self._losses = []
            return
        parts = [f"epoch {self._finished_epoch}:"]
        if self._losses:
            total = sum(loss * steps for loss, steps in self._losses)
            parts.append(f"train loss {total / sum(steps for _, steps in self._losses):.4f} ")
        if self._result is not None:
            parts.append(f"evaluation {_accuracy(self._result)} ")
        if self._interval is not None:
            parts.append(f"lr {self._interval.lr:.3g}  {self._interval.images_per_second:,.0f} images/s")
        self._finished_epoch = None
        self._result = None
        self._losses = []
        logger.info(" ".join(parts).rstrip())


def fitting(parts: list[str], width: int) -> str:
    """Join as many `parts` as fit into `width` characters, at least the first; tqdm would truncate in the middle."""
    text = parts[0]
    for part in parts[1:]:
        if len(text) + 2 + len(part) > width:
            break
        text += f"  {part}"
    return text


def _terminal_width() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns - 1  # tqdm leaves the last column free
    except (OSError, ValueError):  # no terminal, so no bar
        return 10**6


def _accuracy(record: EvaluationRecord) -> str:
    result = record.result
    classes = (
        f"  mean over classes {result.balanced_top1:.2%}" if abs(result.balanced_top1 - result.top1) > 5e-5 else ""
    )
    average = f"  EMA top-1 {record.ema.top1:.2%}" if record.ema is not None else ""
    text = f"loss {result.loss:.4f}  top-1 {result.top1:.2%}  top-5 {result.top5:.2%}{classes}{average}{result.more}"
    return text + "".join(f"  {name} {other.top1:.2%}" for name, other in record.sets.items())
