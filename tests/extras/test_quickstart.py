"""`dali-train quickstart` in a small form: from scikit-learn's digits to a table of results and a report."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from dali_train import cli
from dali_train.commands import data
from dali_train.extras.quickstart.train_digits import next_run
from dali_train.runtime.process import num_cores
from tests.helpers import words


@pytest.mark.usefixtures("forked_launch")
def test_from_nothing_to_a_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dataset, runs = tmp_path / "dataset", tmp_path / "runs"
    options = words("--run.epochs 1 --schedule.warmup_epochs 0.5 --run.eval_every_epochs 1 --model.kwargs.depth 1")
    places = ["--data.root", str(dataset), "--run.dir", str(runs)]
    assert cli.main(["quickstart", *options, *places]) == 0
    printed = capfd.readouterr().out
    table = dict(re.findall(r"^  (\S+) +(.+)$", printed, re.MULTILINE))
    assert re.fullmatch(r".* of 360 held-out images \(\d+ to \d+% is usual\)", table["top-1"]), printed
    assert table["report"] == str(runs / "run-1" / "report" / "index.html") and Path(table["report"]).is_file()
    # Measured: any number that divides cores and micro-batches, of which there are four.
    cores = num_cores()
    chosen = re.search(
        r"^num_processes auto: (\d) with 1 thread each, (\S+) times as fast as (\d) with ", printed, re.M
    )
    if torch.cuda.device_count() == 0 and cores > 1 and cores % 2 == 0:
        assert chosen is not None and {int(chosen[1]), int(chosen[3])} < {1, 2, 4}, printed
        assert cores % int(chosen[1]) == 0 and float(chosen[2]) >= 1 and f" on {chosen[1]} rank" in table["images/s"]
    # This run has finished, so a second call begins another, on the dataset that is there already.
    assert next_run(runs) == (runs / "run-2", False)
    shutil.copytree(runs / "run-1", runs / "run-2", ignore=shutil.ignore_patterns("status.json"))
    assert next_run(runs) == (runs / "run-2", True)  # as one that was interrupted, which goes on
    assert data.main("convert", ["digits", "--out", str(dataset)]) == 0
