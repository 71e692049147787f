"""Audits: a rank that computes wrongly is named by another that repeats its work."""

import re
from pathlib import Path

import pytest

from dali_train.checkpoint.format import load_newest
from dali_train.cli import main
from dali_train.extras.audit.audited_trainer import audited_pass
from dali_train.runtime.status import WRONG_RESULT, read_status
from tests.conftest import Train
from tests.helpers import extended

# Rank 1 computes one element of a layer's output wrongly, in the forward passes of step 3 whose number is in FLIPPED.
FLIPS = """
import os

class Flips(Hook):
    def start(self, record):
        if os.environ["RANK"] == "1":
            self.passes = 0
            record.model.blocks[1].mlp.fc1.register_forward_hook(self.flip)

    def step(self, record):
        self.passes = 100 * record.step

    def flip(self, layer, inputs, output):
        if layer.training and self.passes in FLIPPED:
            output.data.view(-1)[5].mul_(1.5)
        self.passes += layer.training
"""
TWO_STEPS = range(200, 300)


def test_every_rank_audits_every_other_one_on_each_of_its_micro_batches() -> None:
    assert {audited_pass(number, 3, 4) for number in range(9)} == {(n, d) for n in range(3) for d in (1, 2, 3)}


@pytest.mark.parametrize(
    ("ranks", "flipped", "named"),
    [
        (3, "range(200, 300)", "rank 1 on "),  # always: the other two outvote it
        # Once: it does not repeat its own result.
        pytest.param(2, "(200, 201, 202, 203)", "rank 1 on ", marks=pytest.mark.thorough),
        pytest.param(2, "range(200, 300)", "rank 0 on .* or rank 1 on ", marks=pytest.mark.thorough),
    ],
    ids=["permanent", "once", "undecided"],
)
def test_a_rank_that_computes_wrongly_is_named_before_weights_change(
    train: Train, tiny_config: Path, tmp_path: Path, ranks: int, flipped: str, named: str
) -> None:
    config = extended(tiny_config, FLIPS.replace("FLIPPED", flipped))
    options = ("--run.audit_every_steps", "1", "--run.checkpoint_every_steps", "1", "--precision.dtype", "bf16")
    log = train("run", *options, ranks=ranks, config=config, status=WRONG_RESULT)
    lines = [line for line in log.splitlines() if "gradients" in line]
    assert len(lines) == 1 and "Traceback" not in log, log
    assert re.search(
        rf"step 3: {named}[^ ]* \(cpu, .*\) computed wrong gradients: .* of 32 weights, .* of \w", lines[0]
    )
    newest, _ = load_newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.step == 2
    status = read_status(tmp_path / "run")
    assert status is not None and status.state == "failed" and re.search(named, status.reason)


def test_ranks_that_cannot_be_audited_say_so_once(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    options = ("--run.audit_every_steps", "1", "--run.max_steps", "1")
    assert train("one", *options).count("nothing is audited, because there is one data-parallel rank") == 1
    threads = "import os, torch\ntorch.set_num_threads(1 + int(os.environ['RANK']))\nos.environ['OMP_NUM_THREADS'] = ''"
    log = train("two", *options, ranks=2, config=extended(tiny_config, threads))
    assert log.count("nothing is audited") == 1 and re.search(r"devices differ.* 1 thread, .*; .* 2 threads, ", log)


def test_plan_prints_the_price(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", str(tiny_config), "--world-size", "2", "--run.audit_every_steps", "5"]
    assert main(words) == 0
    assert re.search(r"^audit +every 5 steps .* 5.0% of the computation", capsys.readouterr().out, re.MULTILINE)
    assert main([*words, "--parallel.shard", "full"]) == 2
    assert "run.audit_every_steps 5" in capsys.readouterr().err
