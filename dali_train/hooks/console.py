"""Console output: the plan at the start, the time of the first step, a line per logging interval, a line per epoch, the
result at the end."""

import logging
import os
import sys
import threading
import time

from tqdm import tqdm

from dali_train.hooks.base import Hook
from dali_train.hooks.records import EvaluationRecord, RunEnd, RunPlan, RunStart, StepRecord, TrainRecord
from dali_train.parallel.layout import Layout
from dali_train.runtime.events import METRICS, OUTSIDE_PHASES, best_evaluation, decisive, read_events
from dali_train.text import duration, plural

logger = logging.getLogger("dali_train")

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
            dynamic_ncols=True,
            bar_format=_BAR_FORMAT,
            disable=record.launch.rank != 0 or not sys.stderr.isatty() or record.launch.launcher == "srun",
        )
        self._ticker = threading.Thread(target=self._tick, name="progress bar", daemon=True)
        if not self._bar.disable:
            self._ticker.start()

    def step(self, record: StepRecord) -> None:
        self._finish_epoch()  # the one before, whose evaluation is known by now
        self._step, self._epoch, self._step_time = record.step, record.epoch, time.monotonic()
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
        best = best_evaluation(read_events(self._directory / METRICS)) if self._rank == 0 else None
        if best is not None:
            checkpoint = self._directory / "checkpoints" / f"step-{best['step']:08d}"
            kept = checkpoint if checkpoint.is_dir() else "its checkpoint was not kept"
            average = " of the EMA" if "ema_top1" in best else ""
            logger.info(f"best top-1{average} {decisive(best, 'top1'):.2%} at step {best['step']}: {kept}")

    def _show_plan(self, record: RunPlan) -> None:
        config, batch = record.config, record.config.batch
        layout = Layout.from_config(record.launch, record.config.parallel)
        ranks = f"{plural(layout.data_size, 'rank')} ({record.launch.launcher})"
        if layout.splits_model:
            ranks = f"{layout.data_size} data-parallel of {layout.describe()} ({record.launch.launcher})"
        accumulated = f"{batch.describe_accumulation(layout.data_size)} accumulated"
        idle = layout.describe_idle(batch.num_micro_batches)
        lines = {
            "model": f"{config.model.name}, {config.precision.dtype} on {record.device}",
            "data": f"{config.data.root}: {plural(record.num_images, 'image')}, {plural(record.num_classes, 'class')}",
            "batch": f"{batch.global_batch} = {plural(batch.micro_batch, 'image')} x {accumulated} x {ranks}{idle}",
            "steps": f"{record.total_steps}, {record.num_images / batch.global_batch:.1f} per epoch",
            "directory": config.run.dir,
        }
        logger.info("\n".join(f"{name:<10} {text}" for name, text in lines.items()))
        if config.precision.dtype == "fp16" and record.device.startswith("CPU"):
            logger.warning(
                "precision.dtype is fp16, which a CPU computes many times slower than fp32: use bf16 or fp32"
            )

    def _tick(self) -> None:
        """Update the bar between logging steps, from what the host knows without waiting for the device."""
        while not self._ended.wait(1.0):
            if self._step > self._start_step:
                self._draw(self._parts())

    def _draw(self, parts: list[str]) -> None:
        self._bar.set_description_str(fitting(parts, _terminal_width() - _BAR_WIDTH))

    def _parts(self) -> list[str]:
        """Return the parts of a line, the most important first; loss and speed are the last logged ones."""
        train, now = self._interval, time.monotonic()
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
        return parts + ([f"skipped {train.skipped_steps}"] if train.skipped_steps else [])

    def _epoch_time(self, step_s: float) -> str:
        return duration(step_s * self._steps_per_epoch)

    def _finish_epoch(self) -> None:
        if self._finished_epoch is None:
            return
        repeated = self._bar.disable and len(self._losses) == 1  # by the line of the one step that was logged
        if self._result is None and (repeated or not self._losses):
            self._finished_epoch, self._losses = None, []
            return
        parts = [f"epoch {self._finished_epoch}:"]
        if self._losses:
            total = sum(loss * steps for loss, steps in self._losses)
            parts.append(f"train loss {total / sum(steps for _, steps in self._losses):.4f} ")
        if self._result is not None:
            parts.append(f"evaluation {_accuracy(self._result)} ")
        if self._interval is not None:
            parts.append(f"lr {self._interval.lr:.3g}  {self._interval.images_per_second:,.0f} images/s")
        self._finished_epoch, self._result, self._losses = None, None, []
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
    return f"loss {result.loss:.4f}  top-1 {result.top1:.2%}  top-5 {result.top5:.2%}{classes}{average}"
