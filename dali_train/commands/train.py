"""Training as one story: build everything, loop over optimizer steps, end.

``run(config)`` is the Python API and what ``dali-train train`` calls. Every rank of a launcher calls it.
"""

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from dali_train.checkpoint.directory import saved_top1
from dali_train.checkpoint.load import Checkpoint, find_checkpoint
from dali_train.checkpoint.model import MODEL_FILE, write_model
from dali_train.checkpoint.recipe import check_recipe, recipe
from dali_train.checkpoint.save import CheckpointWriter
from dali_train.checkpoint.state import capture, capture_loader, in_timm_order
from dali_train.commands.environment import describe_run, device_name
from dali_train.commands.trainer import build_trainer, warm_up_trainer
from dali_train.config import Config, load_config
from dali_train.data.dataset.index import Split
from dali_train.data.loading.loader import Batch, Loader, make_loader
from dali_train.data.loading.local_copy import find_dataset
from dali_train.data.sampling.micro_batch import MicroBatchDraws
from dali_train.errors import ConfigError, DatasetError
from dali_train.files import write_atomically
from dali_train.hooks.base import EvaluationRecord, RunEnd, RunPlan, RunStart, StepRecord, TrainRecord
from dali_train.hooks.observers import Observers
from dali_train.hooks.standard import make_hooks
from dali_train.parallel.layout import Layout
from dali_train.parallel.stages import check_micro_batches
from dali_train.runtime.agreement import StopAgreement
from dali_train.runtime.device import choose_device
from dali_train.runtime.launch import Launch, LaunchOptions, discover
from dali_train.runtime.local_launch import launch_locally
from dali_train.runtime.process_group import host_group, locked, process_group
from dali_train.runtime.status import RunStatus, newest_step
from dali_train.runtime.stop import StopReason, StopRequests
from dali_train.runtime.watchdog import Watchdog
from dali_train.training.evaluation import Evaluator
from dali_train.training.flops import ModelFlops, model_flops
from dali_train.training.metrics import not_saved
from dali_train.training.pipelined import PipelineForward
from dali_train.training.schedule import check_schedule, learning_rate
from dali_train.training.setup import configure_torch
from dali_train.training.trainer import Trainer

logger = logging.getLogger("dali_train")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a call of `run` ended; the same on all ranks."""

    run_dir: Path
    step: int  # optimizer steps done
    total_steps: int
    stopped: StopReason  # why to start it again; NONE: it is finished
    best_top1: float | None  # a fraction; None: never evaluated
    epoch_accuracies: list[float]  # top-1 of each evaluation as a fraction, in order, those before a resume included
    model_file: Path | None  # the final weights, see `write_model`; None: the run is not finished


def run(config: Config | Path | str, *, num_processes: int | Literal["auto"] | None = None) -> RunResult:
    """Train what `config` (or the file of that name) describes, or resume it.

    Args:
        num_processes: start so many new processes and train on them; auto: one per GPU, one where there is none. None:
            train in this process, as the rank that a launcher's environment says, or alone.

    Raises:
        ConfigError, DatasetError: something that the caller can correct.
        RunError: the run failed; the message says why.
    """
    if num_processes is not None:
        if isinstance(config, Config) and config.hooks.user:
            raise ConfigError(
                "hooks.user cannot be handed to other processes: give `run` the config's file, or use torchrun"
            )
        results = launch_locally(_run_or_mistake, config, num_processes=num_processes)
        result = next((result for result in results.values() if isinstance(result, Exception)), results[0])
        if isinstance(result, Exception):
            raise result
        return result
    config = load_config(config) if isinstance(config, Path | str) else config
    stop_requests = StopRequests(config.run.max_seconds)
    try:
        return run_rank(config, LaunchOptions(), stop_requests)
    finally:
        stop_requests.close()


def _run_or_mistake(config: Config | Path | str) -> RunResult | ConfigError | DatasetError:
    """In a process of its own: what its parent should raise is handed over, not printed as the traceback of a failed
    process."""
    try:
        return run(config)
    except (ConfigError, DatasetError) as error:
        return error


def run_rank(config: Config, options: LaunchOptions, stop_requests: StopRequests) -> RunResult:
    """This process's part of a run, as one of the ranks that a launcher started."""
    launch = discover(options)
    device = choose_device(config.run.device, launch)
    with process_group(launch, device, config.run.backend, config.parallel.timeout_s) as launch:
        return train(config, launch, device, sys.argv, stop_requests)


@dataclass(kw_only=True)
class Run:
    """Everything that the loop works with. Only the last five fields change."""

    plan: RunPlan
    group: dist.ProcessGroup | None  # of all ranks, in host memory
    recipe: dict[str, Any]
    model: nn.Module  # not wrapped for parallelism
    trainer: Trainer
    loader: Loader
    evaluator: Evaluator | None
    saver: CheckpointWriter
    hooks: Observers
    flops: ModelFlops | None  # None: no figure for this device, such as a CPU
    watchdog: Watchdog
    attempt: str  # who holds the run's lock
    step: int  # optimizer steps done
    evaluated: bool = True  # whether the evaluation that is due at `step`, if one is, has been made
    best_top1: float = -1.0
    stopping: StopReason = StopReason.NONE
    epoch_accuracies: list[float] = field(default_factory=list)  # top-1 of the evaluations so far

    @property
    def epoch(self) -> float:
        """Passes over the training split done."""
        return self.step * self.plan.config.batch.global_batch / self.plan.num_images

    @property
    def is_last_step(self) -> bool:
        return self.step == self.plan.total_steps

    def has_passed(self, every_epochs: float) -> bool:
        """Whether this step is the first at or after a multiple of `every_epochs`."""
        return (
            self.plan.config.steps(int(self.epoch / every_epochs + 1e-9) * every_epochs, self.plan.num_images)
            == self.step
        )

    def evaluation_is_due(self) -> bool:
        every = self.plan.config.run.eval_every_epochs
        return self.evaluator is not None and (self.is_last_step or (every is not None and self.has_passed(every)))

    def checkpoint_is_due(self) -> bool:
        every = self.plan.config.run.checkpoint_every_steps
        due = self.step % every == 0 if every is not None else self.has_passed(1.0)
        return due or self.is_last_step or bool(self.stopping) or self.evaluation_is_due()


def train(
    config: Config, launch: Launch, device: torch.device, command: Sequence[str], stop_requests: StopRequests
) -> RunResult:
    """Called by every rank, inside the process group."""
    directory, group = Path(config.run.dir), host_group(launch, config)
    with Watchdog(launch, directory, config.parallel.timeout_s) as watchdog, locked(directory, launch, group) as holder:
        run = build(
            config, launch, device, command, group, watchdog, attempt=holder.describe() if holder is not None else ""
        )
        error: BaseException | None = None
        try:
            loop(run, StopAgreement(stop_requests, group))
        except BaseException as fault:
            error = fault
            raise
        finally:
            end(run, error)
    return RunResult(
        run_dir=run.plan.directory,
        step=run.step,
        total_steps=run.plan.total_steps,
        stopped=StopReason.NONE if run.is_last_step else run.stopping,
        best_top1=run.best_top1 if run.best_top1 >= 0 else None,
        epoch_accuracies=run.epoch_accuracies,
        model_file=run.plan.directory / MODEL_FILE if run.is_last_step else None,
    )


# ------------------------------------------------------------------------------------------------ build


def build(
    config: Config,
    launch: Launch,
    device: torch.device,
    command: Sequence[str],
    group: dist.ProcessGroup | None,
    watchdog: Watchdog,
    *,
    attempt: str,
) -> Run:
    """Data, model, optimizer, what a checkpoint says of them, and everyone who watches.

    Args:
        attempt: who holds the run's lock, for status.json.
    """
    begin = time.perf_counter()
    num_threads = configure_torch(config, launch, device)
    layout = Layout.for_config(launch, config.parallel)
    grad_accum_steps = config.batch.grad_accum_steps(layout.data_size)
    check_micro_batches(config.parallel, grad_accum_steps)
    directory = Path(config.run.dir)
    writer_group = host_group(launch, config)

    dataset = find_dataset(config, launch)
    split = Split(dataset.path, "train", local=config.data.stream_url is None)
    evaluator = make_evaluator(dataset.path, split, config, layout, device, num_threads)
    check_schedule(config, len(split))
    schedule_steps = config.steps(config.run.epochs, len(split))
    plan = RunPlan(
        config=config,
        directory=directory,
        launch=launch,
        device=device_name(device),
        num_images=len(split),
        num_classes=split.num_classes,
        class_names=split.manifest.class_names,
        grad_accum_steps=grad_accum_steps,
        total_steps=min(schedule_steps, config.run.max_steps or schedule_steps),
    )
    hooks = make_hooks(config, layout)
    hooks.announce(plan)
    run_recipe = recipe(config, split)
    resumed, warnings = find_checkpoint(config.run.resume, directory / "checkpoints", group)
    if resumed is not None:
        warnings += check_recipe(resumed, run_recipe, accept=config.run.accept_changed_recipe)
    start_step = resumed.step if resumed is not None else 0
    trainer, model, more_warnings = build_trainer(
        config, layout, split.num_classes, device, resumed, evaluates=evaluator is not None
    )
    saved_loader_states = resumed.values.get("loader", ()) if resumed is not None else ()
    accuracies, evaluated = evaluations_of(resumed, directory)
    del resumed  # its copy of the weights is in host memory
    saver = CheckpointWriter(
        directory / "checkpoints",
        writer_group,
        keep=config.run.keep_checkpoints,
        keep_best=config.run.keep_best_checkpoints,
        num_stages=layout.pipeline,
    )
    loader = make_loader(
        split,
        config,
        device,
        start_step=start_step,
        dp_rank=layout.data_rank,
        dp_size=layout.data_size,
        num_threads=num_threads,
        saved_states=saved_loader_states,
        decodes=layout.pipeline_rank == 0,
    )
    if layout.pipeline == 1:  # each step of a pipeline is like the first
        warm_up_trainer(trainer, model, config, device, num_threads)

    if launch.rank == 0:
        describe_run(directory, config, launch, device, command, num_threads)
    run = Run(
        plan=plan,
        group=group,
        recipe=run_recipe,
        model=model,
        trainer=trainer,
        loader=loader,
        evaluator=evaluator,
        saver=saver,
        hooks=hooks,
        step=start_step,
        evaluated=evaluated,
        epoch_accuracies=accuracies,
        watchdog=watchdog,
        attempt=attempt,
        flops=model_flops(config, split.num_classes, device, num_devices=launch.world_size),
    )
    hooks.start(
        RunStart(
            **vars(plan),
            num_parameters=trainer.parallel.num_parameters,
            start_step=start_step,
            startup_s=time.perf_counter() - begin,
            model=model,
            optimizer=trainer.optimizer,
            clock=trainer.clock,
        )
    )
    if evaluator is None:
        warnings.append(
            f"{config.data.root} has no validation split: nothing is evaluated, and no checkpoint is the best"
        )
    for warning in (*warnings, *more_warnings, *loader.warnings):
        logger.warning(warning)
    run.best_top1 = saver.prepare(start_step)
    write_status(run, "running")
    write_accuracies(run)
    watchdog.watch(trainer.clock, config.data.stream_url or str(dataset.path))
    return run


def evaluations_of(resumed: Checkpoint | None, directory: Path) -> tuple[list[float], bool]:
    """(top-1 of this run's evaluations up to a checkpoint, whether its own step has been evaluated, if one was due)."""
    if resumed is None or resumed.path.parent != directory / "checkpoints":
        return [], True
    top1 = saved_top1(resumed.path)
    return [*resumed.values.get("epoch_accuracies", []), *([top1] if top1 is not None else [])], top1 is not None


def make_evaluator(
    dataset: Path, train_split: Split, config: Config, layout: Layout, device: torch.device, num_threads: int
) -> Evaluator | None:
    if "validation" not in train_split.manifest.splits:
        return None
    return Evaluator(
        Split(dataset, "validation"),
        config,
        device,
        dp_rank=layout.data_rank,
        dp_size=layout.data_size,
        num_threads=num_threads,
        num_shown=config.hooks.predictions,
        together=layout.splits_model,
        decodes=layout.pipeline_rank == 0,
        counts=layout.pipeline_rank == layout.pipeline - 1 and layout.tensor_rank == 0,
    )


# ------------------------------------------------------------------------------------------------ loop


def loop(run: Run, stop: StopAgreement) -> None:
    """Optimizer steps until the last one, or until all ranks agree to stop."""
    if run.step > 0 and not run.evaluated and run.evaluation_is_due():  # the run ended between saving and evaluating
        evaluate(run)
    for index in range(run.step, run.plan.total_steps):
        stop.ask()
        lr = learning_rate(run.plan.config, index, run.plan.num_images)
        micro_batches, batch = run.trainer.step(index, lr, run.loader)
        run.step = index + 1
        run.stopping = stop.agreed()
        report_step(run, lr, micro_batches, batch)
        if run.checkpoint_is_due():
            save(run)
        if run.stopping and not run.is_last_step:
            break
        if run.evaluation_is_due():  # after saving: what goes wrong in it costs no step
            evaluate(run)
    run.trainer.clock.enter("checkpoint")
    run.saver.wait()
    if run.is_last_step and run.plan.launch.rank == 0:
        write_model(run.plan.directory, run.step)


def report_step(run: Run, lr: float, micro_batches: tuple[MicroBatchDraws, ...], batch: Batch) -> None:
    """Hand the step to the hooks; on logging steps with metrics, for which the host waits for the device."""
    record = None
    if run.step % run.plan.config.hooks.log_every_steps == 0 or run.is_last_step:
        record = read_metrics(run, lr, batch.micro_batch.size)
    run.hooks.step(StepRecord(step=run.step, epoch=run.epoch, micro_batches=micro_batches, batch=batch, train=record))


def read_metrics(run: Run, lr: float, size: int) -> TrainRecord:
    """Wait for the device and turn what has gathered since the last logging step, on images of `size` pixels, into a
    record."""
    sums = run.trainer.metrics.read(run.plan.config.run.max_nonfinite_steps)
    times = run.trainer.clock.read()
    rate = run.plan.config.batch.global_batch / times.step_s
    mfu = run.flops.utilisation(rate, size) if run.flops is not None else None
    return TrainRecord(
        **vars(sums), **vars(times), lr=lr, images_per_second=rate, mfu=mfu, measured=run.hooks.measure()
    )


def evaluate(run: Run) -> None:
    """Measure accuracy on the validation split, and note it with the checkpoint of this step: that of the weights'
    moving average where there is one, since that is what such a run is for."""
    assert run.evaluator is not None
    run.trainer.clock.enter("evaluation")
    parallel = run.trainer.parallel
    model = PipelineForward(parallel) if parallel.stages else run.model
    result, details = run.evaluator.run(model, run.trainer.precision.autocast()), run.evaluator.details
    average = None
    if run.trainer.ema is not None:
        with run.trainer.ema.weights_in(run.model):
            average = run.evaluator.run(model, run.trainer.precision.autocast())
    run.hooks.evaluation(EvaluationRecord(step=run.step, epoch=run.epoch, result=result, details=details, ema=average))
    top1 = (average or result).top1
    run.best_top1 = max(run.best_top1, top1)
    run.epoch_accuracies.append(top1)
    run.trainer.clock.enter("checkpoint")
    run.saver.record_top1(run.step, top1)
    write_status(run, "running")
    write_accuracies(run)


def save(run: Run) -> None:
    """Begin to write a checkpoint in the background, unless the weights are not worth it."""
    run.trainer.clock.enter("checkpoint")
    if not run.trainer.weights_are_good(run.group):
        if run.is_last_step or run.stopping:
            run.saver.wait()
            reason = "" if run.is_last_step else run.stopping.describe()
            raise not_saved(run.step, newest_step(run.plan.directory), run.plan.total_steps, reason)
        if run.plan.launch.rank == 0:
            logger.warning("step %d is not saved: weights or the last loss are not finite", run.step)
        return
    parallel = run.trainer.parallel
    state, values = capture(run.model, run.trainer.optimizer, run.trainer.precision, parallel, run.group)
    values |= {"dropout": run.trainer.dropout} | capture_loader(run.loader, run.group)
    if run.trainer.ema is not None:
        averages = run.trainer.ema.state()
        state["ema"] = {name: in_timm_order(name, tensor, parallel.order) for name, tensor in averages.items()}
    write_status(run, "running")
    values |= {
        "recipe": run.recipe,
        "class_names": list(run.plan.class_names),
        "epoch_accuracies": [*run.epoch_accuracies],
    }
    run.saver.save(run.step, state, values)


# ------------------------------------------------------------------------------------------------ end


def end(run: Run, error: BaseException | None) -> None:
    """Let the last save finish, tell the hooks and write down how the run ended, well or not."""
    if error is None:  # after an error the device may never answer
        run.trainer.clock.finish()
    run.hooks.end(RunEnd(step=run.step, epoch=run.epoch, seconds=run.trainer.clock.totals, error=error))
    run.watchdog.close(error)
    run.saver.join()
    if error is not None:
        write_status(run, "failed", f"{type(error).__name__}: {error}")
    elif run.is_last_step:
        write_status(run, "finished")
    else:
        write_status(run, "stopped", run.stopping.describe())
        if run.plan.launch.rank == 0:
            print(
                f"stopped after saving: {run.stopping.describe()}. Start the same command again to resume",
                file=sys.stderr,
            )


def write_accuracies(run: Run) -> None:
    if run.plan.launch.rank == 0:
        write_atomically(
            run.plan.directory / "epoch_accuracies.json", (json.dumps(run.epoch_accuracies) + "\n").encode()
        )


def write_status(run: Run, state: Literal["running", "stopped", "finished", "failed"], reason: str = "") -> None:
    if run.plan.launch.rank == 0:
        RunStatus(
            state=state,
            step=run.step,
            reason=reason,
            total_steps=run.plan.total_steps,
            best_top1=run.best_top1 if run.best_top1 >= 0 else None,
            attempt=run.attempt,
        ).write(run.plan.directory)
