"""Inside a step the host never asks the device for a value: on a GPU it would wait there for all that is queued."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dali_train.cli import main
from dali_train.training import build
from tests.helpers import FAST


class ValuesRead(TorchDispatchMode):
    """Collects the tensors whose values the host reads: ``.item()``, ``bool(tensor)``, ``float(tensor)`` and the
    like."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.tensors.append(args[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize("options", [(), ("--precision.dtype", "fp16"), FAST], ids=["fp32", "fp16", "fast"])
def test_a_step_reads_no_value(
    tiny_config: Path, tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    class Watched(build.Trainer):
        def step(self, *args: Any) -> Any:
            # LAMB counts its steps in a tensor that is always in host memory: reading that waits for nothing.
            counters = {id(group["step"]) for group in self.optimizer.param_groups if "step" in group}
            with ValuesRead() as values:
                result = super().step(*args)
            counters |= {id(group["step"]) for group in self.optimizer.param_groups}
            steps.append([tensor for tensor in values.tensors if id(tensor) not in counters])
            return result

    monkeypatch.setattr(build, "Trainer", Watched)
    words = ["--config", str(tiny_config), "--run.dir", str(tmp_path / "run"), "--run.max_steps", "3", *options]
    assert main(["train", *words]) == 0
    # With fp16 the step that makes the optimizer's state asks once whether it overflowed.
    assert len(steps[0]) == ("fp16" in options) and steps[1:] == [[], []]


def test_the_check_detects_a_wait() -> None:
    with ValuesRead() as values:
        assert bool(torch.ones(()) > 0)
    assert len(values.tensors) == 1
