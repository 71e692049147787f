"""A run as it goes by: the layout at the start, a line every logging interval, a line every epoch."""

import datetime
import logging
import sys

from tqdm import tqdm

from dali_train.hooks.base import EvaluationRecord, Hook, RunEnd, RunStart, StepRecord, TrainRecord

logger = logging.getLogger("dali_train")


class Console(Hook):
    """A progress bar on rank 0's terminal; in a file or under Slurm plain lines. Other ranks write to their log files."""

    def start(self, record: RunStart) -> None:
        config, launch = record.config, record.launch
        batch = config.batch
        ranks = f"{launch.world_size} rank{'s' if launch.world_size > 1 else ''} ({launch.launcher})"
        millions = record.num_parameters / 1e6
        resumed = f", going on from step {record.start_step}" if record.start_step else ""
        logger.info(
            f"model      {config.model.name}, {millions:.1f} M parameters, {config.precision.dtype} on {record.device}\n"
            f"data       {config.data.root}: {record.num_images} images, {record.num_classes} classes\n"
            f"batch      {batch.global_batch} = {batch.micro_batch} images x {record.accumulation} accumulated x {ranks}\n"
            f"steps      {record.total_steps}, {record.num_images / batch.global_batch:.1f} an epoch{resumed}\n"
            f"directory  {config.run.dir}"
        )
        self._total = record.total_steps
        self._steps_an_epoch = record.num_images / batch.global_batch
        self._interval: TrainRecord | None = None
        self._epoch_loss = _Mean()
        self._result: EvaluationRecord | None = None
        self._finished_epoch: int | None = None
        self._last_logged = record.start_step
        # Control characters have no place in a file, and srun's output is one even where srun has a terminal.
        self._bar = tqdm(
            total=record.total_steps, initial=record.start_step, dynamic_ncols=True,
            bar_format="{percentage:3.0f} % |{bar:12}| {desc}",
            disable=launch.rank != 0 or not sys.stderr.isatty() or launch.launcher == "srun",
        )  # fmt: skip

    def step(self, record: StepRecord) -> None:
        self._finish_epoch()  # the one before, whose evaluation is known by now
        self._bar.update(1)
        if record.train is not None:
            self._interval = record.train
            self._epoch_loss.add(record.train.loss, record.step - self._last_logged)
            self._last_logged = record.step
            text = self._line(record.step, record.epoch, record.train)
            self._bar.set_description_str(text, refresh=False)
            logger.info(text, extra={"file_only": not self._bar.disable})
        if int(record.epoch + 1e-9) > int(record.epoch - 1 / self._steps_an_epoch + 1e-9) or record.step == self._total:
            self._finished_epoch = max(1, int(record.epoch + 1e-9))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._result = record
        if self._finished_epoch is None:  # in the middle of an epoch: the epoch's line is far away
            logger.info(f"evaluation at epoch {record.epoch:.2f}: {_accuracy(record)}")

    def end(self, record: RunEnd) -> None:
        self._finish_epoch()
        self._bar.close()
        spent = ", ".join(f"{phase} {_duration(seconds)}" for phase, seconds in record.seconds.items() if seconds >= 0.5)
        logger.info(f"{'finished' if record.error is None else 'ended'} at step {record.step}/{self._total}: {spent}")

    def _line(self, step: int, epoch: float, train: TrainRecord) -> str:
        waiting = train.data_wait_s / train.step_s if train.step_s else 0.0
        left = _duration((self._total - step) * train.step_s)
        text = (
            f"step {step}/{self._total}  epoch {epoch:.2f}  loss {train.loss:.4f}  lr {train.lr:.3g}  "
            f"{train.images_per_second:,.0f} images/s  data wait {waiting:.0%}  left {left}"
        )
        return text + (f"  skipped {train.skipped_steps}" if train.skipped_steps else "")

    def _finish_epoch(self) -> None:
        if self._finished_epoch is None:
            return
        if not self._epoch_loss.count and self._result is None:  # logging is rarer than epochs: nothing to tell
            self._finished_epoch = None
            return
        parts = [f"epoch {self._finished_epoch}:"]
        if self._epoch_loss.count:
            parts.append(f"train loss {self._epoch_loss.read():.4f} ")
        if self._result is not None:
            parts.append(f"evaluation {_accuracy(self._result)} ")
        if self._interval is not None:
            parts.append(f"lr {self._interval.lr:.3g}  {self._interval.images_per_second:,.0f} images/s")
        self._finished_epoch, self._result = None, None
        logger.info(" ".join(parts).rstrip())


class _Mean:
    """Of the logging intervals that ended in an epoch, by their steps."""

    def __init__(self) -> None:
        self.count, self._sum = 0, 0.0

    def add(self, value: float, count: int) -> None:
        self.count += count
        self._sum += value * count

    def read(self) -> float:
        mean = self._sum / self.count
        self.count, self._sum = 0, 0.0
        return mean


def _accuracy(record: EvaluationRecord) -> str:
    result = record.result
    return f"loss {result.loss:.4f}  top-1 {result.top1:.2%}  top-5 {result.top5:.2%}"


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
