"""Hooks observe: the user's own, failing ones, and what the standard ones leave in the run directory."""

import csv
import dataclasses
import gzip
import json
import logging
import os
import pty
import re
import shutil
import sys
import termios
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from dali_train.checkpoint.run_directory import checkpoint_paths
from dali_train.cli import main
from dali_train.config import Config, load_config
from dali_train.data.dataset.manifest import Manifest
from dali_train.data.progress import Progress
from dali_train.errors import ConfigError
from dali_train.extras.indexing.foreign_shards import build_index
from dali_train.hooks import Hook, RunPlan
from dali_train.hooks.console import Console, RunLogs, fitting
from dali_train.hooks.hook_list import HookList, make_hooks
from dali_train.hooks.jsonl import JsonLines
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import LaunchOptions, discover
from dali_train.runtime.status import describe, goodput, read_events
from dali_train.training.cost import measure_largest_product
from dali_train.training.model import build_model
from tests.conftest import (
    REPOSITORY,
    TINY_CONFIG,
    StartTraining,
    Train,
    final_weights,
    photograph,
    relative_differences,
    run_in_pool,
    write_shard,
)
from tests.helpers import events, extended, words

OWN_HOOKS = """
import logging
import warnings

class BiasNorm(Hook):
    def start(self, record):
        self.bias, self.rank = record.model.head.bias, record.launch.rank
        self.file = (record.directory / f"own.rank{self.rank}.txt").open("w")

    def measure(self):
        return {"head_bias_norm": self.bias.norm()}  # requires a gradient

    def step(self, record):
        self.file.write(f"{record.step} {[batch.k for batch in record.micro_batches]}\\n")
        try:
            record.step = 0
        except AttributeError as error:  # frozen
            assert "cannot assign to field" in str(error)

    def end(self, record):
        self.file.close()

class Broken(Hook):
    def step(self, record):
        if record.step >= 3:
            raise ZeroDivisionError("a user's mistake")

class TakenNames(Hook):
    def measure(self):
        return {"loss": -1.0, "epoch": 9.0, "own": 3.0}

class Vector(Hook):
    def measure(self):
        return {"both": [1.0, 2.0]}

class Nothing(Hook):
    def measure(self):
        pass

class Warning(Hook):
    def step(self, record):
        logging.getLogger("dali_train").warning("disk %d of this node is slow", record.step)
        warnings.warn("something old is used", UserWarning)
"""

HALVING_HOOK = """
import torch

class Halving(Hook):
    def start(self, record):
        self.model = record.model

    @torch.no_grad()
    def step(self, record):
        if record.step >= 2:
            for parameter in self.model.parameters():
                parameter.mul_(0.5)
"""

REMOVING_HOOK = """
import shutil

class Remove(Hook):
    def start(self, record):
        self.directory = record.directory

    def step(self, record):
        if record.step == 3:  # all but the lock, without which the run would end itself
            for path in self.directory.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "run.lock":
                    path.unlink()
"""


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@dataclasses.dataclass
class Shared:
    """A run that several tests read, and its output."""

    directory: Path
    printed: str

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events(self.directory, kind)


@pytest.fixture(scope="module")
def folder(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "config.py").write_text(TINY_CONFIG.format(root=str(dataset)))
    return folder


def started(config: Path, name: str, *words: str, ranks: int = 1, status: int = 0) -> Shared:
    """Train in the folder of `config`, with 4 micro-batches a step and the tables of ten images."""
    directory = config.parent / name
    arguments = ["train", "--config", str(config), "--run.dir", str(directory), "--batch.micro_batch", "8"]
    arguments += ["--hooks.predictions", "10", *words]
    return Shared(directory, run_in_pool(arguments, config.parent / f"{name}.log", ranks=ranks, status=status))


@pytest.fixture(scope="module")
def users(folder: Path) -> Shared:
    """Two ranks with hooks of the user's own."""
    return started(extended(folder / "config.py", OWN_HOOKS), "users", ranks=2)


FOREIGN = [
    '{"note": "looks good"}',
    '{"event": "train", "step": "4", "epoch": 1}',
    '{"event": "eval", "step": 2, "epoch": 1.0}',
    '{"event": ["train"], "step": null, "epoch": 0}',
    '{"event": "end", "step": 7, "epoch": 1, "seconds": 5, "error": null}',
]


@pytest.fixture(scope="module")
def everything(folder: Path) -> Shared:
    """One rank with all hooks on at every step, in three starts; lines of others come into its metrics meanwhile."""
    words = ("--hooks.trackers", "tensorboard", "--hooks.profile")
    config = folder / "config.py"
    started(config, "all", *words, "2", "3", "--run.max_seconds", "0.001", status=75)
    started(config, "all", *words, "2", "3", "--run.max_steps", "4")
    path = folder / "all" / "metrics.jsonl"
    lines = "".join(f"{line}\n" for line in [*FOREIGN, "[1]", "torn {"]).encode() + b"\xff\xfe\n"
    path.write_bytes(path.read_bytes() + lines)
    return started(config, "all", *words, "6", "9")


def test_a_hook_in_the_users_config(users: Shared) -> None:
    for rank in range(2):
        lines = (users.directory / f"own.rank{rank}.txt").read_text().splitlines()
        assert lines == [f"{step} {[rank, rank + 2]}" for step in range(1, 8)]
    norms = [line["head_bias_norm"] for line in users.events("train")]
    assert len(set(norms)) == 7
    assert norms[-1] == pytest.approx(final_weights(users.directory)["head.bias"].norm().item())
    names = json.loads((users.directory / "config.json").read_text())["hooks"]["user"]
    assert names == ["BiasNorm", "Broken", "TakenNames", "Vector", "Nothing", "Warning"]
    assert "requires_grad" not in users.printed and "weights changed" not in users.printed


def test_a_broken_hook_does_not_end_the_run(users: Shared) -> None:
    failed = "hook Broken failed at step 3: ZeroDivisionError: a user's mistake. Training continues"
    assert users.printed.count(failed) == 1 and "hook Broken failed 5 times in all" in users.printed
    assert users.events("end")[0]["step"] == 7
    assert 'raise ZeroDivisionError("a user' in (users.directory / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize(("ranks", "layout"), [(1, ()), (2, ("--parallel.shard", "full"))])
def test_a_change_of_weights_is_noticed(folder: Path, ranks: int, layout: tuple[str, ...]) -> None:
    config = extended(
        folder / "config.py", HALVING_HOOK + "config = replace(config, hooks=HooksConfig(user=(Halving,)))"
    )
    run = started(config, f"halving-{ranks}", *layout, "--run.max_steps", "3", ranks=ranks)
    assert run.printed.count("weights changed after step 2 while hooks were called; hooks.user has Halving.") == 1


def test_a_hook_cannot_replace_what_the_run_records(users: Shared) -> None:
    assert re.search(r"hook TakenNames failed at measure: .* returns epoch, loss, which the run records", users.printed)
    assert re.search(
        r"hook Vector failed at measure: .* returns both = \[1\.0, 2\.0\]: return one number", users.printed
    )
    assert "hook Nothing failed at measure: ValueError: measure() returns None: return numbers by name" in users.printed
    assert all(line["loss"] > 0 and line["epoch"] < 9 and "own" not in line for line in users.events("train"))


def test_hooks_change_nothing(folder: Path, everything: Shared) -> None:
    """All of them on, at every step, against as few as there can be: the same bits."""
    few = started(folder / "config.py", "few", "--hooks.log_every_steps", "100", "--hooks.predictions", "0")
    differences = relative_differences(final_weights(few.directory), final_weights(everything.directory))
    assert max(differences.values()) == 0
    assert not (few.directory / "predictions").exists()


def test_all_hooks_in_several_starts(everything: Shared) -> None:
    """They go on in the same files, and lines of others stay and are ignored."""
    directory, printed = everything.directory, everything.printed
    assert re.search(r"^stopped at step 1/7", printed, re.MULTILINE) and " failed at " not in printed
    assert [line["step"] for line in everything.events("train")] == list(range(1, 8))
    starts = everything.events("start")
    assert [(line["step"], line["ranks"], line.get("lost_steps")) for line in starts] == [
        (0, 1, None),
        (1, 1, 0),
        (4, 1, 0),
    ]
    found = goodput(read_events(directory / "metrics.jsonl"))
    assert found is not None and 0 < found.share < 1 and (found.restarts, found.lost_steps) == (2, 0)
    away_s = sum(line.get("away_s", 0.0) for line in starts)
    assert found.away_s == away_s > 0 and found.describe() in describe(directory)
    kept = (directory / "metrics.jsonl").read_text().splitlines()
    assert [line in kept for line in FOREIGN] == [True, True, True, True, False]  # the last is of a step to come
    assert len(everything.events("end")) == 3
    layers = [json.loads(line) for line in (directory / "lamb.jsonl").read_text().splitlines()]
    assert [line["step"] for line in layers] == [1]
    assert set(layers[0]["layers"]) == set(final_weights(directory))
    log = (directory / "logs" / "rank0.log").read_text()
    assert "step 1/4 " in log or "step 2/4 " in log
    assert "resuming from step 4" in log and "step 7/7 " in log

    trace = json.loads(gzip.decompress((directory / "profile" / "steps-2-3.rank0.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert {"phase: data", "phase: forward", "phase: backward", "phase: optimizer", "data: wait for DALI"} <= set(names)
    assert names.count("phase: forward") == 2 * 4
    assert "hooks.profile is 6 9, but the run ends after step 7: the trace ends there too" in printed
    with Image.open(directory / "samples.png") as picture:
        assert np.asarray(picture).std() > 20, "the picture shows nothing"
    line = everything.events("train")[0]
    assert line["process_memory_gb"] > 0.1 and line["host_memory_gb"] > 0.1 and line["disk_read_mb_per_s"] >= 0


def test_the_last_line_names_the_best_checkpoint(everything: Shared) -> None:
    """Also where it is one of an earlier start. Of equally good ones it is the latest."""
    best = max(everything.events("eval"), key=lambda event: (event["top1"], event["step"]))
    checkpoint = everything.directory / "checkpoints" / f"step-{best['step']:08d}"
    *_, last, train, evaluation = everything.printed.splitlines()
    assert last == f"best top-1 {best['top1']:.2%} at step {best['step']}: {checkpoint}"
    for kind, line in (("train", train), ("eval", evaluation)):  # of `FOREIGN`, named by the report
        assert re.search(rf"metrics.jsonl, line \d+: a field of event '{kind}' is missing or wrong", line)


def test_console_and_logs_of_two_ranks(users: Shared) -> None:
    printed = users.printed
    assert not {"\r", "\x1b"} & set(printed), "control characters have no folder in a log"
    assert printed.count("step 4/7  epoch 2.56  loss ") == 1, "rank 0 alone has the terminal"
    time = r"(?:[\d.]+ m?s|\d+ min(?: \d+ s)?)"  # minutes on a busy machine
    assert len(re.findall(rf"^step 1/7 took {time}, .* at most {time} per epoch", printed, re.MULTILINE)) == 1
    assert re.findall(rf"^step (\d).*  an epoch in {time}  left", printed, re.MULTILINE) == ["2"]
    for epoch in range(1, 5):
        assert printed.count(f"epoch {epoch}: train loss ") == 1
    assert printed.count("  top-1 ") == 4 and printed.count("evaluation loss ") == 4
    assert printed.count("this node is slow") == 1 and printed.count("something old is used") == 1
    for rank in range(2):
        log = (users.directory / "logs" / f"rank{rank}.log").read_text()
        assert log.count(f"rank {rank} WARNING disk ") == 7 and "step 7/7" in log


def test_a_full_disk_is_reported_once(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    for name in ("metrics.jsonl", "logs/rank0.log", "samples.rank0.jsonl"):
        (run / name).symlink_to("/dev/full")
    printed = train("run", "--run.max_steps", "2")
    assert (
        "hook MetricsFile failed at start: [Errno 28] No space left on device. Training continues; free some space for "
        f"{run}" in printed
    )
    assert printed.count(f"{run}/logs/rank0.log cannot be written") == 1
    assert printed.count("hook SampleTrace failed at step 1: [Errno 28]") == 1
    assert "--- Logging error ---" not in printed
    assert final_weights(run)


def test_files_removed_from_the_run_directory_are_reported(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    printed = train("run", "--run.max_steps", "4", config=extended(tiny_config, REMOVING_HOOK))
    gone = "is gone: was .* deleted or moved during the run\\? What was recorded there is lost; a new file is started"
    for name in ("metrics.jsonl", "samples.rank0.jsonl"):
        assert len(re.findall(f"warning: {tmp_path}/run/{name} {gone}", printed)) == 1
    assert [event["step"] for event in events(tmp_path / "run", "train")] == [4]


@pytest.mark.parametrize(("ranks", "words"), [(1, ()), (2, ("--parallel.pipeline", "2"))])
def test_the_sample_trace_has_each_micro_batch_once(
    users: Shared, folder: Path, ranks: int, words: tuple[str, ...]
) -> None:
    """After a kill of two ranks beyond the newest checkpoint, on one rank or on two that share their micro-batches: the
    second one's file is trimmed too."""
    name = f"killed-{ranks}"
    shutil.copytree(users.directory, folder / name, symlinks=True)
    shutil.rmtree(folder / name / "checkpoints" / "step-00000007")
    started(folder / "config.py", name, *words, ranks=ranks)
    lines = [json.loads(line) for path in (folder / name).glob("samples.rank*.jsonl") for line in path.open()]
    assert sorted((line["step"], line["k"]) for line in lines) == [(step, k) for step in range(7) for k in range(4)]


def test_a_line_after_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    file = JsonLines(path, last_step=1)
    file.write({"step": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]


def test_predictions_are_those_of_the_evaluation(users: Shared) -> None:
    """Of two ranks, in the order of the split."""
    evaluations = users.events("eval")
    directories = sorted((users.directory / "predictions").glob("step-*"))
    assert len(directories) == len(evaluations) == 4
    for directory, evaluation in zip(directories, evaluations, strict=True):
        names = [row["truth"] for row in rows(directory / "confusion.csv")]
        confusion = np.array([[int(row[name]) for name in names] for row in rows(directory / "confusion.csv")])
        assert confusion.shape == (5, 5)
        assert confusion.sum() == 13
        assert confusion.trace() / 13 == pytest.approx(evaluation["top1"])
        accuracies = rows(directory / "classes.csv")
        assert [int(row["images"]) for row in accuracies] == confusion.sum(axis=1).tolist()
        assert float(accuracies[2]["accuracy"]) == pytest.approx(confusion[2, 2] / confusion[2].sum())
        table = rows(directory / "predictions.csv")
        assert [row["image"] for row in table] == [row["image"] for row in rows(directories[0] / "predictions.csv")]
        assert len(table) == 10
        for row in table:
            scores = [float(row[f"score {name}"]) for name in names]
            assert sum(scores) == pytest.approx(1, abs=1e-4)
            assert names[scores.index(max(scores))] == row["prediction"]
            assert row["truth"] == names[int(row["image"]) % 5]
            assert (users.directory / "predictions" / "images" / f"{row['image']}.png").exists()


@pytest.mark.thorough
def test_tables_last_as_long_as_their_checkpoints(train: Train, tmp_path: Path) -> None:
    """And what a kill left in the run directory is removed at the next start."""
    one = ("--run.keep_checkpoints", "1", "--run.epochs", "8", "--hooks.predictions", "3")
    train("run", *one)
    run = tmp_path / "run"
    kept = {path.name for path in checkpoint_paths(run / "checkpoints")}
    tables = {path.name for path in (run / "predictions").glob("step-*")}
    assert kept <= tables and len(tables) <= 3 < len(events(run, "eval"))
    names = (
        f"checkpoints/{max(kept)}/.evaluation.json.123.partial",
        "report/.index.html.123.partial",
        ".status.json.9.partial",
    )
    for name in names:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("{")
    (run / "report" / ".mine.partial").touch()
    train("run", *one)
    assert [path.name for path in run.rglob("*.partial")] == [".mine.partial"]


def test_predictions_of_a_raw_dataset(train: Train, tmp_path: Path) -> None:
    """Bare pixels, the default hooks, class names that a formula, a terminal or a CSV file could stumble over."""
    root = tmp_path / "raw"
    names = ["$\\frac", "evil\x1b[31m\nname", "собака, crème brûlée and more words than a label has room for"]
    for split, count in (("train", 32), ("validation", 9)):
        images = [np.asarray(photograph(number, 40, 40)) for number in range(count)]
        features = {
            "image/format": "RAW",
            "image/height": 40,
            "image/width": 40,
            "image/filename": "a/собака\x1b[31m.png",
        }
        records = [(image.tobytes(), 1 + number % 3) for number, image in enumerate(images)]
        write_shard(root / split / f"{split}-00000-of-00001", records, **features)
    build_index(root)
    manifest = dataclasses.replace(Manifest.read(root), class_names=tuple(names))
    manifest.write(root)
    printed = train("run", "--data.root", str(root), "--run.max_steps", "1")
    assert "warning: hook" not in printed
    directory = tmp_path / "run" / "predictions"
    assert [row["class"] for row in rows(directory / "step-00000001" / "classes.csv")] == names
    shown = rows(directory / "step-00000001" / "predictions.csv")
    assert {row["file"] for row in shown} == {"a/собака.png"}
    with Image.open(directory / "images" / "8.png") as picture:
        assert np.array_equal(np.asarray(picture), np.asarray(photograph(8, 40, 40)))
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "собака" in page and "evil name" in page and "\x1b" not in page
    wrong = [row for row in shown if row["truth"] != row["prediction"]]
    assert page.count("<small>a/собака.png</small>") == len(wrong) > 0


def test_the_progress_bar_is_not_truncated(start_training: StartTraining, tmp_path: Path) -> None:
    """On a real terminal of 70 columns: time left comes first, and what does not fit is left out as a piece."""
    parts = [
        r"left [\d.]+ \w+( [\d.]+ \w+)?",
        "evaluation|checkpoint",
        r"step \d+/7",
        r"epoch \d\.\d\d",
        r"loss \d+\.\d{4}",
        r"lr [\d.e-]+",
        r"[\d,]+ images/s",
        r"data wait \d+%",
    ]
    part = "|".join(f"({one})" for one in parts)
    whole = re.compile(rf" *\d+ % \|.{{12}}\|( ({part})(  ({part})){{2,}})?")
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 70))
    (tmp_path / "run.log").symlink_to(os.ttyname(terminal))
    shown: list[bytes] = []
    thread = threading.Thread(target=_read_terminal, args=(reader, shown))
    thread.start()
    ranks = start_training("run", *words("--batch.micro_batch 16 --run.eval_every_epochs none"))
    assert ranks.wait() == [0]
    os.close(terminal)
    thread.join()
    os.close(reader)
    pieces = re.split(r"[\r\n]|\x1b\[A", b"".join(shown).decode())  # the last one goes back to the line above
    bars = [text for text in pieces if "% |" in text]
    assert len(bars) >= 7
    for bar in bars:
        drawn = whole.match(bar)
        assert drawn is not None and len(drawn[0].strip()) <= 70, bar
        # tqdm truncates at the terminal's width: behind a longer line is what another library wrote.
        assert not bar[drawn.end() :].strip() or len(bar.strip()) > 70, bar
    assert fitting(["left 3 s", "step 1/7", "loss 1"], 100) == "left 3 s  step 1/7  loss 1"


def test_a_terminal_without_a_size_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `docker run -t`, where tqdm would print nothing; and nothing is shown of what is over soon."""
    reader, terminal = pty.openpty()
    assert termios.tcgetwinsize(terminal) == (0, 0)
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Progress("listing", total=None, unit="images", delay_s=3600) as progress:
            progress.update(5)
        with Progress("verifying", total=10, unit="images") as progress:
            progress.update(10)
        with Progress("indexing", total=2_000_000, unit="images") as progress:
            time.sleep(0.2)
            progress.update(1_000_000)  # of an earlier start
            time.sleep(0.2)
            progress.update(1)
        monkeypatch.undo()
    pieces: list[bytes] = []
    _read_terminal(reader, pieces)
    shown = b"".join(pieces).decode()
    os.close(reader)
    assert "verifying: 100%" in shown and "10/10" in shown
    assert "listing" not in shown and shown.count("1000001/2000000") == 2  # at once, and at the end


def _read_terminal(reader: int, shown: list[bytes]) -> None:
    while True:
        try:
            data = os.read(reader, 65536)
        except OSError:  # EIO: nobody has the terminal open any more
            return
        shown.append(data)


def test_the_header_comes_before_the_model_is_built(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    changes = {"model.compile": "model", "precision.dtype": "fp16", "run.dir": str(tmp_path), "mixup.alpha": 0.0}
    sizes = {"batch.global_batch": 1, "batch.micro_batch": 1}
    config = load_config(REPOSITORY / "configs" / "digits.py").replace({**changes, **sizes})
    launch = cast(Any, SimpleNamespace(rank=0, world_size=1, launcher="none"))
    facts = {"config": config, "directory": tmp_path, "launch": launch, "device": torch.device("cpu")}
    plan = cast(RunPlan, SimpleNamespace(**facts, num_images=1, num_classes=1, total_steps=1))
    with caplog.at_level(logging.INFO, "dali_train"):
        HookList([Console()]).announce(plan)
    assert "1 image, 1 class" in caplog.text and "1 = 1 image x 1 accumulated x 1 rank" in caplog.text
    product = measure_largest_product(config, build_model(config, 1, torch.device("meta")))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == product.emulates("fp16")
    assert all(re.search(r"is fp16, .* [\d.]+ times as long .* Set precision.dtype (fp32|bf16)$", w) for w in warnings)
    assert caplog.messages[-1] == "waiting for the model to be built and compiled, which can take minutes"


def test_lines_that_nobody_can_read_are_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A full disk behind the standard output, or a reader who left as in `| head`: one warning, and the run goes on."""
    launch = cast(Any, SimpleNamespace(rank=0))
    logs = RunLogs()
    with suppress(OSError), Path("/dev/full").open("w") as full:  # which cannot be closed without an error either
        monkeypatch.setattr("sys.stdout", full)
        logs.announce(cast(RunPlan, SimpleNamespace(directory=tmp_path, launch=launch)))
        for step in range(3):
            logging.getLogger("dali_train").info("step %d", step)
        logs.end(cast(Any, SimpleNamespace(error=None)))
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert [f"INFO step {step}\n" in log for step in range(3)] == [True] * 3
    (warning,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in warning and f"{tmp_path}/logs/rank0.log" in warning


class Needy(Hook):
    def __init__(self, path: str) -> None:
        self.path = path


class Broken(Hook):
    def __init__(self) -> None:
        raise ZeroDivisionError("inside the hook")


def test_what_is_no_hook_is_named(config: Config) -> None:
    """But an error of the user's own code keeps its traceback."""
    layout = Layout.from_config(discover(LaunchOptions(), {}), config.parallel)
    for make, error, message in (
        (Needy, ConfigError, r"hooks.user: Needy cannot be called without arguments \(.*'path'\): name a function"),
        (dict, ConfigError, r"hooks.user: dict makes dict, which is not a hook: use a subclass of dali_train.Hook"),
        (Broken, ZeroDivisionError, "inside the hook"),
    ):
        with pytest.raises(error, match=message):
            make_hooks(replace(config.hooks, user=(make,)), layout)
