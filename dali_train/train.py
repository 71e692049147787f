"""Training, from the config to the last evaluation: build everything, then loop over optimizer steps."""

import json
import logging
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from nvidia import dali
from torch.optim import Optimizer

from dali_train import checkpoint, snapshot
from dali_train.agreement import StopAgreement
from dali_train.checkpoint import CheckpointWriter
from dali_train.config import Config
from dali_train.data.index import Split
from dali_train.data.loader import Batch, Loader, blank_images, make_loader, pixel_format
from dali_train.data.local_copy import find_dataset
from dali_train.data.manifest import write_atomically
from dali_train.data.micro_batch import MicroBatchDraws
from dali_train.evaluate import Evaluator
from dali_train.hooks.base import EvaluationRecord, RunEnd, RunStart, StepRecord, TrainRecord
from dali_train.hooks.observers import Observers
from dali_train.hooks.standard import make_hooks
from dali_train.launch import Launch, choose_device, cores_per_process, host_group, stay_near
from dali_train.metrics import TrainingMetrics
from dali_train.mixup import first_target_correct, mixup_loss
from dali_train.model import build_model
from dali_train.optim import make_optimizer
from dali_train.parallelize import Parallel, RunningStatistics, parallelize, warm_up
from dali_train.precision import Precision, choose_tf32
from dali_train.schedule import learning_rate
from dali_train.status import RunStatus
from dali_train.stop import StopReason, StopRequests
from dali_train.timing import PhaseClock, order_of_gradients
from dali_train.watchdog import Watchdog

logger = logging.getLogger("dali_train")


@dataclass(frozen=True)
class Trainer:
    """What a step needs. Built once; the tensors in it change."""

    parallel: Parallel
    optimizer: Optimizer
    precision: Precision
    statistics: RunningStatistics
    metrics: TrainingMetrics
    clock: PhaseClock
    accumulation: int
    clip_grad_norm: float | None
    # CUDA graphs write a gradient where the replay before wrote it: add to memory of our own instead of keeping theirs.
    keep_gradients: bool = False

    def step(self, step: int, lr: float, loader: Loader) -> tuple[tuple[MicroBatchDraws, ...], Batch]:
        """One optimizer step: accumulate this rank's micro-batches, exchange, clip, update. The host waits for nothing.

        Returns:
            The micro-batches, and the last of them with its pixels.
        """
        self.clock.step = step
        micro_batches = []
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for number in range(self.accumulation):
            last = number == self.accumulation - 1
            self.clock.enter("data")
            batch = loader.next()
            self.clock.enter("forward")
            torch.manual_seed(batch.micro_batch.dropout_seed)  # on every device: dropout belongs to the micro-batch
            with self.parallel.accumulating(last=last):
                with self.precision.autocast():
                    logits = self.parallel.model(batch.images.to(self.precision.image_dtype))
                    loss = mixup_loss(logits, batch.targets, batch.lambdas)
                self.clock.enter("backward", exchange_follows=last)
                # DDP takes the mean over ranks, so this is the mean over all micro-batches of the step.
                self.precision.scaler.scale(loss / self.accumulation).backward()
            self.statistics.add_micro_batch()
            k = batch.micro_batch.k
            self.metrics.add_micro_batch(
                loss, first_target_correct(logits, batch.targets), num_images=len(batch.images), step=step, k=k
            )
            micro_batches.append(batch.micro_batch)
        self.clock.enter("optimizer")
        grad_norm = self.precision.step(self.optimizer, self.clip_grad_norm)
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)
        self.metrics.finish_step(grad_norm, self.precision.loss_scale(), step=step)
        self.clock.enter("exchange")
        self.statistics.finish_step(self.accumulation * self.parallel.dp_size)
        self.clock.enter("logging")
        self.clock.finish_step()
        return tuple(micro_batches), batch

    def weights_are_good(self, group: dist.ProcessGroup | None) -> bool:
        """Whether they are worth saving: not if the last steps went wrong, then the checkpoint before stays the newest.

        All ranks of `group` ask this together. float16's overflows leave the weights as they were.
        """
        good = torch.tensor(self.precision.scaler.is_enabled() or self.metrics.last_step_was_finite(), dtype=torch.uint8)
        if group is not None:
            dist.all_reduce(good, op=dist.ReduceOp.MIN, group=group)
        return bool(good)


def train(config: Config, launch: Launch, command: Sequence[str], stop_requests: StopRequests) -> StopReason:
    """Run or go on with the training that `config` describes. Called by every rank, inside the process group.

    Returns:
        Why it stopped and is to be started again; NONE if it is finished.

    Raises:
        ConfigError, DatasetError, CheckpointError, NonFiniteError: see there.
    """
    begin = time.perf_counter()
    device = choose_device(config.run, launch)
    num_threads = configure_torch(config, launch, device)
    directory = Path(config.run.dir)

    # ---------------------------------------------------------------- data, and the run measured in steps
    dataset = find_dataset(config, launch)
    split = Split(dataset.path, "train", local=config.data.stream_url is None)
    images = len(split)
    accumulation = config.batch.accumulation(launch.world_size)
    schedule_steps = config.steps(config.run.epochs, images)
    total_steps = min(schedule_steps, config.run.max_steps or schedule_steps)
    evaluator = None
    if "validation" in split.manifest.splits:
        evaluator = Evaluator(
            Split(dataset.path, "validation"), config, device,
            dp_rank=launch.rank, dp_size=launch.world_size, num_threads=num_threads, num_shown=config.hooks.predictions,
        )  # fmt: skip

    # ---------------------------------------------------------------- model, optimizer, and where we left off
    model = build_model(config, split.num_classes, device)
    group, writer_group = host_group(launch, config), host_group(launch, config)
    recipe = snapshot.recipe(config, split)
    resumed, warnings = checkpoint.find(config.run.resume, directory / "checkpoints", group)
    if resumed is not None:
        warnings += snapshot.check_recipe(resumed, recipe, accept=config.run.accept_changed_recipe)
    parallel = parallelize(model, launch, config.parallel)
    optimizer = make_optimizer(model, config.optimizer)
    precision = Precision(config.precision, device)
    if resumed is not None:
        snapshot.restore(resumed, model, optimizer, precision)
    start_step = resumed.step if resumed is not None else 0
    saved_states = resumed.values.get("loader", ()) if resumed is not None else ()
    del resumed  # its copy of the weights is in host memory
    run = config.run
    saver = CheckpointWriter(
        directory / "checkpoints", writer_group, keep=run.keep_checkpoints, keep_best=run.keep_best_checkpoints
    )
    loader = make_loader(
        split, config, device, start_step=start_step, dp_rank=parallel.dp_rank, dp_size=parallel.dp_size,
        num_threads=num_threads, saved_states=saved_states,
    )  # fmt: skip
    model.train()
    blank = blank_images(config, pixel_format(config, device, num_threads), device).to(precision.image_dtype)
    with order_of_gradients(model) as order:
        warm_up(parallel, blank, precision.autocast(), keep_gradients=config.model.cuda_graphs)
    clock = PhaseClock(device)
    if parallel.dp_size > 1:
        clock.watch_exchange(order[-1])
    trainer = Trainer(
        parallel, optimizer, precision, RunningStatistics(model), TrainingMetrics(device), clock, accumulation,
        config.optimizer.clip_grad_norm, keep_gradients=config.model.cuda_graphs,
    )  # fmt: skip

    # ---------------------------------------------------------------- who watches
    if launch.rank == 0:
        describe_run(directory, config, launch, device, command, num_threads)
        RunStatus(state="running", step=start_step).write(directory)
    hooks = make_hooks(config, launch)
    start = RunStart(
        config=config, directory=directory, launch=launch, device=device_name(device), num_images=images,
        num_classes=split.num_classes, class_names=split.manifest.class_names,
        num_parameters=sum(p.numel() for p in model.parameters()),
        accumulation=accumulation, start_step=start_step, total_steps=total_steps,
        startup_s=time.perf_counter() - begin, model=model, optimizer=optimizer, clock=clock,
    )  # fmt: skip
    hooks.start(start)
    for warning in (*warnings, *loader.warnings):
        logger.warning(warning)

    # ---------------------------------------------------------------- the loop
    def epoch_of(step: int) -> float:
        return step * config.batch.global_batch / images

    def passed(step: int, every_epochs: float) -> bool:
        """Whether this step is the first at or after a multiple of `every_epochs`."""
        return config.steps(int(epoch_of(step) / every_epochs + 1e-9) * every_epochs, images) == step

    error: BaseException | None = None
    step = start_step
    best_top1 = saver.prepare(start_step)
    stop = StopAgreement(stop_requests, group)
    stopping = StopReason.NONE
    watchdog = Watchdog(launch, clock, directory, config.data.stream_url or str(dataset.path), config.parallel.timeout_s)
    try:
        for index in range(start_step, total_steps):
            stop.ask()
            lr = learning_rate(config, index, images)
            micro_batches, batch = trainer.step(index, lr, loader)
            step, last = index + 1, index + 1 == total_steps
            stopping = stop.agreed()

            record = None
            if step % config.hooks.log_every_steps == 0 or last:
                record = read_metrics(trainer, config, lr, hooks)
            hooks.step(StepRecord(step=step, epoch=epoch_of(step), micro_batches=micro_batches, batch=batch, train=record))

            top1, every = None, run.eval_every_epochs
            if evaluator is not None and (last or (every is not None and passed(step, every))):
                clock.enter("evaluation")
                result = evaluator.run(model, precision.autocast())
                top1 = result.top1
                hooks.evaluation(EvaluationRecord(step=step, epoch=epoch_of(step), result=result, details=evaluator.details))

            save_every, is_best = run.checkpoint_every_steps, top1 is not None and top1 > best_top1
            due = step % save_every == 0 if save_every is not None else passed(step, 1.0)
            if last or stopping or due or is_best:
                clock.enter("checkpoint")
                if trainer.weights_are_good(group):
                    best_top1 = top1 if top1 is not None and is_best else best_top1
                    state, values = snapshot.capture(model, optimizer, precision)
                    values |= snapshot.capture_loader(loader, group)
                    saver.save(step, state, {**values, "recipe": recipe}, top1)
            if stopping and not last:
                break
        clock.enter("checkpoint")
        saver.wait()
    except BaseException as fault:
        error = fault
        raise
    finally:
        if error is None:  # after an error the device may never answer
            clock.finish()
        hooks.end(RunEnd(step=step, epoch=epoch_of(step), seconds=clock.totals, error=error))
        watchdog.close(error)
        saver.join()
        if launch.rank == 0:
            end_status(step, total_steps, stopping, error).write(directory)
    return stopping if step < total_steps else StopReason.NONE


def end_status(step: int, total_steps: int, stopping: StopReason, error: BaseException | None) -> RunStatus:
    if error is not None:
        return RunStatus(state="failed", step=step, reason=f"{type(error).__name__}: {error}")
    if step < total_steps:
        return RunStatus(state="stopped", step=step, reason=stopping.describe())
    return RunStatus(state="finished", step=step)


def configure_torch(config: Config, launch: Launch, device: torch.device) -> int:
    """Set torch's global switches; returns the number of decoding threads of this rank."""
    cores = cores_per_process(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        cores = min(cores, stay_near(device))
        choose_tf32(config.precision.tf32)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    return config.data.num_threads or cores


def read_metrics(trainer: Trainer, config: Config, lr: float, hooks: Observers) -> TrainRecord:
    """Wait for the device and turn what has gathered since the last logging step into a record."""
    sums = trainer.metrics.read(config.run.max_nonfinite_steps)
    times = trainer.clock.read()
    phases = times.phases
    return TrainRecord(
        **vars(sums),
        lr=lr,
        images_per_second=config.batch.global_batch / times.step_s,
        step_s=times.step_s,
        data_wait_s=phases["data"],
        forward_s=phases["forward"],
        backward_s=phases["backward"],
        exchange_s=phases["exchange"],
        optimizer_s=phases["optimizer"],
        logging_s=phases["logging"],
        evaluation_s=times.evaluation_s,
        checkpoint_s=times.checkpoint_s,
        first_step_s=times.first_step_s,
        measured=hooks.measure(),
    )


def describe_run(
    directory: Path, config: Config, launch: Launch, device: torch.device, command: Sequence[str], num_threads: int
) -> None:
    """Write config.json and environment.json, so that the run directory tells what made it."""
    environment: dict[str, Any] = {
        "command": list(command),
        "git_commit": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "dali": dali.__version__,
        "device": device_name(device),
        "host": platform.node(),
        "host_cores": len(os.sched_getaffinity(0)),
        "decoding_threads": num_threads,
        "ranks_on_host": launch.local_world_size,
        "world_size": launch.world_size,
    }
    write_atomically(directory / "config.json", config.to_json().encode())
    write_atomically(directory / "environment.json", (json.dumps(environment, indent=1) + "\n").encode())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def git_commit(source: Path) -> str | None:
    """The commit that is checked out in a directory; None if it is no checkout, or where there is no git."""
    try:
        commit = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return commit.stdout.strip() or None
