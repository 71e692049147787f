"""The contenders of step.py: this project's trainer, and loops written by hand around the same model and optimizer.

All of them have one process: what communication between ranks costs is not measured here.
"""

import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from dali_train.commands.train import train
from dali_train.config import Config
from dali_train.config.command_line import config_with
from dali_train.data.dataset.index import Split
from dali_train.data.loading.loader_arguments import blank_images, pixel_format
from dali_train.hooks import Hook
from dali_train.hooks.records import RunStart, StepRecord
from dali_train.runtime.launch import LaunchOptions, discover
from dali_train.runtime.process import choose_device
from dali_train.runtime.stop import StopRequests
from dali_train.training.build import configure_torch
from dali_train.training.model import build_model
from dali_train.training.optim import make_optimizer
from dali_train.training.timing import STEP_PHASES
from tools.bench.compute import AUTOCAST, BARE, REAL, SYNTHETIC, time_by_class


@dataclass(frozen=True)
class Task:
    """What a contender needs; plain values, which can be sent to a new process."""

    config: Path
    overrides: list[str]
    work: Path  # run directories and what contenders print
    steps: int  # timed ones, a round
    traces: Path | None = None  # where the trainer's rounds with a profiler leave CONTENDER.json.gz
    variants: dict[str, list[str]] = field(default_factory=dict)  # more overrides, of the trainer with these names
    contender: str = ""

    def load(self) -> Config:
        return config_with(self.config, self.overrides, "bench_step.py")


@dataclass(frozen=True)
class Round:
    step_s: float
    memory_gb: float  # on a GPU what torch's tensors had at most, else the process's largest resident size; so far
    phases: dict[str, float] = field(default_factory=dict)  # seconds per step, of the trainer
    kernels: dict[str, float] = field(default_factory=dict)  # seconds per step by class, of a round with a profiler


class Meter:
    """Times the steps between `begin` and `end`, and talks to the parent process."""

    def __init__(self, task: Task, pipe: Connection, device: torch.device) -> None:
        self._pipe, self._on_gpu, self.steps = pipe, device.type == "cuda", task.steps
        self._trace: Path | None = None
        if task.traces is not None:
            self._trace = task.traces / (re.sub(r"\W+", "-", task.contender) + ".json.gz")
        self._profiler: profile | None = None
        self._profile_next = False

    def ready(self) -> None:
        self._answer("ready")

    def begin(self) -> None:
        """After a step that warms up: what was prefetched while others worked is used up by then."""
        self._synchronise()
        if self._profile_next:
            activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
            self._profiler = profile(activities=[activity], acc_events=True)
            self._profiler.start()
        self._start = time.perf_counter()

    def end(self, phases: dict[str, float]) -> None:
        """Report a round, and wait for the next request. `phases`: seconds of all its steps."""
        self._synchronise()
        seconds = time.perf_counter() - self._start
        kernels = {}
        if self._profiler is not None:
            self._profiler.stop()
            kernels = time_by_class(self._profiler, self._on_gpu)
            if self._trace is not None:
                self._profiler.export_chrome_trace(str(self._trace))
            self._profiler = None
        self._answer(
            Round(
                seconds / self.steps,
                self._memory_gb(),
                {phase: time / self.steps for phase, time in phases.items()},
                {name: time / self.steps for name, time in kernels.items()},
            )
        )

    def _answer(self, answer: Round | str) -> None:
        if self._on_gpu:
            torch.cuda.empty_cache()  # other contenders need the memory now
        self._pipe.send(answer)
        self._profile_next = self._pipe.recv()

    def _synchronise(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _memory_gb(self) -> float:
        if self._on_gpu:
            return torch.cuda.max_memory_allocated() / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def contend(name: str, task: Task, pipe: Connection) -> None:
    """One contender's process. What the trainer prints goes to a file; errors go where they always do."""
    log = os.open(task.work / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    errors = os.dup(2)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tqdm.set_lock(threading.RLock())  # tqdm's semaphore would leak where a contender is killed
    run = CONTENDERS.get(name, trainer)
    task = replace(task, contender=name, overrides=[*task.overrides, *task.variants.get(name, [])])
    try:
        run(task, task.load(), pipe)
    except ImportError as error:
        pipe.send(str(error))
    except EOFError:
        pass  # no more rounds
    except BaseException:
        os.dup2(errors, 2)
        raise


# ---------------------------------------------------------------------------------------------------------------
# This project: the command's own `train`, with a hook that stops it between rounds
# ---------------------------------------------------------------------------------------------------------------


class Gate(Hook):
    """Pauses the trainer between its rounds. A round is a step to warm up and the timed ones, with one logging
    step."""

    required = True

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._done = 0
        self._before: dict[str, float] = {}

    def start(self, record: RunStart) -> None:
        self._clock = record.clock
        self._meter.ready()

    def step(self, record: StepRecord) -> None:
        self._done += 1
        if self._done == 1:
            self._meter.begin()
            self._before = self._totals()  # afterwards: a profiler takes long to start
        elif self._done == 1 + self._meter.steps:
            self._done = 0
            self._meter.end({phase: after - self._before[phase] for phase, after in self._totals().items()})

    def _totals(self) -> dict[str, float]:
        self._clock.finish()
        return {phase: self._clock.totals.get(phase, 0.0) for phase in STEP_PHASES}


def trainer(task: Task, config: Config, pipe: Connection) -> None:
    launch = discover(LaunchOptions())
    device = choose_device(config.run.device, launch)
    meter = Meter(task, pipe, device)
    run = replace(
        config.run,
        dir=str(task.work / task.contender),
        epochs=1e9,
        max_steps=None,
        max_seconds=None,
        resume="never",
        eval_every_epochs=None,
        checkpoint_every_steps=10**15,
    )
    hooks = replace(config.hooks, log_every_steps=1 + task.steps, user=(*config.hooks.user, lambda: Gate(meter)))
    train(replace(config, run=run, hooks=hooks), launch, device, sys.argv, StopRequests(None))


def trainer_synthetic(task: Task, config: Config, pipe: Connection) -> None:
    trainer(task, replace(config, data=replace(config.data, reader="synthetic")), pipe)


# ---------------------------------------------------------------------------------------------------------------
# Loops by hand: a fixed batch, no seeding, no metrics, no phases, no hooks
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What each loop starts from."""

    config: Config
    device: torch.device
    num_classes: int
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    images: torch.Tensor  # (n, 3, size, size) in the dtype that the trainer's loader would give
    first: torch.Tensor  # (n,) int64: classes
    second: torch.Tensor  # (n,) int64: classes of the Mixup partners
    grad_accum_steps: int

    def autocast(self) -> torch.autocast:
        dtype = AUTOCAST.get(self.config.precision.dtype)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, enabled=self.config.precision.dtype == "fp16")


def prepare(config: Config) -> Parts:
    launch = discover(LaunchOptions())
    device = choose_device(config.run.device, launch)
    num_threads = configure_torch(config, launch, device)
    num_classes = Split(config.data.root, "train").num_classes
    model = build_model(config, num_classes, device).train()
    images = blank_images(config, pixel_format(config, device, num_threads), device).normal_()
    if config.precision.dtype == "fp64":
        images = images.double()
    first, second = (torch.randint(num_classes, (len(images),), device=device) for _ in range(2))
    optimizer = make_optimizer(model, config.optimizer)
    return Parts(config, device, num_classes, model, optimizer, images, first, second, config.batch.grad_accum_steps(1))


def take_orders(step: Callable[[], None], task: Task, pipe: Connection, device: torch.device) -> None:
    meter = Meter(replace(task, traces=None), pipe, device)
    meter.ready()
    while True:
        step()
        meter.begin()
        for _ in range(task.steps):
            step()
        meter.end({})


def bare_loop(task: Task, config: Config, pipe: Connection) -> None:
    """The shortest loop that trains the same: forward, loss, backward, clip, step."""
    parts = prepare(config)
    scaler, clip, mixed = parts.scaler(), config.optimizer.clip_grad_norm, config.mixup.alpha > 0

    def step() -> None:
        for _ in range(parts.grad_accum_steps):
            with parts.autocast():
                logits = parts.model(parts.images)
                loss = F.cross_entropy(logits, parts.first)
                if mixed:
                    loss = 0.7 * loss + 0.3 * F.cross_entropy(logits, parts.second)
            scaler.scale(loss / parts.grad_accum_steps).backward()
        if clip is not None:
            scaler.unscale_(parts.optimizer)
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), clip)
        scaler.step(parts.optimizer)
        scaler.update()
        parts.optimizer.zero_grad()

    take_orders(step, task, pipe, parts.device)


def timm_loop(task: Task, config: Config, pipe: Connection) -> None:
    """What timm's train.py does in an update, with timm's own parts: its task, scaler, clipping and soft-target loss.

    The package does not hold that script, so its loop is written out; no EMA, no logging, targets mixed beforehand as
    its prefetching loader hands them over.
    """
    from timm.loss import SoftTargetCrossEntropy
    from timm.task import ClassificationTask
    from timm.utils import NativeScaler, dispatch_clip_grad

    parts = prepare(config)
    mixed = config.mixup.alpha > 0
    hot = [F.one_hot(classes, parts.num_classes).float() for classes in (parts.first, parts.second)]
    targets = 0.7 * hot[0] + 0.3 * hot[1] if mixed else parts.first
    criterion = SoftTargetCrossEntropy() if mixed else torch.nn.CrossEntropyLoss()
    classification = ClassificationTask(parts.model, criterion, device=parts.device, verbose=False)
    scaler = NativeScaler(parts.device.type) if config.precision.dtype == "fp16" else None
    clip = config.optimizer.clip_grad_norm

    def step() -> None:
        for number in range(parts.grad_accum_steps):
            last = number == parts.grad_accum_steps - 1
            with parts.autocast():
                loss = classification(parts.images, targets)["loss"]
            loss = loss / parts.grad_accum_steps
            if scaler is not None:
                scaler(loss, parts.optimizer, clip_grad=clip, parameters=parts.model.parameters(), need_update=last)
                continue
            loss.backward()
            if last:
                if clip is not None:
                    dispatch_clip_grad(parts.model.parameters(), clip)
                parts.optimizer.step()
        parts.optimizer.zero_grad()

    take_orders(step, task, pipe, parts.device)


CONTENDERS: dict[str, Callable[[Task, Config, Connection], None]] = {
    REAL: trainer,
    SYNTHETIC: trainer_synthetic,
    BARE: bare_loop,
    "timm's loop": timm_loop,
}
