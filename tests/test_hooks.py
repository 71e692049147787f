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
import termios
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dali_train.cli import main
from dali_train.config import (
    BatchConfig,
    Config,
    DataConfig,
    HooksConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
)
from dali_train.data.dataset.build_index import build_index
from dali_train.data.dataset.manifest import Manifest
from dali_train.data.loading.pipelines import Batch
from dali_train.errors import ConfigError
from dali_train.hooks import RunEnd, RunPlan, RunStart, StepRecord, TrainRecord
from dali_train.hooks.class_names import class_names
from dali_train.hooks.console import Console
from dali_train.hooks.files import JsonLines
from dali_train.hooks.health import HISTORY, Health
from dali_train.hooks.lamb import LambView
from dali_train.hooks.observers import Observers
from dali_train.hooks.samples import sample_images, sheet
from dali_train.parallel.layout import Layout
from dali_train.training.events import read_events
from dali_train.training.optim import make_optimizer

from .conftest import StartTraining, Train, final_weights, photograph, relative_differences, write_shard

OWN_HOOK = """
from dataclasses import replace
from dali_train.hooks import Hook

class BiasNorm(Hook):
    def start(self, record):
        self.bias, self.rank = record.model.head.bias, record.launch.rank
        self.file = (record.directory / f"own.rank{self.rank}.txt").open("w")

    def measure(self):
        return {"head_bias_norm": self.bias.norm().item()}

    def step(self, record):
        self.file.write(f"{record.step} {[batch.k for batch in record.micro_batches]}\\n")
        try:
            record.step = 0
        except AttributeError as error:  # frozen
            assert "cannot assign to field" in str(error)

    def end(self, record):
        self.file.close()

config = replace(config, hooks=replace(config.hooks, user=(BiasNorm,)))
"""

BROKEN_HOOK = """
from dataclasses import replace
from dali_train.hooks import Hook

class Broken(Hook):
    required = {required}

    def step(self, record):
        if record.step >= 3:
            raise ZeroDivisionError("a user's mistake")

config = replace(config, hooks=replace(config.hooks, user=(Broken,)))
"""

TAKEN_NAMES_HOOK = """
from dataclasses import replace
from dali_train.hooks import Hook

class Loss(Hook):
    def measure(self):
        return {"loss": -1.0, "host_memory_gb": -1.0, "own": 3.0}

config = replace(config, hooks=replace(config.hooks, user=(Loss,)))
"""

WARNING_HOOK = """
import logging
import warnings
from dataclasses import replace
from dali_train.hooks import Hook

class Warning(Hook):
    def step(self, record):
        logging.getLogger("dali_train").warning("disk %d of this node is slow", record.step)
        warnings.warn("something old is used", UserWarning)

config = replace(config, hooks=replace(config.hooks, user=(Warning,)))
"""


REMOVING_HOOK = """
import shutil
from dataclasses import replace
from dali_train.hooks import Hook

class Remove(Hook):
    def start(self, record):
        self.directory = record.directory

    def step(self, record):
        if record.step == 3:
            shutil.rmtree(self.directory)

config = replace(config, hooks=replace(config.hooks, user=(Remove,)))
"""


def extended(config: Path, text: str) -> Path:
    path = config.with_name("extended.py")
    path.write_text(config.read_text() + text)
    return path


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(directory / "metrics.jsonl") if event["event"] == kind]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_hook_in_the_users_config(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    train("run", config=extended(tiny_config, OWN_HOOK), ranks=2)
    for rank in range(2):
        lines = (tmp_path / "run" / f"own.rank{rank}.txt").read_text().splitlines()
        assert lines == [f"{step} {[rank, rank + 2, rank + 4, rank + 6]}" for step in range(1, 8)]
    norms = [line["head_bias_norm"] for line in events(tmp_path / "run", "train")]
    assert len(set(norms)) == 7
    assert norms[-1] == pytest.approx(final_weights(tmp_path / "run")["head.bias"].norm().item())
    assert json.loads((tmp_path / "run" / "config.json").read_text())["hooks"]["user"] == ["BiasNorm"]


def test_a_broken_hook_does_not_end_the_run(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    printed = train("run", config=extended(tiny_config, BROKEN_HOOK.format(required=False)))
    assert printed.count("hook Broken failed at step 3: ZeroDivisionError: a user's mistake. Training continues") == 1
    assert "hook Broken failed 5 times in all" in printed
    assert events(tmp_path / "run", "end")[0]["step"] == 7
    assert 'raise ZeroDivisionError("a user' in (tmp_path / "run" / "logs" / "rank0.log").read_text()


def test_a_hook_cannot_replace_what_the_run_records(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    printed = train("run", config=extended(tiny_config, TAKEN_NAMES_HOOK))
    assert (
        "hook Loss failed at measure: ValueError: measure() gives host_memory_gb, loss, which the run records already"
        in printed
    )
    lines = events(tmp_path / "run", "train")
    assert all(line["loss"] > 0 and line["host_memory_gb"] > 0 and "own" not in line for line in lines)


def test_a_required_hook_ends_the_run(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    printed = train("run", config=extended(tiny_config, BROKEN_HOOK.format(required=True)), status=1)
    assert "ZeroDivisionError: a user's mistake" in printed
    assert events(tmp_path / "run", "end")[0]["error"] == "ZeroDivisionError: a user's mistake"


def test_a_hook_is_named_by_its_class() -> None:
    with pytest.raises(ConfigError, match="name the class or a function that makes the hook, not a hook itself"):
        HooksConfig(user=(cast(Any, Health()),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"profile": (3, 2)}, r"hooks.profile is \(3, 2\): use a first step from 1 on"),
        ({"detail_every_steps": 0}, "hooks.detail_every_steps is 0: use at least 1, or None"),
    ],
)
def test_settings_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HooksConfig(**fields)


def test_hooks_change_nothing(train: Train, tmp_path: Path) -> None:
    """All of them on, at every step, against as few as there can be: the same bits."""
    few = ("--hooks.detail_every_steps", "None", "--hooks.sample_images", "0", "--hooks.predictions", "0")
    train("few", *few, "--hooks.log_every_steps", "100")
    everything = (
        "--hooks.detail_every_steps",
        "1",
        "--hooks.trackers",
        "tensorboard",
        "--hooks.profile",
        "2",
        "3",
    )
    printed = train("all", *everything)
    assert "warning: hook" not in printed
    assert max(relative_differences(final_weights(tmp_path / "few"), final_weights(tmp_path / "all")).values()) == 0
    assert not (tmp_path / "few" / "lamb.jsonl").exists() and not (tmp_path / "few" / "samples.png").exists()

    trace = json.loads(gzip.decompress((tmp_path / "all" / "profile" / "steps-2-3.rank0.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert {"phase: data", "phase: forward", "phase: backward", "phase: optimizer", "data: wait for DALI"} <= set(names)
    assert names.count("phase: forward") == 2 * 8
    layers = [json.loads(line) for line in (tmp_path / "all" / "lamb.jsonl").read_text().splitlines()]
    assert [line["step"] for line in layers] == list(range(1, 8))
    assert set(layers[0]["layers"]) == set(final_weights(tmp_path / "all"))


def test_console_and_logs_of_two_ranks(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    printed = train("run", config=extended(tiny_config, WARNING_HOOK), ranks=2)
    assert not {"\r", "\x1b"} & set(printed), "control characters have no place in a log"
    assert printed.count("step 4/7  epoch 2.56  loss ") == 1, "rank 0 alone has the terminal"
    for epoch in range(1, 5):
        assert printed.count(f"epoch {epoch}: train loss ") == 1
    assert printed.count("  top-1 ") == 4 and printed.count("evaluation loss ") == 4
    assert printed.count("this node is slow") == 1 and printed.count("something old is used") == 1
    for rank in range(2):
        log = (tmp_path / "run" / "logs" / f"rank{rank}.log").read_text()
        assert log.count(f"rank {rank} WARNING disk ") == 7 and "step 7/7" in log


def test_a_full_disk_is_said_once(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    for name in ("metrics.jsonl", "logs/rank0.log", "samples.rank0.jsonl"):
        (run / name).symlink_to("/dev/full")
    printed = train("run")
    assert (
        "hook MetricsFile failed at start: [Errno 28] No space left on device. Training continues; make room under "
        f"{run}" in printed
    )
    assert printed.count(f"{run}/logs/rank0.log cannot be written") == 1
    assert printed.count("hook SampleTrace failed at step 1: [Errno 28]") == 1
    assert "--- Logging error ---" not in printed
    assert final_weights(run)


def test_a_removed_run_directory_is_reported(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    printed = train("run", config=extended(tiny_config, REMOVING_HOOK))
    gone = (
        "is gone: was .* deleted or moved while the run uses it\\? What was recorded there is lost; a new file is "
        "started"
    )
    for name in ("metrics.jsonl", "samples.rank0.jsonl"):
        assert len(re.findall(f"warning: {tmp_path}/run/{name} {gone}", printed)) == 1
    assert [event["step"] for event in events(tmp_path / "run", "train")] == [4, 5, 6, 7]


def test_a_foreign_line_in_the_metrics_stays_and_is_ignored(train: Train, tmp_path: Path) -> None:
    foreign = [
        '{"note": "looks good"}',
        '{"event": "train", "step": "4", "epoch": 1}',
        '{"event": "eval", "step": 2, "epoch": 1.0}',
        '{"event": ["train"], "step": null, "epoch": 0}',
        '{"event": "end", "step": 7, "epoch": 1, "seconds": 5, "error": null}',
    ]
    train("run", "--run.max_steps", "2")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(
        path.read_bytes() + "".join(f"{line}\n" for line in [*foreign, "[1]", "torn {"]).encode() + b"\xff\xfe\n"
    )
    printed = train("run")
    assert "warning: hook" not in printed
    assert [event["step"] for event in events(tmp_path / "run", "train")] == list(range(1, 8))
    kept = path.read_text().splitlines()
    assert [line in kept for line in foreign] == [True, True, True, True, False]  # the last is of a step to come
    assert len(events(tmp_path / "run", "end")) == 2


def test_the_sample_trace_has_each_micro_batch_once(train: Train, tmp_path: Path) -> None:
    """After a kill of two ranks beyond the newest checkpoint, on one rank: the second one's file is trimmed too."""
    train("run", "--run.checkpoint_every_steps", "4", ranks=2)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000007")
    train("run")
    lines = [json.loads(line) for path in (tmp_path / "run").glob("samples.rank*.jsonl") for line in path.open()]
    assert sorted((line["step"], line["k"]) for line in lines) == [(step, k) for step in range(7) for k in range(8)]


def test_a_line_after_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    file = JsonLines(path, last_step=1)
    file.write({"step": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]


def test_a_resumed_run_goes_on_in_the_same_files(train: Train, tmp_path: Path) -> None:
    train("run", "--run.max_steps", "4", "--hooks.detail_every_steps", "1")
    train("run", "--hooks.detail_every_steps", "1")
    assert [line["step"] for line in events(tmp_path / "run", "train")] == list(range(1, 8))
    assert [line["step"] for line in events(tmp_path / "run", "start")] == [0, 4]
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "lamb.jsonl").read_text().splitlines()] == list(
        range(1, 8)
    )
    log = (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert "step 1/4 " in log and "resuming from step 4" in log and "step 7/7 " in log


def test_predictions_are_those_of_the_evaluation(train: Train, tmp_path: Path) -> None:
    train("one", "--hooks.predictions", "10")
    train("two", "--hooks.predictions", "10", ranks=2)
    evaluations = events(tmp_path / "one", "eval")
    directories = sorted((tmp_path / "one" / "predictions").glob("step-*"))
    assert len(directories) == len(evaluations) == 4
    for directory, evaluation in zip(directories, evaluations, strict=True):
        names = [row["truth"] for row in rows(directory / "confusion.csv")]
        confusion = np.array([[int(row[name]) for name in names] for row in rows(directory / "confusion.csv")])
        assert confusion.shape == (5, 5) and confusion.sum() == 13
        assert confusion.trace() / 13 == pytest.approx(evaluation["top1"])
        accuracies = rows(directory / "classes.csv")
        assert [int(row["images"]) for row in accuracies] == confusion.sum(axis=1).tolist()
        assert float(accuracies[2]["accuracy"]) == pytest.approx(confusion[2, 2] / confusion[2].sum())
        table = rows(directory / "predictions.csv")
        assert [row["image"] for row in table] == [row["image"] for row in rows(directories[0] / "predictions.csv")]
        assert len(table) == 10
        for row in table:
            scores = [float(row[f"score {name}"]) for name in names]
            assert sum(scores) == pytest.approx(1, abs=1e-4) and names[scores.index(max(scores))] == row["guess"]
            assert row["truth"] == names[int(row["image"]) % 5]
            assert (tmp_path / "one" / "predictions" / "images" / f"{row['image']}.png").exists()
        assert rows(tmp_path / "two" / "predictions" / directory.name / "confusion.csv") == rows(
            directory / "confusion.csv"
        )


def test_predictions_of_a_raw_dataset(train: Train, tmp_path: Path) -> None:
    """Bare pixels, the default hooks, class names that a formula, a terminal or a CSV file could stumble over."""
    root = tmp_path / "raw"
    names = ["$\\frac", "evil\x1b[31m\nname", "собака, crème brûlée and more words than a label has room for"]
    for split, count in (("train", 32), ("validation", 9)):
        images = [np.asarray(photograph(number, 40, 40)) for number in range(count)]
        features = {"image/format": "RAW", "image/height": 40, "image/width": 40}
        records = [(image.tobytes(), 1 + number % 3) for number, image in enumerate(images)]
        write_shard(root / split / f"{split}-00000-of-00001", records, **features)
    build_index(root)
    manifest = dataclasses.replace(Manifest.read(root), class_names=tuple(names))
    manifest.write(root)
    printed = train("run", "--data.root", str(root), "--run.max_steps", "1")
    assert "warning: hook" not in printed
    directory = tmp_path / "run" / "predictions"
    assert [row["class"] for row in rows(directory / "step-00000001" / "classes.csv")] == names
    with Image.open(directory / "images" / "8.png") as picture:
        assert np.array_equal(np.asarray(picture), np.asarray(photograph(8, 40, 40)))
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "собака" in page and "evil name" in page and "\x1b" not in page
    assert Image.open(tmp_path / "run" / "report" / "classes.png").width > 600


def test_samples_are_what_the_network_gets() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, size=(3, 8, 8, 3), dtype=np.uint8)
    data = DataConfig(root="data", train_size=8, normalise=((123.0, 117.0, 104.0), (58.0, 57.0, 56.0)))
    normalised = (torch.from_numpy(pixels).float() - torch.tensor(data.mean)) / torch.tensor(data.std)
    batch = Batch(
        normalised.permute(0, 3, 1, 2),
        torch.tensor([[0, 1], [1, 0], [1, 1]]),
        torch.tensor([0.7, 1.0, 0.2]),
        cast(Any, None),
    )
    shown = sample_images(batch, data, ("cat", "dog"), 16)
    assert np.array_equal(np.stack([image for image, _ in shown]), pixels)
    assert [caption for _, caption in shown] == ["70% cat + 30% dog", "dog", "dog"]
    assert sheet(shown).size == (946, 266)


def test_class_names_are_words() -> None:
    def names(*stored: str) -> tuple[str, ...]:
        return class_names(cast(RunStart, SimpleNamespace(class_names=stored, num_classes=max(2, len(stored)))))

    assert names("n01440764", "n02012849", "n03126707") == ("tench", "crane (n02012849)", "crane (n03126707)")
    assert names("n01440764", "n99999999") == ("tench", "n99999999")
    assert names("n01440764", "cat") == ("n01440764", "cat")
    assert names() == ("0", "1")


def test_samples_of_a_run(train: Train, tmp_path: Path) -> None:
    train("run", "--run.max_steps", "1")
    with Image.open(tmp_path / "run" / "samples.png") as picture:
        assert np.asarray(picture).std() > 20, "the picture shows nothing"
    line = events(tmp_path / "run", "train")[0]
    assert line["process_memory_gb"] > 0.1 and line["host_memory_gb"] > 0.1 and line["disk_read_mb_per_s"] >= 0


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("exclude_vectors", [False, True])
def test_lambs_view_is_what_lamb_does(tmp_path: Path, bias_correction: bool, exclude_vectors: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    config = OptimizerConfig(
        lr=0.1, weight_decay=0.01, bias_correction=bias_correction, exclude_vectors=exclude_vectors
    )
    optimizer = make_optimizer(model, config)
    hook = LambView(1, Layout(rank=0))
    hook.start(cast(RunStart, SimpleNamespace(model=model, optimizer=optimizer, directory=tmp_path, start_step=0)))
    for _ in range(3):
        model(torch.randn(8, 4, dtype=torch.float64)).square().sum().backward()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        gradient = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        optimizer.step()
        optimizer.zero_grad()
        moved = {
            name: (parameter.detach() - before[name]).norm().item() for name, parameter in model.named_parameters()
        }
        measured = hook.measure()
        layers = json.loads((tmp_path / "lamb.jsonl").read_text().splitlines()[-1])["layers"]
        assert {name: update for name, (_, _, update, _) in layers.items()} == pytest.approx(moved)
        for name, (ratio, weight, update, _) in layers.items():
            adapted = not (exclude_vectors and name.endswith("bias"))
            assert (update == pytest.approx(0.1 * weight)) == adapted, (
                "LAMB moves an adapted layer by lr times its norm"
            )
            assert (ratio == 1) != adapted
        assert measured["clipped_grad_norm"] == pytest.approx(gradient)
        assert measured["weight_norm"] == pytest.approx(sum(w.square().sum().item() for w in before.values()) ** 0.5)
    assert hook.measure() == {}, "nothing new"


def record(step: int, **fields: float) -> StepRecord:
    times = {f.name: 0.0 for f in dataclasses.fields(TrainRecord) if f.name.endswith("_s")}
    values = {
        "loss": 1.0,
        "top1": 0.5,
        "lr": 0.1,
        "grad_norm": 1.0,
        "loss_scale": 1.0,
        "skipped_steps": 0,
        "images_per_second": 1.0,
    }
    measured = {name: fields.pop(name) for name in list(fields) if name not in values}
    train = TrainRecord(**cast(Any, {**times, **values, **fields, "measured": measured}))
    return StepRecord(step=step, epoch=0.0, micro_batches=(), batch=cast(Any, None), train=train)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"grad_norm": 30.0}, "gradient norm 30 at step 300, usually 1:"),
        ({"loss_scale": 0.5}, "loss scale 0.5 at step 300: below 1, float16 loses small gradients"),
        ({"skipped_steps": 20}, "of the last 200 steps were skipped for gradients that were not finite (step 300)"),
        ({"trust_ratio_max": 500.0}, "largest trust ratio 500 at step 300: a layer whose gradient is nearly zero"),
        ({}, None),
    ],
)
def test_health_warns(last: dict[str, float], message: str | None, caplog: pytest.LogCaptureFixture) -> None:
    health = Health()
    config = SimpleNamespace(optimizer=OptimizerConfig(lr=0.1))
    health.start(cast(RunStart, SimpleNamespace(start_step=0, config=config)))
    with caplog.at_level(logging.WARNING, "dali_train"):
        for number in range(1, 30):
            health.step(record(10 * number, skipped_steps=3))  # while the scale is looked for
        assert not caplog.records and HISTORY < 29
        health.step(record(300, **{"skipped_steps": 3, **last}))
    assert len(caplog.records) == (message is not None)
    assert message is None or message in caplog.text


@pytest.mark.parametrize(
    ("optimizer", "remedy"),
    [
        ({"exclude_vectors": False}, "Exclude biases and norms from it: optimizer.exclude_vectors true"),
        ({"weight_decay": 1e-4}, "Raise optimizer.weight_decay from 0.0001"),
        ({"weight_decay": 0.1}, "lower optimizer.lr or lengthen schedule.warmup_epochs"),
    ],
)
def test_health_gives_no_advice_that_was_followed(
    optimizer: dict[str, Any], remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    health = Health()
    config = SimpleNamespace(optimizer=OptimizerConfig(lr=0.1, **optimizer))
    health.start(cast(RunStart, SimpleNamespace(start_step=0, config=config)))
    with caplog.at_level(logging.WARNING, "dali_train"):
        health.step(record(1, trust_ratio_max=500.0))
    assert remedy in caplog.text


def test_a_layer_without_gradient_is_not_in_the_trust_ratios(tmp_path: Path) -> None:
    """As in the first step of a timm ResNet, whose last norm of each block begins with gamma 0."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    nn.init.zeros_(model[1].weight)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=1e-4))
    hook = LambView(1, Layout(rank=0))
    hook.start(cast(RunStart, SimpleNamespace(model=model, optimizer=optimizer, directory=tmp_path, start_step=0)))
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    measured = hook.measure()
    layers = json.loads((tmp_path / "lamb.jsonl").read_text())["layers"]
    assert layers["0.weight"][0] > 1000 and layers["0.weight"][3] == 0
    assert measured["trust_ratio_max"] < 100


def test_a_model_without_lamb_has_no_trust_ratios(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    hook = LambView(1, Layout(rank=0))
    hook.start(cast(RunStart, SimpleNamespace(model=model, optimizer=optimizer, directory=tmp_path, start_step=0)))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert hook.measure() == {} and not (tmp_path / "lamb.jsonl").exists()
    hook.end(cast(RunEnd, None))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (("8", "9"), "hooks.profile is 8 9, but the run ends after step 7: no trace is written; choose earlier steps"),
        (("6", "9"), "hooks.profile is 6 9, but the run ends after step 7: the trace ends there too"),
    ],
)
def test_a_profile_beyond_the_last_step(train: Train, steps: tuple[str, str], message: str) -> None:
    assert message in train("run", "--hooks.profile", *steps)


def test_the_last_line_names_the_best_checkpoint(train: Train, tmp_path: Path) -> None:
    """Also where it is one of an earlier start. Of equally good ones it is the latest."""
    stopped = train("run", "--run.max_seconds", "0.001", status=75)
    assert re.search(r"^stopped at step 1/7", stopped, re.MULTILINE)
    train("run", "--run.max_steps", "4")
    printed = train("run")
    assert re.search(r"^finished at step 7/7", printed, re.MULTILINE)
    best = max(events(tmp_path / "run", "eval"), key=lambda event: (event["top1"], event["step"]))
    assert printed.splitlines()[-1] == (
        f"best top-1 {best['top1']:.2%} at step {best['step']}: {tmp_path}/run/checkpoints/step-{best['step']:08d}"
    )


def test_the_progress_bar_is_not_cut(start_training: StartTraining, tmp_path: Path) -> None:
    """On real terminals of 70 and 110 columns: time left comes first, and what does not fit is left out as a piece."""
    whole = {
        r"left .+",
        r"step \d+/7",
        r"epoch \d\.\d\d",
        r"loss \d\.\d{4}",
        r"lr [\d.e-]+",
        r"[\d,]+ images/s",
        r"data wait \d+%",
    }
    for columns, least in ((70, 3), (110, 6)):
        name = f"at-{columns}"
        reader, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, columns))
        (tmp_path / f"{name}.log").symlink_to(os.ttyname(terminal))
        shown: list[bytes] = []
        thread = threading.Thread(target=_read_terminal, args=(reader, shown))
        thread.start()
        ranks = start_training(name, "--hooks.predictions", "0", "--run.eval_every_epochs", "None")
        assert ranks.wait() == [0]
        os.close(terminal)
        thread.join()
        os.close(reader)
        bars = [text for text in re.split(r"[\r\n]", b"".join(shown).decode()) if "% |" in text]
        assert len(bars) >= 7
        assert all(len(bar.strip()) <= columns for bar in bars)
        texts = [text.strip() for bar in bars if (text := bar.split("| ")[-1].removesuffix("\x1b[A").strip())]
        for text in texts:
            parts = text.split("  ")
            assert parts[0].startswith("left ") and len(parts) >= least, text
            assert all(any(re.fullmatch(one, part) for one in whole) for part in parts), text


def _read_terminal(reader: int, shown: list[bytes]) -> None:
    while True:
        try:
            data = os.read(reader, 65536)
        except OSError:  # EIO: nobody has the terminal open any more
            return
        shown.append(data)


def test_the_header_comes_before_the_model_is_built(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    config = Config(
        data=DataConfig(root="DATASET"),
        model=ModelConfig(name="resnet18", compile="model"),
        optimizer=OptimizerConfig(lr=1.0),
        batch=BatchConfig(global_batch=1, micro_batch=1),
        precision=PrecisionConfig(dtype="fp16"),
        run=RunConfig(dir=str(tmp_path), epochs=1),
        schedule=ScheduleConfig(warmup_epochs=0),
    )
    launch = cast(Any, SimpleNamespace(rank=0, world_size=1, launcher="none"))
    plan = RunPlan(
        config=config,
        directory=tmp_path,
        launch=launch,
        device="CPU, 2 threads",
        num_images=1,
        num_classes=1,
        class_names=("a",),
        grad_accum_steps=1,
        total_steps=1,
    )
    with caplog.at_level(logging.INFO, "dali_train"):
        Observers([Console()]).announce(plan)
    assert "1 image, 1 class" in caplog.text and "1 = 1 image x 1 accumulated x 1 rank" in caplog.text
    assert "precision.dtype is fp16, which a CPU computes many times slower" in caplog.text
    assert caplog.messages[-1] == "waiting for the model to be built and compiled, which can take minutes"
