"""Rank 0's view of a run: the layout at the start, a progress bar or plain lines, a line for each evaluation."""

import sys

from tqdm import tqdm

from dali_train.evaluate import EvaluationResult
from dali_train.hooks.base import Hook, RunEnd, RunStart, StepRecord


class Console(Hook):
    """A progress bar on a terminal; in a log file one plain line a logging interval and no control characters."""

    def start(self, record: RunStart) -> None:
        config, launch = record.config, record.launch
        batch, run = config.batch, config.run
        ranks = f"{launch.world_size} rank{'s' if launch.world_size > 1 else ''} ({launch.launcher})"
        millions = record.num_parameters / 1e6
        resumed = f", going on from step {record.start_step}" if record.start_step else ""
        print(f"model      {config.model.name}, {millions:.1f} M parameters, {config.precision.dtype} on {record.device}")
        print(f"data       {config.data.root}: {record.num_images} images, {record.num_classes} classes")
        print(f"batch      {batch.global_batch} = {batch.micro_batch} images x {record.accumulation} accumulated x {ranks}")
        print(f"steps      {record.total_steps}, {record.num_images / batch.global_batch:.1f} an epoch{resumed}")
        print(f"directory  {run.dir}", flush=True)
        self._total = record.total_steps
        self._bar = tqdm(
            total=record.total_steps, initial=record.start_step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )

    def step(self, record: StepRecord) -> None:
        self._bar.update(1)
        train = record.train
        if train is None:
            return
        waiting = train.data_wait_s / train.step_s if train.step_s else 0.0
        text = (
            f"epoch {record.epoch:.2f}  loss {train.loss:.4f}  top-1 {train.top1:.1%}  lr {train.lr:.3g}  "
            f"{train.images_per_second:.0f} images/s  data wait {waiting:.0%}"
        )
        if train.skipped_steps:
            text += f"  skipped {train.skipped_steps}"
        if self._bar.disable:
            print(f"step {record.step}/{self._total}  {text}", flush=True)
        else:
            self._bar.set_description_str(text, refresh=False)

    def evaluation(self, step: int, epoch: float, result: EvaluationResult) -> None:
        self._print(
            f"evaluation at epoch {epoch:.2f}: top-1 {result.top1:.2%}  top-5 {result.top5:.2%}  loss {result.loss:.4f}  "
            f"({result.num_images} images in {result.seconds:.1f} s)"
        )

    def end(self, record: RunEnd) -> None:
        self._bar.close()

    def _print(self, text: str) -> None:
        if self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.write(text)
