"""The quickstart script in a small form: from scikit-learn's digits to a table of results and a report."""

import subprocess
import sys
from pathlib import Path

from .conftest import REPOSITORY
from .helpers import words


def test_from_nothing_to_a_report(tmp_path: Path) -> None:
    places = ("--data.root", str(tmp_path / "dataset"), "--run.dir", str(tmp_path / "runs"))
    first = words("--run.epochs 3 --schedule.warmup_epochs 1 --run.eval_every_epochs 3")
    # The first has finished, so the second call begins anew; the dataset is there already.
    for run, options in (("run-1", first), ("run-2", (*first, "--run.max_steps", "1"))):
        done = subprocess.run(
            [sys.executable, "tools/quickstart.py", *options, *places],
            capture_output=True,
            text=True,
            check=False,
            cwd=REPOSITORY,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        table = dict(
            line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  ") and line.strip()
        )
        assert table["top-1"].endswith("of 360 held-out images"), done.stdout
        assert (tmp_path / "runs" / run / "report" / "index.html").is_file()
