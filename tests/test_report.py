"""The report of real runs, and what it says bounds a run."""

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dali_train.cli import main
from dali_train.report.bound import what_bounds
from dali_train.report.figures import draw_all
from dali_train.report.runs import Run, differences, load_run
from dali_train.text import duration, plural, printable
from dali_train.training.events import STEP_PHASES

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
            [
                "accuracy",
                "loss",
                "throughput",
                "step-time",
                "time",
                "learning-rate",
                "gradient-norm",
                "trust-ratio",
                "memory",
                "confusion",
                "classes",
            ]
        )
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
    assert "--run.dir x: report takes only --output" in capsys.readouterr().err


def made_up(environment: dict[str, Any], **phases: float) -> Run:
    times = dict.fromkeys(STEP_PHASES.values(), 0.0) | phases
    event = {"event": "train", "step": 10, "epoch": 1.0, "step_s": sum(times.values()), **times}
    return Run(directory=Path("made-up"), config={}, environment=environment, events=(event,))


@pytest.mark.parametrize(
    ("environment", "phases", "sentence"),
    [
        (
            {"decoding_threads": 2, "host_cores": 16},
            {"data_wait_s": 0.38, "forward_s": 0.2, "backward_s": 0.42},
            "Waiting for data takes 38% of the step: 2 decoding threads on 16 cores; raise data.num_threads to 16, "
            "or store the images smaller (dali-train data convert).",
        ),
        (
            {"decoding_threads": 4, "host_cores": 16, "ranks_on_host": 4},
            {"data_wait_s": 0.5, "forward_s": 0.5},
            "Waiting for data takes 50% of the step: 4 decoding threads per rank on 16 cores, all in use; store the "
            "images smaller (dali-train data convert), or give each rank more cores.",
        ),
        (
            {},
            {"forward_s": 0.3, "exchange_s": 0.3, "data_wait_s": 0.05},
            "The exchange of gradients takes 46% of the step",
        ),
        ({}, {"forward_s": 0.3, "optimizer_s": 0.3}, "The optimizer takes 50% of the step"),
        ({}, {"forward_s": 0.9, "logging_s": 0.1}, "Logging takes 10% of the step: raise hooks.log_every_steps"),
        ({}, {"forward_s": 0.3, "backward_s": 0.6, "data_wait_s": 0.1 - 1e-9}, "Computing bounds the run: forward and"),
    ],
)
def test_what_bounds_a_run(environment: dict[str, Any], phases: dict[str, float], sentence: str) -> None:
    assert what_bounds(made_up(environment, **phases)).startswith(sentence)


def test_picture_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    config = str(REPOSITORY / "configs" / "vit-b32.py")
    assert main(["plan", "--config", config, "--world_size", "4", "--picture", str(picture)]) == 0
    assert f"picture        {picture}" in capsys.readouterr().out
    with Image.open(picture) as image:
        assert image.width > 900 and np.asarray(image.convert("L")).std() > 10


def test_advice_fits_the_images(tmp_path: Path) -> None:
    """Images of 32 pixels cannot be stored smaller."""
    run = made_up({"decoding_threads": 2, "host_cores": 2}, data_wait_s=0.5, forward_s=0.5)
    small = dataclasses.replace(run, config={"data": {"eval_size": 32}})
    assert "store the images smaller" in what_bounds(run) and "smaller" not in what_bounds(small)


def written(
    directory: Path, num_steps: int, *, step_s: float = 2.22, ended_at: int | None = None, classes: int = 0
) -> Path:
    """A run directory of made-up events."""
    directory.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"event": "start", "step": 0, "epoch": 0.0, "total_steps": 50, "startup_s": 2.0}]
    phases = dict.fromkeys(STEP_PHASES.values(), step_s / 6)
    for step in range(1, num_steps + 1):
        train = {
            "loss": 1.0,
            "lr": 0.1,
            "images_per_second": 9.0,
            "step_s": step_s,
            "grad_norm": 1.0,
            "loss_scale": 1.0,
            **phases,
        }
        lines.append(
            {
                "event": "train",
                "step": step,
                "epoch": step / 10,
                **train,
                **({"first_step_s": 3.0} if step == 1 else {}),
            }
        )
    if ended_at is not None:
        lines.append(
            {"event": "end", "step": ended_at, "epoch": ended_at / 10, "seconds": {"forward": 1.0}, "error": None}
        )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_the_state_of_a_run(tmp_path: Path) -> None:
    states = {
        ended_at: load_run(written(tmp_path / str(ended_at), 5, ended_at=ended_at)).state for ended_at in (None, 11, 50)
    }
    assert states == {None: "running, or killed", 11: "stopped", 50: "finished"}


def test_page_of_a_slow_run_that_was_stopped(tmp_path: Path) -> None:
    run = written(tmp_path / "$\\frac", 11, ended_at=11)
    assert main(["report", str(run)]) == 0
    page = (run / "report" / "index.html").read_text()
    assert "stopped at epoch 1.10" in page and "(step 11)" in page
    assert "2.22 s per step" in page and "3 s, after 2 s to build<" in page


def test_foreign_lines_are_not_in_the_report(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 3)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"event": "train", "step": 9}\n{"note": 1}\nnonsense\n\xff\n{"event": "eval", "step": 9, "epoch": "x"}\n'
        )
    assert [event["step"] for event in load_run(run).events] == [0, 1, 2, 3]
    assert main(["report", str(run)]) == 0


def test_pictures_of_a_single_point_and_of_many_runs(tmp_path: Path) -> None:
    """A point is seen, and the legend of five runs lies below the curves, so that the picture is higher."""
    alone = load_run(written(tmp_path / "alone", 1))
    many = [
        load_run(written(tmp_path / f"{number}-of-a-name-that-is-far-too-long-for-a-legend", 30)) for number in range(5)
    ]
    one, five = draw_all([alone]), draw_all(many)
    with Image.open(io.BytesIO(one["throughput"])) as picture, Image.open(io.BytesIO(five["throughput"])) as higher:
        blue = (np.asarray(picture.convert("RGB")) == (0, 0x72, 0xB2)).all(axis=2)
        assert blue.sum() > 20
        assert picture.width == higher.width and higher.height > picture.height + 100


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0853, "85.3 ms"),
        (0.9999, "1 s"),
        (2.222, "2.22 s"),
        (59.97, "1 min"),
        (185, "3 min 5 s"),
        (7199.9, "2 h"),
        (282_888, "78 h 35 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_text_is_safe_for_a_terminal() -> None:
    assert printable("a\nb\tc\x1b[31mred\x1b[0m\x1b]0;title\x07d\x08\u202e") == "a b cred" + "d\ufffd\ufffd"
    assert (
        printable("crème brûlée, собака, 猫", keep="\n") == "crème brûlée, собака, 猫"
        and printable("a\nb", keep="\n") == "a\nb"
    )
    assert [plural(count, "class") for count in (0, 1, 1000)] == ["0 classes", "1 class", "1,000 classes"]
