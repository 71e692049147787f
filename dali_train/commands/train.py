"""A training run from start to end: build everything, loop over optimizer steps, finish.

``run(config)`` is the Python API, which ``dali-train train`` uses too. Every rank of a launcher calls it.
"""

import json
import logging
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from dali_train.checkpoint.fingerprint import (
    evaluation_digest,
    evaluations_digest,
    library_versions,
    machine,
    result_of,
)
from dali_train.checkpoint.format import RunValues, Tensors
from dali_train.checkpoint.save import CheckpointWriter
from dali_train.checkpoint.state import Progress, Start, capture_run, find_start
from dali_train.checkpoint.trained_model import MODEL_FILE, write_model
from dali_train.checkpoint.trained_on import differences_from_training
from dali_train.commands import messages
from dali_train.commands.equal_ranks import require_equal_ranks
from dali_train.config import Config, RunConfig, load_config
from dali_train.config.check import Extra
from dali_train.data.loading.decoders import describe_decoder
from dali_train.data.loading.loader import TrainLoader
from dali_train.data.loading.loader_arguments import pixel_format
from dali_train.data.loading.pipelines import Batch
from dali_train.data.sampling.micro_batch import MicroBatch
from dali_train.data.sampling.rng import DRAWS_VERSION
from dali_train.errors import ConfigError, RunError
from dali_train.files import git_commit, write_atomically
from dali_train.hooks.hook_list import HookList, make_hooks
from dali_train.hooks.records import EvaluationRecord, RunEnd, RunStart, StepRecord, TrainRecord
from dali_train.runtime.launch import Launch, LaunchOptions, tell_torchrun
from dali_train.runtime.process import device_name, num_cores, processor_name
from dali_train.runtime.process_group import host_group, joined, locked
from dali_train.runtime.status import RunStatus, newest_step, score
from dali_train.runtime.stop import StepAgreement, StopReason, StopRequests
from dali_train.runtime.watchdog import Watchdog
from dali_train.text import redacted, shell_command
from dali_train.training.build import (
    Evaluators,
    RunPlan,
    build_evaluators,
    build_loader,
    build_trainer,
    prepare,
    warm_up_trainer,
)
from dali_train.training.cost import ModelFlops, model_flops
from dali_train.training.metrics import NonFiniteError, evaluate_all
from dali_train.training.optim import resolved_arguments
from dali_train.training.replicas import HardwareFaultError, Replicas
from dali_train.training.schedule import learning_rate
from dali_train.training.trainer import Trainer

logger = logging.getLogger("dali_train")

# What a run may do without, imported where it is asked for.
MIRROR = Extra[Callable[[Config, Launch, StopRequests], AbstractContextManager[Any]]](
    "dali_train.extras.mirror.mirror:mirrored", "run.mirror"
)
AUDITED = Extra[Callable[[Trainer, RunConfig, torch.device], Trainer]](
    "dali_train.extras.audit.audited_trainer:audited", "run.audit_every_steps"
)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a call of `run` ended; the same on all ranks."""

    run_dir: Path
    step: int  # optimizer steps done
    total_steps: int
    stopped: StopReason  # why the run stopped before its end; NONE: it is finished
    best_top1: float | None  # a fraction; None: never evaluated
    epoch_accuracies: list[float]  # top-1 of each evaluation as a fraction, in order, those before a resume included
    model_file: Path | None  # the final weights, see `write_model`; None: the run is not finished


RUN_LOCALLY = Extra[Callable[[Config, int | Literal["auto"]], RunResult]](
    "dali_train.extras.num_processes:run_locally", "num_processes"
)


@dataclass(kw_only=True)
class Run:
    """Everything that the training loop uses, and when to evaluate and save. `progress` and the last two fields
    change."""

    plan: RunPlan
    group: dist.ProcessGroup | None  # of all ranks, in host memory
    trainer: Trainer
    loader: TrainLoader
    evaluators: Evaluators | None
    saver: CheckpointWriter
    hooks: HookList
    flops: ModelFlops | None  # None: no figure for this device, such as a CPU
    replicas: Replicas
    lock_holder: str
    start_step: int  # optimizer steps done before this start
    progress: Progress
    stopping: StopReason = StopReason.NONE
    saved_at: float = field(default_factory=time.monotonic)  # the last checkpoint, or the start

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.progress.step

    @property
    def epoch(self) -> float:
        """Completed passes over the training split."""
        return self.step * self.plan.config.batch.global_batch / self.plan.num_images

    @property
    def is_last_step(self) -> bool:
        return self.step == self.plan.total_steps

    @property
    def has_stalled(self) -> bool:
        """Whether top-1 has not improved for hooks.stop_early epochs.

        With epochs of 10 steps, an evaluation after each, stop_early 2 and a top-1 of 0.5, 0.6, 0.6, 0.6, it is true
        after the fourth: the first of the best is at step 20, the last at step 40.
        """
        config = self.plan.config
        history = self.progress.accuracies
        patience = config.hooks.stop_early
        if patience is None or not history:
            return False
        best = history.index(max(history))
        steps = sorted(map(int, self.progress.evaluations))
        # Steps, not evaluations: there is one more where run.max_steps ended a part of the run. The steps between two
        # evaluations are rounded up or down.
        patience_steps = math.floor(patience * self.plan.num_images / config.batch.global_batch + 1e-9)
        steps_since = steps[-1] - steps[best]
        return steps_since >= max(1, patience_steps)

    @property
    def is_finished(self) -> bool:
        return self.is_last_step or self.has_stalled

    def has_passed(self, every_epochs: float) -> bool:
        """Return whether this step is the first at or after a multiple of `every_epochs`."""
        multiple = int(self.epoch / every_epochs + 1e-9) * every_epochs
        return self.plan.config.steps(multiple, self.plan.num_images) == self.step

    def evaluation_is_due(self) -> bool:
        settings = self.plan.config.run
        if self.evaluators is None:
            return False
        if settings.eval_every_epochs is None:  # a part of a run, which run.max_steps ends, goes without
            return self.step == self.plan.config.steps(settings.epochs, self.plan.num_images)
        return self.is_last_step or self.has_passed(settings.eval_every_epochs)

    def checkpoint_is_due(self) -> bool:
        every = self.plan.config.run.checkpoint_every_steps
        due = self.step % every == 0 if every is not None else self.has_passed(1.0)
        return due or self.is_last_step or bool(self.stopping) or self.evaluation_is_due()

    def checkpoint_is_old(self) -> bool:
        limit = self.plan.config.run.checkpoint_every_seconds
        return limit is not None and time.monotonic() - self.saved_at >= limit

    def write_accuracies(self) -> None:
        if self.plan.launch.rank == 0:
            content = json.dumps(self.progress.accuracies) + "\n"
            write_atomically(self.plan.directory / "epoch_accuracies.json", content.encode())

    def write_status(self, state: Literal["running", "stopped", "finished", "failed"], reason: str = "") -> None:
        if self.plan.launch.rank == 0:
            progress = self.progress
            RunStatus(
                state=state,
                step=progress.step,
                reason=reason,
                total_steps=self.plan.total_steps,
                best_top1=progress.best_top1,
                ema=self.plan.config.ema.decay is not None,
                lock_holder=self.lock_holder,
                record=progress.fingerprint.text if progress.fingerprint.step == progress.step else "",
                weights=result_of(progress.weights.get(str(progress.step), {})),
                evaluations=evaluations_digest(progress.evaluations),
            ).write(self.plan.directory)

    def close(self) -> None:
        """Call the hooks that read the files of the run, when all are written."""
        if self.plan.launch.rank == 0:
            self.hooks.closed(self.plan.directory)

    def has_trained_nothing(self) -> bool:
        """Wait for the device, and return whether all steps of this start overflowed. A single one after a resume is
        no fault: the scale grows now and then until one does."""
        steps = self.step - self.start_step
        return self.trainer.metrics.num_skipped() == steps and (steps > 1 or not self.start_step)

    def why_unsaved(self) -> str:
        return messages.why_unsaved(overflowed=self.has_trained_nothing(), start_step=self.start_step)

    def unsaved_error(self) -> NonFiniteError:
        """Return the error for a run that ends without its last steps saved; the last save must be complete."""
        ending = "ended" if self.is_finished else f"stopped on request ({self.stopping.describe()})"
        newest = newest_step(self.plan.directory)
        return NonFiniteError(messages.unsaved(ending, self.step, self.plan.total_steps, self.why_unsaved(), newest))

    def result(self) -> RunResult:
        return RunResult(
            run_dir=self.plan.directory,
            step=self.step,
            total_steps=self.plan.total_steps,
            stopped=StopReason.NONE if self.is_finished else self.stopping,
            best_top1=self.progress.best_top1,
            epoch_accuracies=self.progress.accuracies,
            model_file=self.plan.directory / MODEL_FILE if self.is_finished else None,
        )


def run(config: Config | Path | str, *, num_processes: int | Literal["auto"] | None = None) -> RunResult:
    """Train as described by `config` (or the config file of that name), or resume.

    Args:
        num_processes: start this many new processes and train in them; auto: one per GPU, or without GPUs as many as
            are fastest. None: train in this process, as the rank in the launcher's environment,
            or as a single process.

    Raises:
        ConfigError, DatasetError: something that the caller can correct.
        RunError: the run failed; the message says why.
    """
    config = load_config(config) if isinstance(config, Path | str) else config
    if num_processes is not None:
        return RUN_LOCALLY.load()(config, num_processes)
    stop_requests = StopRequests(config.run.max_seconds)
    try:
        return run_rank(config, LaunchOptions(), stop_requests)
    finally:
        stop_requests.close()


def run_rank(config: Config, options: LaunchOptions, stop_requests: StopRequests) -> RunResult:
    """Train as one rank of a launcher, or as a single process."""
    with joined(options, config, stop_requests) as (launch, device):
        return train(config, launch, device, sys.argv, stop_requests)


def train(
    config: Config, launch: Launch, device: torch.device, command: Sequence[str], stop_requests: StopRequests
) -> RunResult:
    """Train on all ranks together, inside the process group."""
    directory = Path(config.run.dir)
    group = host_group(launch)
    with Watchdog(launch, directory) as watchdog:
        require_equal_ranks(config, device, group)
        with locked(directory, group) as holder, mirrored(config, launch, stop_requests) as mirror:
            run = build(config, launch, device, command, group, holder.describe() if holder is not None else "")
            watchdog.watch(run.trainer.clock, " or ".join(run.plan.dataset.data.roots))
            if mirror is not None:
                mirror.start(run.saver.held)
            try:
                loop(run, StepAgreement(stop_requests, group))
            except BaseException as error:
                end_failed(run, watchdog, error)
                raise
            end(run)
            run.trainer.clock.enter("checkpoint")  # this phase may take long: all ranks wait for the last upload
            if mirror is not None:
                mirror.grace_s = run.stopping.grace_s
    return run.result()


def mirrored(config: Config, launch: Launch, stop_requests: StopRequests) -> AbstractContextManager[Any]:
    """Open run.mirror, if there is one, for the duration of the context. All ranks call this together."""
    if config.run.mirror is None:
        return nullcontext()
    return MIRROR.load()(config, launch, stop_requests)


@contextmanager
def exit_is_an_error() -> Iterator[None]:
    """Turn ``sys.exit`` in a hook, a loss or a model into an error, so that its status does not become the run's."""
    try:
        yield
    except SystemExit as error:
        raise RunError(messages.called_exit(traceback.extract_tb(error.__traceback__)[-1], error.code)) from error


@exit_is_an_error()
def build(
    config: Config,
    launch: Launch,
    device: torch.device,
    command: Sequence[str],
    group: dist.ProcessGroup | None,
    lock_holder: str,
) -> Run:
    """Build data, model and optimizer, restore the checkpoint to resume from, and notify the hooks.

    Args:
        lock_holder: the holder of the run's lock, for status.json.
    """
    begin = time.perf_counter()
    writer_group = host_group(launch)
    plan = prepare(config, launch, device)
    evaluators = build_evaluators(plan)
    hooks = make_hooks(config.hooks, plan.layout)
    hooks.announce(plan)
    start, progress = find_start(plan, group)
    if progress.step > plan.total_steps:
        raise ConfigError(messages.past_the_end(config, plan.num_images, plan.total_steps, progress.step))
    trainer = restored_trainer(plan, start, evaluates=evaluators is not None)
    if config.run.audit_every_steps is not None:
        trainer = AUDITED.load()(trainer, config.run, device)
    loader = build_loader(plan, start_step=progress.step)
    start.release()
    warm_up_trainer(trainer, config, device, plan.num_threads)
    run = Run(
        plan=plan,
        group=group,
        trainer=trainer,
        loader=loader,
        evaluators=evaluators,
        saver=CheckpointWriter.of(plan, writer_group, progress.weights),
        hooks=hooks,
        flops=model_flops(config, plan.num_classes, device, num_devices=launch.world_size),
        replicas=Replicas(layout=plan.layout, device=device, group=group, deterministic=config.run.deterministic),
        lock_holder=lock_holder,
        start_step=progress.step,
        progress=progress,
    )
    announce_start(run, command, start.warnings, startup_s=time.perf_counter() - begin)
    run.saver.prepare(progress.step)
    run.write_status("running")
    run.write_accuracies()
    return run


def restored_trainer(plan: RunPlan, start: Start, *, evaluates: bool) -> Trainer:
    """Return the trainer with its initial weights, or with the state of the checkpoint."""
    trainer = build_trainer(
        plan.config,
        plan.layout,
        plan.num_classes,
        plan.device,
        plan.classes,
        evaluates=evaluates,
        resumes=start.checkpoint is not None,
        weights=start.weights,
        saved_seeding=start.seeding,
    )
    if start.checkpoint is None and plan.config.model.weights is not None:
        start.warnings += map(str, differences_from_training(plan.config, trainer.model))
    start.restore(trainer)
    return trainer


def announce_start(run: Run, command: Sequence[str], warnings: list[str], *, startup_s: float) -> None:
    """Write config.json and environment.json, notify the hooks, and log the warnings."""
    plan, trainer = run.plan, run.trainer
    if plan.launch.rank == 0:
        describe_run(plan, command, trainer.optimizer)
    run.hooks.start(
        RunStart(
            **vars(plan),
            num_parameters=trainer.parallel.num_parameters,
            start_step=run.step,
            startup_s=startup_s,
            command=shell_command(command),
            fingerprint=run.progress.fingerprint.text,
            machine=machine(plan),
            model=trainer.model,
            optimizer=trainer.optimizer,
            clock=trainer.clock,
            observers=trainer.observers,
        )
    )
    if run.evaluators is None:
        warnings = [*warnings, messages.no_validation(plan.config.data.root)]
    for warning in (*warnings, *run.loader.warnings):
        logger.warning(warning)


@exit_is_an_error()
def loop(run: Run, agreement: StepAgreement) -> None:
    """Train until the last step, until top-1 has not improved for hooks.stop_early epochs, or until all ranks agree to
    stop."""
    if run.progress.evaluation_is_pending and run.evaluation_is_due():  # the run ended between saving and evaluating
        evaluate(run)
    for index in range(run.step, run.plan.total_steps):
        if run.has_stalled:
            break
        agreement.ask(save=run.checkpoint_is_old())
        lr = learning_rate(run.plan.config, index, run.plan.num_images)
        micro_batches, batch = run.trainer.step(index, lr, run.loader)
        run.progress.step = index + 1
        run.stopping, save_is_asked = agreement.agreed()
        report_step(run, lr, micro_batches, batch)
        if save_is_asked or run.checkpoint_is_due():
            save(run)
        if run.stopping and not run.is_last_step:
            break
        if run.evaluation_is_due():  # after saving: an error in it costs no step
            evaluate(run)
    run.trainer.clock.enter("checkpoint")
    run.saver.wait()
    if run.has_stalled and run.progress.saved_step != run.step:
        raise run.unsaved_error()
    if run.is_finished and run.plan.launch.rank == 0:
        write_model(run.plan.directory, run.step)


def report_step(run: Run, lr: float, micro_batches: tuple[MicroBatch, ...], batch: Batch) -> None:
    """Pass the step to the hooks; on logging steps with metrics, for which the host waits for the device.

    Args:
        micro_batches: those of this coordinate, the last of which is `batch`.
    """
    record = None
    run.progress.fingerprint.add(micro_batches)
    if run.step % run.plan.config.hooks.log_every_steps == 0 or run.is_last_step:
        record = read_metrics(run, lr, batch.micro_batch.size)
    run.hooks.step(StepRecord(step=run.step, epoch=run.epoch, micro_batches=micro_batches, batch=batch, train=record))


def read_metrics(run: Run, lr: float, size: int) -> TrainRecord:
    """Wait for the device and return the means since the last logging step, whose images had `size` pixels."""
    sums = run.trainer.metrics.read()
    times = run.trainer.clock.read()
    rate = run.plan.config.batch.global_batch / times.step_s
    noise = run.trainer.noise
    return TrainRecord(
        **vars(sums),
        **vars(times),
        lr=lr,
        images_per_second=rate,
        mfu=run.flops.utilisation(rate, size) if run.flops is not None else None,
        noise_scale=noise.read() if noise is not None else None,
        measured=run.hooks.measure(),
        fingerprint=run.progress.fingerprint.total(run.step, run.group),
    )


def evaluate(run: Run) -> None:
    """Measure accuracy on the validation split, and record it with the checkpoint of this step.

    If the run has a moving average of the weights, the average's accuracy is recorded, since the average is the result.
    """
    assert run.evaluators is not None
    trainer = run.trainer
    trainer.clock.enter("evaluation")
    record = measured(trainer, run.evaluators, step=run.step, epoch=run.epoch)
    run.hooks.evaluation(record)
    run.progress.evaluations[str(run.step)] = evaluation_digest({"step": run.step, **record.scalars()})
    decisive = record.ema or record.result
    top1 = decisive.top1
    run.progress.accuracies.append(top1)
    trainer.clock.enter("checkpoint")
    run.saver.record_top1(run.step, top1, score(vars(decisive), run.plan.config.run.best_by))
    run.write_status("running")
    run.write_accuracies()


def measured(trainer: Trainer, evaluators: Evaluators, *, step: int, epoch: float) -> EvaluationRecord:
    """Evaluate the weights of `trainer` and their moving average, if there is one. All ranks call this together.

    Details and sets are of the weights whose accuracy decides: of the average, if there is one.
    """
    model = trainer.forward_model()
    autocast = trainer.precision.autocast
    validation = evaluators.validation
    result = validation.run(model, autocast())
    average = None
    if trainer.ema is None:
        sets = evaluate_all(evaluators.sets, model, autocast)
    else:
        with trainer.ema.weights_in(trainer.model):
            average = validation.run(model, autocast())
            sets = evaluate_all(evaluators.sets, model, autocast)
    return EvaluationRecord(
        step=step,
        epoch=epoch,
        result=result,
        details=validation.details,
        class_scores=validation.class_scores,
        ema=average,
        sets=sets,
    )


def save(run: Run) -> None:
    """Start an asynchronous checkpoint, unless weights or loss are not finite.

    Raises:
        HardwareFaultError: replicas differ, so nothing is saved.
    """
    run.trainer.clock.enter("checkpoint")
    run.saved_at = time.monotonic()  # before the check, which waits for the device, so that it is not made at each step
    # A stop on request saves the loss scale, with which the run goes on.
    untrained = not run.stopping and run.has_trained_nothing()
    if not run.trainer.is_finite(run.group) or untrained:
        if run.is_last_step or run.stopping:
            run.saver.wait()
            raise run.unsaved_error()
        if run.plan.launch.rank == 0:
            logger.warning("step %d is not saved: %s", run.step, run.why_unsaved())
        return
    state, values = capture_run(run.trainer, run.group)
    require_equal_replicas(run, state, values)
    values = replace(
        values,
        record=run.progress.fingerprint.total(run.step, run.group),
        recipe=run.progress.recipe,
        class_names=run.plan.class_names,
        applies_orientation=run.plan.split.manifest.applies_orientation,
        **run.plan.split.label_kind.run_values(),
        epoch_accuracies=tuple(run.progress.accuracies),
        evaluations=dict(run.progress.evaluations),
    )
    run.write_status("running")
    run.hooks.saving(run.step)
    run.saver.save(run.step, state, values)
    run.progress.saved_step = run.step


def require_equal_replicas(run: Run, state: Mapping[str, Tensors], values: RunValues) -> None:
    """Raises HardwareFaultError: replicas differ; the message says which rank's, and which checkpoint is good."""
    try:
        run.replicas.compare(run.step, state, values)
    except HardwareFaultError as error:
        run.saver.wait()
        newest = newest_step(run.plan.directory)
        raise HardwareFaultError(messages.faulty_replica(error, run.plan.directory, newest)) from None


def end_failed(run: Run, watchdog: Watchdog, error: BaseException) -> None:
    """Report that the run has failed with `error`; further errors on the way are only logged and never hide it."""
    cause = watchdog.close(error)
    record = run_end(run, error)
    reason = redacted(cause or f"{type(error).__name__}: {error}")
    status = partial(run.write_status, "failed", reason)
    for action in (partial(run.hooks.end, record), run.saver.join, status, run.close):
        try:
            action()
        except (Exception, SystemExit) as fault:
            logger.warning("after the run had failed: %s: %s", type(fault).__name__, fault)


def run_end(run: Run, error: BaseException | None = None) -> RunEnd:
    finished = error is None and run.is_finished
    seconds = run.trainer.clock.totals
    return RunEnd(step=run.step, epoch=run.epoch, seconds=seconds, finished=finished, error=error)


@exit_is_an_error()
def end(run: Run) -> None:
    """Notify the hooks and record that the run has finished or stopped."""
    run.trainer.clock.finish()
    run.hooks.end(run_end(run))
    if run.is_finished:
        patience = run.plan.config.hooks.stop_early
        run.write_status("finished", "" if run.is_last_step else f"no better top-1 for {patience:g} epochs")
    else:
        run.write_status("stopped", run.stopping.describe())
        words = messages.stopped(run.stopping.describe())
        tell_torchrun(words)  # on all ranks: it shows those of whichever ends first, below a traceback of its own
        if run.plan.launch.rank == 0:
            print(words, file=sys.stderr)
    run.close()


# config.json and environment.json, which record how a run was made


def describe_run(plan: RunPlan, command: Sequence[str], optimizer: Optimizer) -> None:
    """Write both files, and copies of the Python files that define the config."""
    config, launch, device = plan.config, plan.launch, plan.device
    environment: dict[str, Any] = {
        "command": [redacted(word) for word in command],
        "config_file": keep_files(plan.directory, config.files),
        "git_commit": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "draws": DRAWS_VERSION,
        **{name.lower(): version for name, version in library_versions().items()},
        "device": device_name(device),
        "host": platform.node(),
        "host_cores": num_cores(),
        # With the versions above, these decide the last bits of a step, see `machine`.
        "processor": processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "compute_threads": torch.get_num_threads(),
        "deterministic": config.run.deterministic,
        "optimizer": resolved_arguments(optimizer),
        "decoding_threads": plan.num_threads,
        "decoder": describe_decoder(config.data, pixel_format(config, device, plan.num_threads)),
        "ranks_on_host": launch.local_world_size,
        "world_size": launch.world_size,
    }
    write_atomically(plan.directory / "config.json", config.to_json().encode())
    write_atomically(plan.directory / "environment.json", (json.dumps(environment, indent=1) + "\n").encode())


def keep_files(directory: Path, files: Mapping[Path, bytes]) -> str | None:
    """Write `files` into ``configs/``, preserving their relative paths.

    Returns:
        The name of the first file, relative to `directory`; None if there are none.
    """
    top = os.path.commonpath([path.parent for path in files]) if files else ""
    copies = {Path("configs") / path.relative_to(top): content for path, content in files.items()}
    for name, content in copies.items():
        write_atomically(directory / name, content)
    return str(next(iter(copies))) if copies else None
