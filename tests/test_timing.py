"""Where the time goes: phases that sum to the step, and a known delay that turns up where it belongs."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dali_train.timing import STEP_PHASES, PhaseClock, order_of_gradients

from .conftest import Train

# Added to the config of the tests: a hook that measures the wall clock between two readings of the metrics by itself.
WALL_CLOCK = """
import time
from dataclasses import replace
from dali_train.hooks import Hook

class WallClock(Hook):
    def start(self, record):
        self.last = None

    def measure(self):
        now, last = time.perf_counter(), self.last
        self.last = now
        return {} if last is None else {"wall_s": now - last}

config = replace(config, hooks=replace(config.hooks, user=(WallClock,)))
"""

# A source that sleeps 10 ms an image, and a hook that tells how long it really slept: more, on a busy machine.
SLOW_SOURCE = """
import time
from dataclasses import replace
from dali_train.data.index import Split
from dali_train.hooks import Hook

quick, slept = Split.encoded, [0.0]

def slow(self, image):
    start = time.perf_counter()
    time.sleep(0.01)
    slept[0] += time.perf_counter() - start
    return quick(self, image)

class Slept(Hook):
    def measure(self):
        spent, slept[0] = slept[0], 0.0
        return {"slept_s": spent}

Split.encoded = slow
config = replace(config, hooks=replace(config.hooks, user=(Slept,)))
"""


def train_lines(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "train"]


def extended(config: Path, text: str) -> Path:
    path = config.with_name("extended.py")
    path.write_text(config.read_text() + text)
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_phases_sum_to_the_step(train: Train, tiny_config: Path, tmp_path: Path, ranks: int) -> None:
    never = ("--run.eval_every_epochs", "None", "--run.checkpoint_every_steps", "1000")
    train("run", "--run.epochs", "16", *never, config=extended(tiny_config, WALL_CLOCK), ranks=ranks)
    lines = train_lines(tmp_path / "run")[2:]  # the first step is timed apart
    assert len(lines) == 23
    names = ["data_wait_s", *(f"{phase}_s" for phase in STEP_PHASES if phase != "data")]
    assert all(line[name] > 0 for line in lines for name in names)
    by_phases, by_wall_clock = sum(line[name] for line in lines for name in names), sum(line["wall_s"] for line in lines)
    assert by_phases == pytest.approx(by_wall_clock, rel=0.02)
    assert sum(line["step_s"] for line in lines) == pytest.approx(by_wall_clock, rel=0.02)


def test_a_slow_source_is_waited_for_in_data(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    train("run", "--run.eval_every_epochs", "None", config=extended(tiny_config, SLOW_SOURCE))
    lines = train_lines(tmp_path / "run")[1:]
    assert len(lines) == 6
    delay, waited = (sum(line[name] for line in lines) for name in ("slept_s", "data_wait_s"))
    assert delay >= 6 * 32 * 0.01
    # The source sleeps in a thread of its own: what the rest of the step does not hide is waited for, nine tenths when
    # nothing else runs here.
    assert delay / 3 < waited


def test_evaluation_and_checkpoints_are_outside_the_step() -> None:
    clock = PhaseClock(torch.device("cpu"))
    for _ in range(3):
        for phase in ("data", "forward", "logging"):
            clock.enter(phase)
            time.sleep(0.002)
        clock.finish_step()
    for phase in ("evaluation", "checkpoint"):
        clock.enter(phase)
        time.sleep(0.05)
    times = clock.read()
    assert times.first_step_s is not None and times.first_step_s >= 0.006
    assert times.evaluation_s >= 0.05 and times.checkpoint_s >= 0.05
    assert times.step_s == pytest.approx(sum(times.phases.values()), rel=0.02)
    assert set(times.phases) == set(STEP_PHASES)
    assert set(clock.totals) == {"data", "forward", "logging", "evaluation", "checkpoint"}
    clock.enter("forward")
    clock.finish_step()
    assert clock.read().first_step_s is None, "only the process's first step is apart"


def test_a_step_that_is_the_only_one_is_not_lost() -> None:
    clock = PhaseClock(torch.device("cpu"))
    clock.enter("data")
    time.sleep(0.002)
    clock.finish_step()
    times = clock.read()
    assert times.step_s == times.first_step_s
    assert times.phases["data"] >= 0.002


def test_exchange_begins_when_the_last_gradient_is_there() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with order_of_gradients(model) as order:
        model(torch.ones(1, 3)).sum().backward()
    assert set(order) == set(model.parameters()) and order[0] in set(model[1].parameters())
    model(torch.ones(1, 3)).sum().backward()
    assert len(order) == 4, "outside of the block nothing is watched"
    clock = PhaseClock(torch.device("cpu"))
    clock.watch_exchange(order[-1])
    for follows in (False, True):
        clock.enter("backward", exchange_follows=follows)
        model(torch.ones(1, 3)).sum().backward()
        time.sleep(0.002)
        clock.finish()
        assert ("exchange" in clock.totals) == follows
