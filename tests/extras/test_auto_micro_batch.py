"""`--batch.micro_batch auto`: the number is chosen once, and stays; test_commands.py of tests/fakecuda has a GPU."""

from argparse import Namespace
from pathlib import Path

import pytest

from dali_train.cli import main
from dali_train.config import load_config
from dali_train.extras.plan.auto_micro_batch import choose
from tests.conftest import Train
from tests.helpers import words

AUTO = ("--batch.micro_batch", "auto")


def test_a_run_keeps_its_number(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    """Chosen for two ranks; on one it goes on with the same, and so does a run that begins at its checkpoint."""
    once = ("--run.eval_every_epochs", "none", "--run.max_steps")
    train("run", *AUTO, *once, "1", ranks=2)
    train("run", *AUTO, *once, "2")
    run = tmp_path / "run"
    config = load_config(run / "config.json")
    assert config.batch.micro_batch == 16 and config.run.max_steps == 2
    values = {"batch.micro_batch": "auto", "run.dir": str(tmp_path / "other")}
    assert choose(load_config(tiny_config), values, Namespace()) == 32
    values["run.resume"] = str(run / "checkpoints" / "newest")
    assert choose(load_config(tiny_config), values, Namespace()) == 16


@pytest.mark.parametrize(
    ("options", "accumulation"),
    [
        ("", "1 micro-batch of 32 per rank: 32"),  # for a CPU, or any GPU
        ("--world_size 4", "1 micro-batch of 8 per rank: 32"),
        ("--world_size 4 --batch.global_batch 1024 --gpu h100", "1 micro-batch of 256 per rank: 1,024"),
        ("--batch.global_batch 8192 --gpu-memory 3.5", "of 2048 per rank: 8,192"),
    ],
)
def test_it_fits_ranks_and_memory(
    options: str, accumulation: str, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--config", str(tiny_config), "--run.dir", str(tmp_path / "run")]
    assert main(["plan", *place, *AUTO, *words(options)]) == 0
    assert accumulation in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpu-memory 3", "not even one image fits into 3 GB: use a smaller model"),
        ("--parallel.pipeline 2", "auto with parallel.pipeline 2, which many small micro-batches keep busy: set a"),
        ("--batch.global_batch many", "batch.global_batch is 'many': use a whole number"),
        ("--batch.global_batch 0", "batch.global_batch is 0: use a whole number"),
    ],
)
def test_what_it_cannot_choose(
    options: str, message: str, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--config", str(tiny_config), "--run.dir", str(tmp_path / "run")]
    assert main(["plan", *place, *AUTO, *words(options)]) == 2
    assert message in capsys.readouterr().err
