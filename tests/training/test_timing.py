"""Where the time goes: phases that sum to the step, and a known delay that turns up where it belongs."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from dali_train.runtime.status import STEP_PHASES
from dali_train.training.timing import PhaseClock
from tests.conftest import StartTraining, Train
from tests.helpers import events, extended, words

# Added to the config of the tests: a hook that reads the clock just after each reading of the metrics, and after the
# step before.
WALL_CLOCK = """
import time

class WallClock(Hook):
    def start(self, record):
        self.before = time.perf_counter()

    def measure(self):
        return {"clock_before": self.before, "clock_after": time.perf_counter()}

    def step(self, record):
        self.before = time.perf_counter()
"""

# A source that sleeps 30 ms per image, and a hook that measures how long it really slept: more, on a busy machine.
SLOW_SOURCE = """
import time
from dali_train.data.dataset.storage import MappedFiles

quick, slept = MappedFiles.read, [0.0]

def slow(self, images):
    start = time.perf_counter()
    time.sleep(0.03 * len(images))
    slept[0] += time.perf_counter() - start
    return quick(self, images)

class Slept(Hook):
    def measure(self):
        spent, slept[0] = slept[0], 0.0
        return {"slept_s": spent}

MappedFiles.read = slow
"""


def test_phases_sum_to_the_step(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    fast = words("--run.eval_every_epochs none --run.checkpoint_every_steps 1000 --batch.micro_batch 16")
    train("run", "--run.epochs", "8", *fast, config=extended(tiny_config, WALL_CLOCK), ranks=2)
    lines = events(tmp_path / "run", "train")[2:]  # the first step is timed apart
    assert len(lines) == 11
    names = STEP_PHASES.values()
    assert all(line[name] > 0 for line in lines for name in names)
    by_phases = sum(line[name] for line in lines[1:] for name in names)
    assert by_phases == pytest.approx(sum(line["step_s"] for line in lines[1:]), rel=1e-9)
    # The phases' readings of the clock lie between the hook's own, however long a busy machine takes from one to the
    # next.
    first, last = lines[0], lines[-1]
    assert last["clock_before"] - first["clock_after"] <= by_phases <= last["clock_after"] - first["clock_before"]


def test_a_slow_source_is_waited_for_in_data(start_training: StartTraining, tiny_config: Path, tmp_path: Path) -> None:
    # Not in the pool, whose later jobs would sleep for each image, too.
    run = start_training("run", *words("--run.eval_every_epochs none"), config=extended(tiny_config, SLOW_SOURCE))
    assert run.wait() == [0], run.log.read_text()
    lines = events(tmp_path / "run", "train")
    assert len(lines) == 7 and sum(line["slept_s"] for line in lines) >= 7 * 32 * 0.03
    delay, waited = (sum(line[name] for line in lines[1:]) for name in ("slept_s", "data_wait_s"))
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
    assert times.step_s == pytest.approx(sum(getattr(times, field) for field in STEP_PHASES.values()), rel=1e-9)
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
    assert times.data_wait_s >= 0.002


def test_the_all_reduce_begins_when_the_last_gradient_is_there() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    clock = PhaseClock(torch.device("cpu"))
    clock.watch_all_reduce(model[0].weight)  # the first layer's gradient comes last
    for follows in (False, True):
        clock.enter("backward", all_reduce_follows=follows)
        model(torch.ones(1, 3)).sum().backward()
        time.sleep(0.002)
        clock.finish()
        assert ("all-reduce" in clock.totals) == follows
