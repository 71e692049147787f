"""Training, from the config to the last evaluation: build everything, then loop over optimizer steps."""

import json
import os
import platform
import subprocess
import sys
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
from dali_train.data.index import Split, write_atomically
from dali_train.data.loader import Loader, make_loader
from dali_train.data.micro_batch import MicroBatch
from dali_train.evaluate import Evaluator
from dali_train.hooks.base import Hook, RunEnd, RunStart, StepRecord, TrainRecord
from dali_train.hooks.console import Console
from dali_train.hooks.files import MetricsFile, SampleTrace
from dali_train.launch import Launch, choose_device, cores_per_process, host_group
from dali_train.metrics import Clock, TrainingMetrics
from dali_train.mixup import first_target_correct, mixup_loss
from dali_train.model import build_model
from dali_train.optim import make_optimizer
from dali_train.parallelize import Parallel, RunningStatistics, parallelize, warm_up
from dali_train.precision import Precision
from dali_train.schedule import learning_rate
from dali_train.status import RunStatus
from dali_train.stop import StopReason, StopRequests
from dali_train.watchdog import Watchdog


@dataclass(frozen=True)
class Trainer:
    """What a step needs. Built once; the tensors in it change."""

    parallel: Parallel
    optimizer: Optimizer
    precision: Precision
    statistics: RunningStatistics
    metrics: TrainingMetrics
    clock: Clock
    accumulation: int
    clip_grad_norm: float | None

    def step(self, step: int, lr: float, loader: Loader) -> tuple[MicroBatch, ...]:
        """One optimizer step: accumulate this rank's micro-batches, exchange, clip, update. The host waits for nothing."""
        self.clock.step = step
        micro_batches = []
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for number in range(self.accumulation):
            with self.clock.phase("data"):
                batch = loader.next()
            torch.manual_seed(batch.micro_batch.dropout_seed)  # on every device: dropout belongs to the micro-batch
            with self.parallel.accumulating(last=number == self.accumulation - 1):
                with self.precision.autocast():
                    logits = self.parallel.model(batch.images.to(self.precision.image_dtype))
                    loss = mixup_loss(logits, batch.targets, batch.lambdas)
                # DDP takes the mean over ranks, so this is the mean over all micro-batches of the step.
                self.precision.scaler.scale(loss / self.accumulation).backward()
            self.statistics.add_micro_batch()
            k = batch.micro_batch.k
            self.metrics.add_micro_batch(
                loss, first_target_correct(logits, batch.targets), num_images=len(batch.images), step=step, k=k
            )
            micro_batches.append(batch.micro_batch)
        grad_norm = self.precision.step(self.optimizer, self.clip_grad_norm)
        self.optimizer.zero_grad()
        self.statistics.finish_step(self.accumulation * self.parallel.dp_size)
        self.metrics.finish_step(grad_norm, self.precision.loss_scale(), step=step)
        return tuple(micro_batches)

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
    device = choose_device(config.run, launch)
    num_threads = configure_torch(config, launch, device)
    directory = Path(config.run.dir)

    # ---------------------------------------------------------------- data, and the run measured in steps
    split = Split(config.data.root, "train")
    images = len(split)
    accumulation = config.batch.accumulation(launch.world_size)
    schedule_steps = config.steps(config.run.epochs, images)
    total_steps = min(schedule_steps, config.run.max_steps or schedule_steps)
    evaluator = None
    if "validation" in split.manifest.splits:
        evaluator = Evaluator(
            Split(config.data.root, "validation"), config, device,
            dp_rank=launch.rank, dp_size=launch.world_size, num_threads=num_threads,
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
    del resumed  # its copy of the weights is in host memory
    run = config.run
    saver = CheckpointWriter(
        directory / "checkpoints", writer_group, keep=run.keep_checkpoints, keep_best=run.keep_best_checkpoints
    )
    loader = make_loader(
        split, config, device, start_step=start_step, dp_rank=parallel.dp_rank, dp_size=parallel.dp_size, num_threads=num_threads
    )
    size = config.data.train_size
    model.train()
    warm_up(
        parallel,
        torch.zeros(config.batch.micro_batch, 3, size, size, device=device, dtype=precision.image_dtype),
        precision.autocast(),
    )
    trainer = Trainer(
        parallel, optimizer, precision, RunningStatistics(model), TrainingMetrics(device), Clock(), accumulation,
        config.optimizer.clip_grad_norm,
    )  # fmt: skip

    # ---------------------------------------------------------------- who watches
    if launch.rank == 0:
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        describe_run(directory, config, device, command)
        RunStatus(state="running", step=start_step).write(directory)
    hooks = make_hooks(config, launch)
    start = RunStart(
        config=config, directory=directory, launch=launch, device=device_name(device), num_images=images,
        num_classes=split.num_classes, num_parameters=sum(p.numel() for p in model.parameters()),
        accumulation=accumulation, start_step=start_step, total_steps=total_steps,
    )  # fmt: skip
    for hook in hooks:
        hook.start(start)

    # ---------------------------------------------------------------- the loop
    def epoch_of(step: int) -> float:
        return step * config.batch.global_batch / images

    def passed(step: int, every_epochs: float) -> bool:
        """Whether this step is the first at or after a multiple of `every_epochs`."""
        return config.steps(int(epoch_of(step) / every_epochs + 1e-9) * every_epochs, images) == step

    error: BaseException | None = None
    seconds: dict[str, float] = {}
    step = start_step
    steps_since_log = 0
    best_top1 = saver.prepare(start_step)
    stop = StopAgreement(stop_requests, group)
    stopping = StopReason.NONE
    watchdog = Watchdog(launch, trainer.clock, directory, config.data.root, config.parallel.timeout_s)
    trainer.clock.lap()
    try:
        for index in range(start_step, total_steps):
            stop.ask()
            lr = learning_rate(config, index, images)
            micro_batches = trainer.step(index, lr, loader)
            step, last = index + 1, index + 1 == total_steps
            stopping = stop.agreed()
            steps_since_log += 1

            record = None
            if step % config.hooks.log_every_steps == 0 or last:
                record = read_metrics(trainer, config, lr, steps_since_log, seconds)
                steps_since_log = 0
            for hook in hooks:
                hook.step(StepRecord(step=step, epoch=epoch_of(step), micro_batches=micro_batches, train=record))

            top1, every = None, run.eval_every_epochs
            if evaluator is not None and (last or (every is not None and passed(step, every))):
                with trainer.clock.phase("evaluation"):
                    result = evaluator.run(model, precision.autocast())
                top1 = result.top1
                for hook in hooks:
                    hook.evaluation(step, epoch_of(step), result)

            save_every, is_best = run.checkpoint_every_steps, top1 is not None and top1 > best_top1
            due = step % save_every == 0 if save_every is not None else passed(step, 1.0)
            if (last or stopping or due or is_best) and trainer.weights_are_good(group):
                best_top1 = top1 if top1 is not None and is_best else best_top1
                with trainer.clock.phase("checkpoint"):
                    state, values = snapshot.capture(model, optimizer, precision)
                    saver.save(step, state, {**values, "recipe": recipe}, top1)
            if stopping and not last:
                break
        with trainer.clock.phase("checkpoint"):
            saver.wait()
    except BaseException as fault:
        error = fault
        raise
    finally:
        add_lap(trainer.clock, seconds)
        for hook in hooks:
            hook.end(RunEnd(step=step, epoch=epoch_of(step), seconds=seconds, error=error))
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
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    return config.data.num_threads or cores


def make_hooks(config: Config, launch: Launch) -> list[Hook]:
    hooks: list[Hook] = [Console(), MetricsFile()] if launch.rank == 0 else []
    return [*hooks, SampleTrace()] if config.hooks.trace_samples else hooks


def add_lap(clock: Clock, seconds: dict[str, float]) -> tuple[float, dict[str, float]]:
    """Add a lap of `clock` to the run's `seconds` by phase; returns (training seconds, seconds by phase) of the lap."""
    elapsed, phases = clock.lap()
    training = elapsed - phases.get("evaluation", 0.0) - phases.get("checkpoint", 0.0)
    for name, spent in {**phases, "train": training - phases.get("data", 0.0)}.items():
        seconds[name] = seconds.get(name, 0.0) + spent
    return training, phases


def read_metrics(trainer: Trainer, config: Config, lr: float, num_steps: int, seconds: dict[str, float]) -> TrainRecord:
    """Wait for the device and turn the sums of the last `num_steps` steps into a record."""
    sums = trainer.metrics.read(config.run.max_nonfinite_steps)
    elapsed, phases = add_lap(trainer.clock, seconds)
    return TrainRecord(
        **vars(sums),
        lr=lr,
        images_per_second=num_steps * config.batch.global_batch / elapsed,
        data_wait_s=phases.get("data", 0.0) / num_steps,
        step_s=elapsed / num_steps,
    )


def describe_run(directory: Path, config: Config, device: torch.device, command: Sequence[str]) -> None:
    """Write config.json and environment.json, so that the run directory tells what made it."""
    environment: dict[str, Any] = {
        "command": list(command),
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "dali": dali.__version__,
        "device": device_name(device),
        "host": platform.node(),
    }
    write_atomically(directory / "config.json", config.to_json().encode())
    write_atomically(directory / "environment.json", (json.dumps(environment, indent=1) + "\n").encode())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _git_commit() -> str | None:
    source = Path(__file__).parent
    commit = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return commit.stdout.strip() or None
