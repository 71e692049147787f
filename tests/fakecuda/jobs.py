"""What a rank of the tests runs on the fake device: a command under watch, whose report is a file."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dali_train.commands import train
from dali_train.training import build
from tests.fakecuda.device import OnHost, Watch, without_values
from tests.ranks import command

_PHASES = ("build", "report_step", "evaluate", "save", "end")  # of commands/train.py, besides the steps


class Report:
    """What a command does on the device: its steps, waits of the host by phase, faults."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._waits: list[dict[str, Any]] = []
        self._steps: list[int] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = len(self._watch.waits)
        try:
            yield
        finally:
            self._waits += [{"phase": name, **wait._asdict()} for wait in self._watch.waits[before:]]

    def watched_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def watched(trainer: Any, number: int, *arguments: Any) -> Any:
            self._steps.append(number)
            with self.phase(f"step {number}"):
                return step(trainer, number, *arguments)

        return watched

    def watched_function(self, name: str) -> Callable[..., Any]:
        function = getattr(train, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            with self.phase(name):
                return function(*arguments, **named)

        return watched

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"waits": self._waits, "steps": self._steps, "faults": self._watch.faults}
        path.write_text(json.dumps(content))


def watched(
    arguments: list[str], directory: Path, *, values: bool = True, patch: Callable[[], Any] = nullcontext
) -> int:
    """Run ``dali-train ARGUMENTS`` on the fake device, and write a report into ``directory/rank{r}.json``.

    Args:
        values: compute on the host; otherwise no operation computes anything.
        patch: a context in which it runs, for faults that a test puts in.
    """
    watch = Watch()
    report, rank = Report(watch), os.environ["RANK"]
    with ExitStack() as stack:
        stack.callback(report.write, directory / f"rank{rank}.json")
        stack.enter_context(patch())
        for name in _PHASES:
            stack.enter_context(mock.patch.object(train, name, report.watched_function(name)))
        stack.enter_context(mock.patch.object(build.Trainer, "step", report.watched_step(build.Trainer.step)))
        stack.enter_context(kernels(values=values))
        stack.enter_context(watch.watching())
        stack.enter_context(OnHost(watch) if values else without_values())
        return command(arguments)


@contextmanager
def kernels(*, values: bool) -> Iterator[None]:
    """Choose kernels that the fake can launch: none of cuDNN's, and with values no attention that a CPU lacks."""
    cuda, enabled = torch.backends.cuda, torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    cuda.enable_cudnn_sdp(False)
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_flash_sdp(not values)
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = enabled
        cuda.enable_cudnn_sdp(True)
        cuda.enable_mem_efficient_sdp(True)
        cuda.enable_flash_sdp(True)
