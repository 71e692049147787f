"""The quickstart script in a small form: from scikit-learn's digits to a table of results and a report."""

import re
import sys
from pathlib import Path

from dali_train.commands import data

from .data.files import tool
from .helpers import words
from .ranks import POOL


def quickstart(arguments: list[str]) -> None:
    sys.argv = ["quickstart.py", *arguments]
    tool("quickstart").main()


def test_from_nothing_to_a_report(tmp_path: Path) -> None:
    dataset, runs = tmp_path / "dataset", tmp_path / "runs"
    options = words("--run.epochs 1 --schedule.warmup_epochs 0.5 --run.eval_every_epochs 1 --model.kwargs.depth 1")
    places = ["--data.root", str(dataset), "--run.dir", str(runs)]
    log = tmp_path / "log"
    statuses = POOL.run(1, quickstart, [*options, *places], log=log)
    printed = log.read_text()
    assert statuses == [0], printed
    table = dict(re.findall(r"^  (\S+) +(.+)$", printed, re.MULTILINE))
    assert table["top-1"].endswith("of 360 held-out images"), printed
    assert table["report"] == str(runs / "run-1" / "report" / "index.html") and Path(table["report"]).is_file()
    # This run has finished, so a second call begins another, on the dataset that is there already.
    assert tool("quickstart").next_run(runs) == runs / "run-2"
    assert data.main("convert", ["digits", "--out", str(dataset)]) == 0
