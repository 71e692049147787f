"""The hooks of a rank: which there are, and calling each so that an error in one does not end the run."""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dali_train.config import HooksConfig
from dali_train.config.check import Extra, load_all, lookup
from dali_train.errors import ConfigError
from dali_train.files import NO_SPACE
from dali_train.hooks import Hook, HookUnavailableError
from dali_train.hooks.console import Console, RunLogs
from dali_train.hooks.jsonl import MetricsFile, SampleTrace
from dali_train.hooks.records import EvaluationRecord, RunEnd, RunPlan, RunStart, StepRecord, TrainRecord
from dali_train.parallel.layout import Layout
from dali_train.text import plural, shortened

logger = logging.getLogger("dali_train")


class HookList:
    """Calls each hook at the moments that it overrides, in the order given; those of the `user` last.

    Hooks may only read weights: neither the recipe nor the record of a run knows what they do. Where a hook of the user
    changes them while it is called, a warning says so.
    """

    def __init__(self, hooks: Sequence[Hook], user: Sequence[Hook] = ()) -> None:
        self._hooks = [*hooks, *user]
        self._user = user
        self._watched: list[nn.Parameter] = []
        self._failures: Counter[Hook] = Counter()
        self._directory = ""

    def announce(self, record: RunPlan) -> None:
        self._directory = str(record.directory)
        for hook in self._overriding("announce"):
            self._guarded(hook, "announce", partial(hook.announce, record))

    def start(self, record: RunStart) -> None:
        self._directory = str(record.directory)
        if self._user:
            self._watched = list(record.model.parameters())
        with self._reading("before the first step"):
            for hook in list(self._hooks):
                if not self._guarded(hook, "start", partial(hook.start, record)):
                    self._hooks.remove(hook)
        self._measuring = self._overriding("measure")
        self._stepping = self._overriding("step")
        self._saving = self._overriding("saving")
        self._evaluating = self._overriding("evaluation")

    def measure(self) -> dict[str, float]:
        measured: dict[str, float] = {}
        with self._reading("as they measured"):
            for hook in self._measuring:
                self._guarded(hook, "measure", partial(_measure, hook, measured))
        return measured

    def step(self, record: StepRecord) -> None:
        with self._reading(f"after step {record.step}"):
            for hook in self._stepping:
                self._guarded(hook, f"step {record.step}", partial(hook.step, record))

    def saving(self, step: int) -> None:
        with self._reading(f"before the checkpoint of step {step}"):
            for hook in self._saving:
                self._guarded(hook, f"the checkpoint of step {step}", partial(hook.saving, step))

    def evaluation(self, record: EvaluationRecord) -> None:
        with self._reading(f"after the evaluation of step {record.step}"):
            for hook in self._evaluating:
                self._guarded(hook, f"the evaluation of step {record.step}", partial(hook.evaluation, record))

    def end(self, record: RunEnd) -> None:
        # In reverse order, so that the log files are still open when other hooks report at their end.
        for hook in reversed(self._hooks):
            if self._failures[hook] > 1:
                logger.warning("hook %s failed %s in all", type(hook).__name__, plural(self._failures[hook], "time"))
            self._guarded(hook, "the end", partial(hook.end, record))

    def closed(self, directory: Path) -> None:
        for hook in self._overriding("closed"):
            self._guarded(hook, "closing", partial(hook.closed, directory))

    @contextmanager
    def _reading(self, moment: str) -> Iterator[None]:
        """Warn, once in a run, if weights change in this context."""
        before = [parameter._version for parameter in self._watched]  # which torch raises with each change in place
        yield
        if before != [parameter._version for parameter in self._watched]:
            self._watched = []
            logger.warning(
                "weights changed %s while hooks were called; hooks.user has %s. Hooks may only read weights: neither "
                "the recipe nor a resume nor `prove` knows of such a change. To change gradients, add a row to "
                "GRADIENT_TRANSFORMS (docs/extending.md)",
                moment,
                ", ".join(type(hook).__name__ for hook in self._user),
            )

    def _overriding(self, moment: str) -> list[Hook]:
        return [hook for hook in self._hooks if getattr(type(hook), moment) is not getattr(Hook, moment)]

    def _guarded(self, hook: Hook, moment: str, call: Callable[[], Any]) -> bool:
        """Return whether the call succeeded. Only the first failure of a hook is logged, not to flood the logs."""
        try:
            call()
            return True
        except (Exception, SystemExit) as error:
            if hook.required:
                raise
            self._failures[hook] += 1
            if self._failures[hook] == 1:
                name = type(hook).__name__
                logger.warning("hook %s failed at %s: %s", name, moment, self._explain(error))
                logger.debug("hook %s failed at %s", name, moment, exc_info=error)
            return False

    def _explain(self, error: Exception | SystemExit) -> str:
        if isinstance(error, HookUnavailableError):
            return f"{error}. Training continues without it"
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return f"{error}. Training continues; free some space for {self._directory}, output until then is lost"
        return (
            f"{type(error).__name__}: {error}. Training continues; the traceback is in {self._directory}/logs. "
            "Remove the hook or correct it; one with `required = True` ends the run instead"
        )


def _measure(hook: Hook, measured: dict[str, float]) -> None:
    returned = hook.measure()
    if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
        raise ValueError(f"measure() returns {shortened(repr(returned), 200)}: return numbers by name")
    values = {name: _number(name, value) for name, value in returned.items()}
    names = {"event", "step", "epoch", "time", *(field.name for field in fields(TrainRecord))}
    taken = sorted(values.keys() & (measured.keys() | names))
    if taken:
        raise ValueError(f"measure() returns {', '.join(taken)}, which the run records already: choose another name")
    measured.update(values)


def _number(name: str, value: Any) -> float:
    """Convert a number of any library to one that every file and tracker accepts."""
    if isinstance(value, torch.Tensor):
        value = value.detach()  # float() warns of a tensor that requires a gradient
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's, for a tensor of several numbers
        shown = shortened(repr(value), 200)
        raise ValueError(f"measure() returns {name} = {shown}: return one number for each name") from None


EXTRA_HOOKS: list[Extra[Callable[[HooksConfig, Layout], Sequence[Hook]]]] = [
    Extra("dali_train.extras.diagnostics:make_hooks"),
    Extra("dali_train.extras.inspection:make_hooks"),
    Extra("dali_train.extras.ledger.hook:make_hooks"),
    Extra("dali_train.extras.pictures.predictions:make_hooks"),
    Extra("dali_train.extras.report.page:make_hooks"),
]
"""Each returns hooks of this rank that are not part of the core."""

TRACKERS: dict[str, Callable[[], Hook] | Extra[Callable[[], Hook]]] = {
    "tensorboard": Extra("dali_train.extras.trackers:TensorBoard", "hooks.trackers tensorboard"),
    "wandb": Extra("dali_train.extras.trackers:WandB", "hooks.trackers wandb"),
    "mlflow": Extra("dali_train.extras.trackers:MLflow", "hooks.trackers mlflow"),
}
"""By their names in hooks.trackers. A config file can add a row."""


def make_hooks(config: HooksConfig, layout: Layout) -> HookList:
    """Return the hooks of this rank: logs first, so that every other hook can log, and the user's own last.

    Raises:
        ConfigError: hooks.trackers has an unknown name, or hooks.user something that is no hook; on every rank.
    """
    trackers = make_trackers(config.trackers)
    hooks: list[Hook] = [RunLogs(), Console()]
    if layout.rank == 0:
        hooks.append(MetricsFile())
    for make in load_all(EXTRA_HOOKS):
        hooks += make(config, layout)
    if layout.rank == 0:
        hooks += trackers
    if config.trace_samples:
        hooks.append(SampleTrace(writes=layout.is_first_of_coordinate))  # once per micro-batch
    return HookList(hooks, [*map(_make_user_hook, config.user)])


def make_trackers(names: tuple[str, ...]) -> list[Hook]:
    """Return one tracker for each of `names`, the value of hooks.trackers.

    Raises:
        ConfigError: a name that is not in TRACKERS.
    """
    return [lookup(TRACKERS, "hooks.trackers", name)() for name in dict.fromkeys(names)]


def _make_user_hook(make: Callable[[], Any]) -> Hook:
    """Raises ConfigError: `make` needs arguments, or makes something else. An error inside it is the user's to see."""
    name = getattr(make, "__name__", repr(make))
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ConfigError(
            f"hooks.user: {name} cannot be called without arguments ({error}): name a function that returns the hook, "
            f"such as lambda: {name}(...)"
        ) from None
    except ValueError:  # some classes in C have no signature
        pass
    hook = make()
    if not isinstance(hook, Hook):
        raise ConfigError(
            f"hooks.user: {name} makes {type(hook).__name__}, which is not a hook: use a subclass of dali_train.Hook"
        )
    return hook
