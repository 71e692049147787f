"""The report of real runs, and what it says bounds a run."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dali_train.cli import main
from dali_train.report.bound import what_bounds
from dali_train.report.runs import Run, differences, load_run

from .conftest import REPOSITORY, Train


@pytest.fixture
def runs(train: Train, tmp_path: Path) -> list[Path]:
    train("plain")
    train("faster", "--optimizer.lr", "0.02", "--run.published_top1", "0.727", "--run.max_steps", "4")
    train("faster", "--optimizer.lr", "0.02", "--run.published_top1", "0.727", ranks=2)
    return [tmp_path / "plain", tmp_path / "faster"]


def test_report_of_runs(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs[0])]) == 0
    assert capsys.readouterr().out.strip() == str(runs[0] / "report" / "index.html")
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "both")]) == 0
    for directory in (runs[0] / "report", tmp_path / "both"):
        page = (directory / "index.html").read_text()
        assert not re.search(r'(src|href)="(?!data:image/png;base64,)', page), "something is fetched"
        assert "<script" not in page
        pictures = sorted(path.stem for path in directory.glob("*.png"))
        assert pictures == sorted(
            ["accuracy", "loss", "throughput", "step-time", "time", "learning-rate", "gradient-norm", "trust-ratio", "memory",
             "confusion", "classes"]
        )  # fmt: skip
        for name in pictures:
            with Image.open(directory / f"{name}.png") as picture:
                assert picture.width > 600 and np.asarray(picture.convert("L")).std() > 10, f"{name} shows nothing"
    page = (tmp_path / "both" / "index.html").read_text()
    best = max(event["top1"] for event in load_run(runs[1]).evaluations)
    assert f"{best:.2%}" in page and "published 72.70%" in page
    assert "<tr><th>optimizer.lr</th><td>0.01</td><td>0.02</td></tr>" in page
    assert "Settings that differ" in page and "Wrong answers: plain" in page
    assert "(started 2 times, the last)" in page


def test_what_differs_and_what_is_resumed(runs: list[Path]) -> None:
    plain, faster = (load_run(path) for path in runs)
    assert dict(differences([plain, faster])) == {
        "optimizer.lr": [0.01, 0.02],
        "run.dir": [str(path) for path in runs],
        "run.published_top1": [None, 0.727],
    }
    assert plain.resumed_at == [] and faster.resumed_at == [4 * 32 / 50]
    end = next(event for event in plain.events if event["event"] == "end")
    logged, whole = plain.phase_seconds(), end["seconds"]
    assert logged["forward_s"] == pytest.approx(whole["forward"], rel=1e-6)
    assert logged["data_wait_s"] == pytest.approx(whole["data"], rel=1e-6)


def test_a_run_that_is_under_way(runs: list[Path], tmp_path: Path) -> None:
    """Half a line at the end, no evaluation yet, no other file."""
    lines = (runs[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
    early = tmp_path / "early"
    early.mkdir()
    (early / "metrics.jsonl").write_text("".join(lines[:2]) + '{"event": "tra')
    assert main(["report", str(early)]) == 0
    page = (early / "report" / "index.html").read_text()
    assert "no evaluation yet" in page and "running, or killed" in page


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} has no metrics.jsonl: name the run.dir of a run that has started" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    assert main(["report", str(tmp_path)]) == 2
    assert "has no line yet" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--run.dir", "x"]) == 2
    assert "--run.dir x: report knows only --output" in capsys.readouterr().err


def made_up(environment: dict[str, Any], **phases: float) -> Run:
    times = dict.fromkeys(("data_wait_s", "forward_s", "backward_s", "exchange_s", "optimizer_s", "logging_s"), 0.0) | phases
    event = {"event": "train", "step": 10, "epoch": 1.0, "step_s": sum(times.values()), **times}
    return Run(directory=Path("made-up"), config={}, environment=environment, events=(event,), lamb=())


@pytest.mark.parametrize(
    ("environment", "phases", "sentence"),
    [
        (
            {"decoding_threads": 2, "host_cores": 16},
            {"data_wait_s": 0.38, "forward_s": 0.2, "backward_s": 0.42},
            "Waiting for data takes 38% of the step: 2 decoding threads on 16 cores; raise data.num_threads to 16, or store the "
            "images smaller (tools/make_tfrecords.py).",
        ),
        (
            {"decoding_threads": 4, "host_cores": 16, "ranks_on_host": 4},
            {"data_wait_s": 0.5, "forward_s": 0.5},
            "Waiting for data takes 50% of the step: 4 decoding threads a rank on 16 cores, all in use; store the images smaller "
            "(tools/make_tfrecords.py), or give each rank more cores.",
        ),
        ({}, {"forward_s": 0.3, "exchange_s": 0.3, "data_wait_s": 0.05}, "The exchange of gradients takes 46% of the step"),
        ({}, {"forward_s": 0.3, "optimizer_s": 0.3}, "The optimizer takes 50% of the step"),
        ({}, {"forward_s": 0.9, "logging_s": 0.1}, "Logging takes 10% of the step: raise hooks.log_every_steps"),
        ({}, {"forward_s": 0.3, "backward_s": 0.6, "data_wait_s": 0.1 - 1e-9}, "Computing bounds the run: forward and"),
    ],
)  # fmt: skip
def test_what_bounds_a_run(environment: dict[str, Any], phases: dict[str, float], sentence: str) -> None:
    assert what_bounds(made_up(environment, **phases)).startswith(sentence)


def test_picture_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    config = str(REPOSITORY / "configs" / "vit-b32.py")
    assert main(["plan", "--config", config, "--world_size", "4", "--picture", str(picture)]) == 0
    assert f"picture        {picture}" in capsys.readouterr().out
    with Image.open(picture) as image:
        assert image.width > 900 and np.asarray(image.convert("L")).std() > 10


def test_without_matplotlib(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "dali_train.report.figures", raising=False)
    assert main(["report", str(runs[0])]) == 2
    assert "pip install 'dali-train[report]'" in capsys.readouterr().err
    config = str(REPOSITORY / "configs" / "vit-b32.py")
    assert main(["plan", "--config", config, "--picture", str(tmp_path / "p.png")]) == 2
    assert "pip install 'dali-train[report]'" in capsys.readouterr().err
