"""All hooks of a rank. One that raises is reported by name and training continues."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dali_train.files import NO_SPACE
from dali_train.hooks.base import EvaluationRecord, Hook, RunEnd, RunPlan, RunStart, StepRecord, TrainRecord
from dali_train.text import plural

logger = logging.getLogger("dali_train")

_REGISTRATIONS: dict[type, tuple[str, ...]] = {
    nn.Module: (
        "register_forward_pre_hook",
        "register_forward_hook",
        "register_full_backward_pre_hook",
        "register_full_backward_hook",
        "register_backward_hook",
    ),
    torch.Tensor: ("register_hook", "register_post_accumulate_grad_hook"),
    Optimizer: ("register_step_pre_hook", "register_step_post_hook"),
}
"""Through which methods torch takes callbacks that it calls while training."""


class HookUnavailableError(RuntimeError):
    """A hook cannot work here, for a reason that the user can mend; the message says how."""


class Observers:
    """Calls each hook at the moments that it overrides, in the order given."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = list(hooks)
        self._failures: dict[Hook, int] = {}
        self._directory = ""

    def announce(self, record: RunPlan) -> None:
        self._directory = str(record.directory)
        for hook in self._overriding("announce"):
            self._guarded(hook, "announce", partial(hook.announce, record))

    def start(self, record: RunStart) -> None:
        self._directory = str(record.directory)
        for hook in list(self._hooks):
            with _guarding_callbacks(partial(self._guarded_callback, hook)) as handles:
                started = self._guarded(hook, "start", partial(hook.start, record))
            if not started:
                self._hooks.remove(hook)
                for handle in handles:
                    handle.remove()
        self._measuring = self._overriding("measure")
        self._stepping = self._overriding("step")
        self._evaluating = self._overriding("evaluation")

    def measure(self) -> dict[str, float]:
        measured: dict[str, float] = {}
        for hook in self._measuring:
            self._guarded(hook, "measure", partial(_measure, hook, measured))
        return measured

    def step(self, record: StepRecord) -> None:
        for hook in self._stepping:
            self._guarded(hook, f"step {record.step}", partial(hook.step, record))

    def evaluation(self, record: EvaluationRecord) -> None:
        for hook in self._evaluating:
            self._guarded(hook, f"the evaluation of step {record.step}", partial(hook.evaluation, record))

    def end(self, record: RunEnd) -> None:
        # Last started, first ended: the log files are still open for what the others report at their end.
        for hook in reversed(self._hooks):
            if self._failures.get(hook, 0) > 1:
                logger.warning("hook %s failed %s in all", type(hook).__name__, plural(self._failures[hook], "time"))
            self._guarded(hook, "the end", partial(hook.end, record))

    def _overriding(self, moment: str) -> list[Hook]:
        return [hook for hook in self._hooks if getattr(type(hook), moment) is not getattr(Hook, moment)]

    def _guarded(self, hook: Hook, moment: str, call: Callable[[], Any]) -> bool:
        """Whether it went well. Only a hook's first failure is reported, so that a broken one cannot flood the logs."""
        try:
            call()
            return True
        except Exception as error:
            self._report(hook, moment, error)
            return False

    def _guarded_callback(self, hook: Hook, callback: Callable[..., Any]) -> Callable[..., Any]:
        """`callback` of `hook`, for torch to call; one that raises changes nothing."""

        @functools.wraps(callback, updated=())
        def guarded(*arguments: Any, **named: Any) -> Any:
            try:
                return callback(*arguments, **named)
            except Exception as error:
                self._report(hook, "a callback that it registered with torch", error)
                return None

        return guarded

    def _report(self, hook: Hook, moment: str, error: Exception) -> None:
        if hook.required:
            raise error
        self._failures[hook] = self._failures.get(hook, 0) + 1
        if self._failures[hook] == 1:
            name = type(hook).__name__
            logger.warning("hook %s failed at %s: %s", name, moment, self._explain(error))
            logger.debug("hook %s failed at %s", name, moment, exc_info=error)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, HookUnavailableError):
            return f"{error}. Training continues without it"
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return f"{error}. Training continues; make room under {self._directory}, what is written until then is lost"
        return (
            f"{type(error).__name__}: {error}. Training continues; the traceback is in {self._directory}/logs. "
            "Remove the hook or correct it; one with `required = True` ends the run instead"
        )


@contextmanager
def _guarding_callbacks(guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[list[RemovableHandle]]:
    """Every callback that is registered with torch in the block goes through `guard` first; gives the handles."""
    handles: list[RemovableHandle] = []
    originals = [(owner, name, getattr(owner, name)) for owner, names in _REGISTRATIONS.items() for name in names]

    def guarding(register: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
        @functools.wraps(register)
        def registered(observed: Any, hook: Callable[..., Any], *arguments: Any, **named: Any) -> RemovableHandle:
            handle = register(observed, guard(hook), *arguments, **named)
            handles.append(handle)
            return handle

        return registered

    for owner, name, register in originals:
        setattr(owner, name, guarding(register))
    try:
        yield handles
    finally:
        for owner, name, register in originals:
            setattr(owner, name, register)


def _measure(hook: Hook, measured: dict[str, float]) -> None:
    values = hook.measure()
    taken = sorted(values.keys() & (measured.keys() | {field.name for field in fields(TrainRecord)}))
    if taken:
        raise ValueError(f"measure() gives {', '.join(taken)}, which the run records already: choose another name")
    measured.update(values)
