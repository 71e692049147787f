"""`dali-train compare`: the statistics of pairs, on real runs."""

import csv
import re
import shutil
from pathlib import Path

import pytest

from dali_train import cli
from dali_train.extras.compare.pairs import Difference
from tests.conftest import Train
from tests.helpers import events, extended

SHORT = ("--run.epochs", "1", "--run.eval_every_epochs", "1", "--hooks.predictions", "0")


def test_the_difference_of_pairs() -> None:
    """By hand: the differences 0.01, 0.02 and 0.03 have a standard deviation of 0.01; each column has one of 0.1."""
    found = Difference.of([0.5, 0.6, 0.7], [0.51, 0.62, 0.73])
    assert found.mean == pytest.approx(0.02) and found.standard_error == pytest.approx(0.01 / 3**0.5)
    assert found.unpaired_error == pytest.approx(((0.01 + 0.0121) / 3) ** 0.5)
    assert found.num_needed == 786  # (2.802 x 0.01 / 0.001)**2
    assert any("0.00 of the variance" in line for line in found.describe())


@pytest.mark.thorough
def test_pairs_are_trained_once_and_have_the_same_samples(
    run_command: Train, tiny_config: Path, dataset: Path, tmp_path: Path
) -> None:
    """A recipe and its copy are the same run with each seed, so their difference has no error."""
    other = extended(tiny_config, "")
    words = ["compare", str(tiny_config), str(other), "--seeds", "2", "--out", str(tmp_path / "out"), *SHORT]
    of_an_array = ("--data.seed", "1", "--run.dir", str(tmp_path / "out" / "tiny-config-seed-1"))
    run_command("train", "--config", str(tiny_config), *of_an_array, *SHORT)
    printed = run_command(*words)
    assert printed.count("step 1/2 took") == 3
    assert "the recipes are the same" in printed and "difference +0.00 points, with a standard error of 0.00" in printed
    with (tmp_path / "out" / "pairs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["0", "1"] and {float(row["difference"]) for row in rows} == {0}
    runs = sorted(path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert [path.name for path in runs] == [
        *(f"extended-seed-{seed}" for seed in range(2)),
        *(f"tiny-config-seed-{seed}" for seed in range(2)),
    ]
    top1 = [events(path, "eval")[-1]["top1"] for path in runs]
    assert [float(row["tiny-config"]) for row in rows] == top1[2:] == top1[:2]
    shutil.rmtree(runs[0])
    again = run_command(*words)
    assert again.count("step 1/2 took") == 1 and again.splitlines()[-4:] == printed.splitlines()[-4:]
    refused = run_command(*words, "--optimizer.lr", "0.1", status=2)
    assert "has finished with another recipe or evaluation (optimizer.lr 0.01 -> 0.1): use another directory" in refused
    another = tmp_path / "another"
    assert cli.main(["data", "subset", str(dataset), "--images-per-class", "8", "--out", str(another)]) == 0
    for option, value, change in (
        ("--data.eval_size", "24", r"\(data.eval_size \d+ -> 24\)"),
        ("--run.max_steps", "1", r"\(run.max_steps none -> 1\)"),
        ("--data.root", str(another), r"\(dataset 50 images, content \w+ -> 40 images, content \w+\)"),
    ):
        assert re.search(
            f"finished with another recipe or evaluation {change}", run_command(*words, option, value, status=2)
        )
    assert "needs 2 or more" in run_command(*words, "--seeds", "1", status=2)
    assert "have one name" in run_command("compare", str(other), str(other), status=2)
