"""What is not finite is neither saved nor folded in, and a run that ends with it is a failure."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from dali_train.config import ParallelConfig
from dali_train.errors import ConfigError
from dali_train.parallel.layout import Layout
from dali_train.parallel.parallelize import parallelize, warm_up
from dali_train.runtime.launch import Launch
from dali_train.runtime.status import read_status
from dali_train.training.invariant import RunningStatistics
from dali_train.training.metrics import all_finite
from tests.conftest import Train
from tests.helpers import LONG, extended

HOPELESS = ("--optimizer.lr", "1e30", "--optimizer.clip_grad_norm", "None", "--hooks.log_every_steps", "1000000")
LAYOUT = Layout.from_config(Launch(), ParallelConfig())


def test_a_run_that_ends_with_nan_is_a_failure(train: Train, tmp_path: Path) -> None:
    output = train("run", *LONG, *HOPELESS, "--run.max_steps", "6", status=1)
    assert re.search(
        r"dali-train train: the run ended at step 6 of 6, but was not saved: .* there is no checkpoint", output
    )
    assert "Traceback" not in output
    status = read_status(tmp_path / "run")
    assert status is not None and status.state == "failed" and status.reason.startswith("NonFiniteError")


def test_a_run_that_stalls_with_nan_is_a_failure(train: Train) -> None:
    output = train("run", *HOPELESS, "--hooks.stop_early", "1", status=1)
    assert re.search(r"dali-train train: the run ended at step 4 of 7, but was not saved: .* no checkpoint", output)


def test_a_run_whose_steps_all_overflow_is_a_failure(train: Train, tmp_path: Path) -> None:
    overflowing = ("--precision.dtype", "fp16", "--precision.initial_scale", "1e30", "--run.max_steps", "3")
    output = train("run", *overflowing, status=1)
    assert re.search(r"the run ended at step 3 of 3, but was not saved: all steps overflowed.* no checkpoint", output)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_resumed_run_whose_remaining_steps_all_overflow_is_a_failure(train: Train, tmp_path: Path) -> None:
    """The stop after step 1 is saved with its loss scale, which is still much too large."""
    overflowing = ("--precision.dtype", "fp16", "--precision.initial_scale", "1e30", "--run.max_steps", "3")
    train("run", *overflowing, "--run.max_seconds", "0.001", status=75)
    output = train("run", *overflowing, status=1)
    assert re.search("ended at step 3 of 3, but was not saved: all steps since step 1 overflowed.* of step 1,", output)
    assert not (tmp_path / "run" / "model.safetensors").exists()


STOPPING = """
import os, signal

class Stop(Hook):
    def step(self, record):
        if record.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_stop_that_could_not_save_says_so(train: Train, tiny_config: Path) -> None:
    output = train("run", *LONG, *HOPELESS, ranks=2, config=extended(tiny_config, STOPPING), status=1)
    assert re.search(r"stopped on request \(signal TERM\) at step \d+ of \d+, but was not saved: weights or", output)
    assert "stopped after saving" not in output


def test_finite_is_asked_of_the_weights() -> None:
    good = [
        torch.ones(3),
        torch.zeros(0),
        torch.tensor(2),
        torch.full((2, 2), 1e38),
        torch.ones((), dtype=torch.float64),
    ]
    assert all_finite(good)
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not all_finite([*good, torch.tensor([0.0, bad, 1.0])])


def test_a_micro_batch_that_is_not_finite_leaves_the_statistics_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    statistics = RunningStatistics(model)
    images = torch.randn(8, 4)

    def step(*micro_batches: torch.Tensor) -> list[torch.Tensor]:
        for batch in micro_batches:
            model(batch)
            statistics.add_micro_batch()
        statistics.finish_step(len(micro_batches))
        return [buffer.clone() for name, buffer in model.named_buffers() if "running" in name]

    before = step(images, 2 * images)
    broken = images.clone()
    broken[3, 1] = float("inf")
    assert all(torch.equal(a, b) for a, b in zip(before, step(images, broken, images), strict=True))
    assert all(after.isfinite().all() and not after.equal(b) for b, after in zip(before, step(images), strict=True))


class Odd(nn.Module):
    """A parameter that nothing uses, a buffer of its own, and statistics that no momentum weighs."""

    def __init__(self, unused: bool, counting: bool, momentum: float | None) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(4, momentum=momentum)
        if unused:
            self.extra = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.counting = counting

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.counting:
            self.calls += 1
        return self.head(self.norm(images))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Odd(True, False, 0.1), r"the model does not use extra.weight, extra.bias: they get no gradient"),
        (Odd(False, True, 0.1), r"a forward pass changes the model's calls, which would depend on the number of ranks"),
        (
            Odd(False, False, None),
            r"changes the model's norm.running_mean, norm.running_var, norm.num_batches_tracked, which",
        ),
    ],
)
def test_what_would_depend_on_the_ranks_is_refused(model: nn.Module, message: str) -> None:
    parallel = parallelize(model, LAYOUT, ParallelConfig(), torch.device("cpu"))
    with pytest.raises(ConfigError, match=message):
        warm_up(parallel, torch.randn(8, 4), torch.autocast("cpu", enabled=False))


def test_the_order_of_the_gradients_is_returned() -> None:
    model = Odd(False, False, 0.1)
    order = warm_up(
        parallelize(model, LAYOUT, ParallelConfig(), torch.device("cpu")),
        torch.randn(8, 4),
        torch.autocast("cpu", enabled=False),
    )
    assert {id(p) for p in order} == {id(p) for p in model.parameters()} and {id(order[0]), id(order[1])} == {
        id(p) for p in model.head.parameters()
    }
    assert model.norm.num_batches_tracked == 0 and all(p.grad is None for p in model.parameters())
