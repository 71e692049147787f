"""Replicas that differ are not saved: a digest of what each rank holds is compared before every checkpoint."""

import re
from pathlib import Path

import pytest
import torch

from dali_train.checkpoint.format import load_newest
from dali_train.runtime.status import WRONG_RESULT, read_status
from dali_train.training.replicas import digest
from tests.conftest import Train, final_weights
from tests.helpers import PIPELINE, SHARDED, TENSOR, extended, words

# After step STEP, rank 1 holds one wrong element of its part of TENSOR.
SPOILS = """
import os
from dali_train.parallel.mesh import local

class Spoils(Hook):
    def start(self, record):
        self.model, self.optimizer = record.model, record.optimizer

    def step(self, record):
        if record.step == STEP and os.environ["RANK"] == "1":
            parameters = dict(self.model.named_parameters())
            weight = next(parameters[name] for name in parameters if name.endswith("fc1.weight"))
            norm = next(parameters[name] for name in parameters if name.endswith("norm1.weight"))
            local(TENSOR).detach().view(-1)[5].mul_(1.0009765625)
"""


def spoiling(tensor: str, step: int) -> str:
    return SPOILS.replace("TENSOR", tensor).replace("STEP", str(step))


OFTEN = ("--run.checkpoint_every_steps", "2", "--run.eval_every_epochs", "None")


def test_another_bit_or_order_changes_the_digest() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        values = torch.randn(83, 67, generator=torch.Generator().manual_seed(1)).to(dtype)  # more than a row of words
        values[0, 0] = float("nan")
        whole = digest(values)
        assert torch.equal(whole, digest(values.t().contiguous().t())), "of the elements, in whatever memory format"
        assert torch.equal(whole, digest(torch.cat([values.new_zeros(1), values.flatten()])[1:])), "at any address"
        for element in ((0, 1), (82, 66)):
            bits = values.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
            bits[element] ^= 1
            assert not (whole == digest(bits.view(dtype))).any()
        assert not torch.equal(whole, digest(values.flip(1)))
        assert not torch.equal(whole, digest(values.flip(0)))
    assert digest(torch.ones(0)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("ranks", "tensor", "named"),
    [
        (2, "weight", "rank 0 on .* and rank 1 on .* differ from each other in .* Either may be wrong"),
        pytest.param(
            3,
            "self.optimizer.state[weight]['exp_avg']",
            "state of rank 1 on [^:]* differ from those of 2 other replicas",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["two, undecided", "three, optimizer state"],
)
def test_a_run_whose_replicas_differ_ends_before_it_saves(
    train: Train, tiny_config: Path, tmp_path: Path, ranks: int, tensor: str, named: str
) -> None:
    """And started again, it goes on from the good checkpoint to the end of an undisturbed run."""
    spoilt = extended(tiny_config, spoiling(tensor, step=5))
    log = train("run", *OFTEN, ranks=ranks, config=spoilt, status=WRONG_RESULT)
    lines = [line for line in log.splitlines() if "is not saved" in line]
    assert len(lines) == 1 and "Traceback" not in log, log
    assert re.search(rf"step 6 .*{named}", lines[0]) and "of step 4, is good" in lines[0]
    status = read_status(tmp_path / "run")
    assert status is not None and status.state == "failed" and re.search(named, status.reason)
    newest, _ = load_newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.step == 4

    train("run", *OFTEN, ranks=ranks)
    train("undisturbed", *OFTEN, ranks=ranks)
    resumed, undisturbed = (final_weights(tmp_path / name) for name in ("run", "undisturbed"))
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "layout", "tensor", "named"),
    [
        (2, TENSOR, "norm", "rank 0 on .* and rank 1 on .* 1 of .*norm1"),
        (4, PIPELINE, "norm", "rank 0 on .* and rank 1 on .* 1 of .*norm1"),
        (4, (*SHARDED, *words("--parallel.shard_ranks 2")), "weight", "rank 1 on .* and rank 3 on .* 1 of .*fc1"),
    ],
    ids=["tensor", "pipeline", "sharded"],
)
def test_ranks_that_hold_the_same_part_are_compared(
    train: Train, tiny_config: Path, ranks: int, layout: tuple[str, ...], tensor: str, named: str
) -> None:
    spoilt = extended(tiny_config, spoiling(tensor, step=6))
    log = train("run", *OFTEN, *layout, ranks=ranks, config=spoilt, status=WRONG_RESULT)
    assert re.search(rf"step 6 is not saved: .* {named}", log), log
