"""The report of real runs, and what it says bounds a run."""

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
from dali_train.report.runs import ReportedRun, differences, load_run
from dali_train.text import duration, plural, printable
from dali_train.training.events import STEP_PHASES, best_evaluation

from .conftest import REPOSITORY, TINY_CONFIG, run_in_pool
from .helpers import write_run

MEASURING = """
from dataclasses import replace
from dali_train.hooks import Hook

class BiasNorm(Hook):
    def start(self, record):
        self.bias = record.model.head.bias

    def measure(self):
        return {"head_bias_norm": self.bias.norm().item()}

config = replace(config, hooks=replace(config.hooks, user=(BiasNorm,)))
"""


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One run with a hook that measures; one with EMA, resumed on two ranks."""
    place = tmp_path_factory.mktemp("runs")
    config = place / "config.py"
    config.write_text(TINY_CONFIG.format(root=str(dataset)) + MEASURING)

    def train(name: str, *words: str, ranks: int = 1) -> None:
        arguments = ["train", "--config", str(config), "--run.dir", str(place / name), *words]
        run_in_pool(arguments, place / f"{name}.log", ranks=ranks)

    train("plain")
    faster = ("--optimizer.lr", "0.02", "--run.published_top1", "0.727", "--ema.decay", "0.9")
    train("faster", *faster, "--run.max_steps", "4")
    train("faster", *faster, ranks=2)
    return [place / "plain", place / "faster"]


def test_report_of_runs(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs[0])]) == 0
    assert capsys.readouterr().out.strip() == str(runs[0] / "report" / "index.html")
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "both")]) == 0
    expected = "accuracy classes confusion gradient-norm learning-rate loss measured memory step-time throughput time"
    for directory in (runs[0] / "report", tmp_path / "both"):
        page = (directory / "index.html").read_text()
        assert not re.search(r'(src|href)="(?!data:image/png;base64,)', page), "something is fetched"
        assert "<script" not in page
        assert sorted(path.stem for path in directory.glob("*.png")) == sorted([*expected.split(), "trust-ratio"])
        for path in directory.glob("*.png"):
            with Image.open(path) as picture:
                shown = np.asarray(picture.convert("L")).std()
                assert picture.width > 600 and shown > 10, f"{path.stem} shows nothing"
    page = (tmp_path / "both" / "index.html").read_text()
    assert "<tr><th>optimizer.lr</th><td>0.01</td><td>0.02</td></tr>" in page
    assert "Settings that differ" in page and "Wrong answers: plain" in page and "Measured by hooks" in page
    assert "(started 2 times, the last)" in page


def test_one_best_accuracy(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Console, status, checkpoint, epoch_accuracies.json and report give the same one, and say that it is the EMA's."""
    run = load_run(runs[1])
    best = best_evaluation(run.events)
    assert best is not None and best["ema_top1"] == max(event["ema_top1"] for event in run.evaluations)
    text = f"{best['ema_top1']:.2%}"
    log = (runs[1].parent / "faster.log").read_text()
    assert f"best top-1 of the EMA {text} at step {best['step']}: {runs[1]}/checkpoints/step-0" in log
    assert (runs[1] / "checkpoints" / "best").resolve().name == f"step-{best['step']:08d}"
    assert max(json.loads((runs[1] / "epoch_accuracies.json").read_text())) == best["ema_top1"]
    assert main(["status", str(runs[1])]) == 0 and f"best top-1 of the EMA {text}" in capsys.readouterr().out
    assert main(["report", str(runs[1])]) == 0
    page = (runs[1] / "report" / "index.html").read_text()
    assert f"{text} of the EMA of the weights" in page and f"(without EMA {best['top1']:.2%})" in page
    assert "published 72.70%" in page


def test_what_differs_and_what_is_resumed(runs: list[Path]) -> None:
    plain, faster = (load_run(path) for path in runs)
    assert dict(differences([plain, faster])) == {
        "optimizer.lr": [0.01, 0.02],
        "run.dir": [str(path) for path in runs],
        "run.published_top1": [None, 0.727],
        "ema.decay": [None, 0.9],
    }
    assert plain.resumed_at == [] and faster.resumed_at == [4 * 32 / 50]
    end = next(event for event in plain.events if event["event"] == "end")
    logged, whole = plain.phase_seconds(), end["seconds"]
    assert logged["forward_s"] == pytest.approx(whole["forward"], rel=1e-6)
    assert logged["data_wait_s"] == pytest.approx(whole["data"], rel=1e-6)


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert re.search(rf"{tmp_path} is not a run directory: .*name the run.dir", capsys.readouterr().err)
    run = write_run(tmp_path / "run", 0)
    (run / "metrics.jsonl").write_bytes(b"")
    assert main(["report", str(run)]) == 2
    assert "has no line yet" in capsys.readouterr().err
    assert main(["report", str(run), "--run.dir", "x"]) == 2
    assert "--run.dir x: report takes a run" in capsys.readouterr().err


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
        ({}, {"forward_s": 0.3, "exchange_s": 0.3, "data_wait_s": 0.05}, "The all-reduce of gradients takes 46%"),
        ({}, {"forward_s": 0.3, "optimizer_s": 0.3}, "The optimizer takes 50% of the step"),
        ({}, {"forward_s": 0.9, "logging_s": 0.1}, "Logging takes 10% of the step: raise hooks.log_every_steps"),
        ({}, {"forward_s": 0.3, "backward_s": 0.6, "data_wait_s": 0.1 - 1e-9}, "Computing bounds the run: forward and"),
    ],
)
def test_what_bounds_a_run(
    tmp_path: Path, environment: dict[str, Any], phases: dict[str, float], sentence: str
) -> None:
    times = dict.fromkeys(STEP_PHASES.values(), 0.0) | phases
    event = {"event": "train", "step": 10, "epoch": 1.0, "step_s": sum(times.values()), "loss": 1.0, **times}
    sizes = ("data.train_size", "data.eval_size", "data.eval_resize_to")
    for size in (224, 32):
        changes = dict.fromkeys(sizes, size)
        run = ReportedRun(write_run(tmp_path / str(size), environment=environment, events=[event], changes=changes))
        if size == 224:
            assert what_bounds(run).startswith(sentence)
        else:  # images of 32 pixels cannot be stored smaller
            assert "smaller" not in what_bounds(run)


def test_picture_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    config = str(REPOSITORY / "configs" / "vit-b32.py")
    assert main(["plan", "--config", config, "--world_size", "4", "--picture", str(picture)]) == 0
    assert f"picture        {picture}" in capsys.readouterr().out
    with Image.open(picture) as image:
        assert image.width > 900 and np.asarray(image.convert("L")).std() > 10


def test_the_state_of_a_run(tmp_path: Path) -> None:
    """Under way with half a line at the end; stopped, in a directory that a formula would stumble over; finished."""
    states = {end: write_run(tmp_path / f"$\\frac {end}", 11, ended_at=end) for end in (None, 11, 50)}
    with (states[None] / "metrics.jsonl").open("a") as file:
        file.write('{"event": "tra')
    assert [load_run(run).state for run in states.values()] == ["running, or killed", "stopped", "finished"]
    pages = {}
    for end, run in states.items():
        assert main(["report", str(run)]) == 0
        pages[end] = (run / "report" / "index.html").read_text()
    assert "no evaluation yet" in pages[None] and "running, or killed" in pages[None]
    assert "stopped at epoch 1.10" in pages[11] and "(step 11)" in pages[11]
    assert "2.22 s per step" in pages[11] and "3 s, after 2 s to build" in pages[11]


def test_nothing_in_a_page_is_markup_of_its_own(tmp_path: Path) -> None:
    """Quotes and tags in every column, and in the names of a run, a setting and a measurement."""
    bad = """"'><script>alert(1)</script>"""
    run = write_run(tmp_path / "run <script>", 2, ended_at=2, extra={bad: 1.0}, changes={"data.root": bad})
    tables = run / "predictions" / "step-00000001"
    tables.mkdir(parents=True)
    quoted = '"' + bad.replace('"', '""') + '"'
    (tables / "predictions.csv").write_text(f"image,truth,guess,score,score of truth\n3,{quoted},other,0.5,0.1\n")
    (tables / "classes.csv").write_text(f"class,images,accuracy\n{quoted},4,0.5\n")
    (tables / "confusion.csv").write_text(f"truth,{quoted}\n{quoted},4\n")
    (tables / "confused_pairs.csv").write_text(f"truth,guess,images\n{quoted},{quoted},4\n")
    (run / "environment.json").write_text('{"device": "<script>"}')
    assert main(["report", str(run)]) == 0
    page = (run / "report" / "index.html").read_text()
    assert "<script" not in page and "<b>&quot;" in page and "taken for &quot;" in page
    assert not re.search(r"<img[^>]*'", page)


def test_pictures_of_a_single_point_and_of_many_runs(tmp_path: Path) -> None:
    """A point is seen, and the legend of five runs lies below the curves, so that the picture is higher."""
    long = "of-a-name-that-is-far-too-long-for-a-legend"
    one = draw_all([load_run(write_run(tmp_path / "alone", 1))])
    five = draw_all([load_run(write_run(tmp_path / f"{number}-{long}", 30)) for number in range(5)])
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
