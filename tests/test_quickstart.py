"""The quickstart script in a small form: from scikit-learn's digits to a table of results and a report."""

import subprocess
import sys
from pathlib import Path

from dali_train.commands import data

from .conftest import REPOSITORY
from .data.files import tool
from .helpers import words


def test_from_nothing_to_a_report(tmp_path: Path) -> None:
    dataset, runs = tmp_path / "dataset", tmp_path / "runs"
    options = words("--run.epochs 1 --schedule.warmup_epochs 0.5 --run.eval_every_epochs 1 --model.kwargs.depth 1")
    places = ["--data.root", str(dataset), "--run.dir", str(runs)]
    command = [sys.executable, "tools/quickstart.py", *options, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    table = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  ") and line.strip())
    assert table["top-1"].endswith("of 360 held-out images"), done.stdout
    assert table["report"] == str(runs / "run-1" / "report" / "index.html") and Path(table["report"]).is_file()
    # This run has finished, so a second call begins another, on the dataset that is there already.
    assert tool("quickstart").next_run(runs) == runs / "run-2"
    assert data.main("convert", ["digits", "--out", str(dataset)]) == 0
