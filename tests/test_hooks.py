"""Hooks observe: the user's own, failing ones, and what the standard ones leave in the run directory."""

import csv
import dataclasses
import gzip
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dali_train.config import ConfigError, DataConfig, HooksConfig, OptimizerConfig
from dali_train.data.loader import Batch
from dali_train.hooks import RunStart, StepRecord, TrainRecord
from dali_train.hooks.files import JsonLines
from dali_train.hooks.health import HISTORY, Health
from dali_train.hooks.lamb import LambView
from dali_train.hooks.samples import sample_images, sheet
from dali_train.optim import make_optimizer

from .conftest import Train, final_weights, relative_differences

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


def extended(config: Path, text: str) -> Path:
    path = config.with_name("extended.py")
    path.write_text(config.read_text() + text)
    return path


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


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
    assert printed.count("hook Broken failed at step 3: ZeroDivisionError: a user's mistake. Training goes on") == 1
    assert "hook Broken failed 5 times in all" in printed
    assert events(tmp_path / "run", "end")[0]["step"] == 7
    assert 'raise ZeroDivisionError("a user' in (tmp_path / "run" / "logs" / "rank0.log").read_text()


def test_a_hook_cannot_replace_what_the_run_records(train: Train, tiny_config: Path, tmp_path: Path) -> None:
    printed = train("run", config=extended(tiny_config, TAKEN_NAMES_HOOK))
    assert "hook Loss failed at measure: ValueError: measure() gives host_memory_gb, loss, which the run records already" in printed
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
        ({"model_graph": True}, "hooks.model_graph needs a place to go: set hooks.tensorboard true"),
        ({"gradient_histograms": True}, "hooks.gradient_histograms needs a place to go"),
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
        "--hooks.detail_every_steps", "1", "--hooks.tensorboard", "true", "--hooks.gradient_histograms", "true",
        "--hooks.model_graph", "true", "--hooks.profile", "2", "3",
    )  # fmt: skip
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
        f"hook MetricsFile failed at start: [Errno 28] No space left on device. Training goes on; make room under {run}" in printed
    )
    assert printed.count(f"{run}/logs/rank0.log cannot be written") == 1
    assert printed.count("hook SampleTrace failed at step 1: [Errno 28]") == 1
    assert "--- Logging error ---" not in printed
    assert final_weights(run)


def test_a_line_after_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    file = JsonLines(path, lambda line: line["step"] < 2)
    file.write({"step": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]


def test_a_resumed_run_goes_on_in_the_same_files(train: Train, tmp_path: Path) -> None:
    train("run", "--run.max_steps", "4", "--hooks.detail_every_steps", "1")
    train("run", "--hooks.detail_every_steps", "1")
    assert [line["step"] for line in events(tmp_path / "run", "train")] == list(range(1, 8))
    assert [line["step"] for line in events(tmp_path / "run", "start")] == [0, 4]
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "lamb.jsonl").read_text().splitlines()] == list(range(1, 8))
    log = (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert "step 1/4 " in log and "going on from step 4" in log and "step 7/7 " in log


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
        assert rows(tmp_path / "two" / "predictions" / directory.name / "confusion.csv") == rows(directory / "confusion.csv")


def test_samples_are_what_the_network_gets() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, size=(3, 8, 8, 3), dtype=np.uint8)
    data = DataConfig(root="", train_size=8, mean=(123.0, 117.0, 104.0), std=(58.0, 57.0, 56.0))
    normalised = (torch.from_numpy(pixels).float() - torch.tensor(data.mean)) / torch.tensor(data.std)
    batch = Batch(
        normalised.permute(0, 3, 1, 2), torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.tensor([0.7, 1.0, 0.2]), cast(Any, None)
    )
    shown = sample_images(batch, data, ("cat", "dog"), 16)
    assert np.array_equal(np.stack([image for image, _ in shown]), pixels)
    assert [caption for _, caption in shown] == ["70% cat + 30% dog", "dog", "dog"]
    assert sheet(shown).size == (946, 266)


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
    config = OptimizerConfig(lr=0.1, weight_decay=0.01, bias_correction=bias_correction, exclude_vectors=exclude_vectors)
    optimizer = make_optimizer(model, config)
    hook = LambView(1)
    hook.start(cast(RunStart, SimpleNamespace(model=model, optimizer=optimizer, directory=tmp_path, start_step=0)))
    for _ in range(3):
        model(torch.randn(8, 4, dtype=torch.float64)).square().sum().backward()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        gradient = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        optimizer.step()
        optimizer.zero_grad()
        moved = {name: (parameter.detach() - before[name]).norm().item() for name, parameter in model.named_parameters()}
        measured = hook.measure()
        layers = json.loads((tmp_path / "lamb.jsonl").read_text().splitlines()[-1])["layers"]
        assert {name: update for name, (_, _, update, _) in layers.items()} == pytest.approx(moved)
        for name, (ratio, weight, update, _) in layers.items():
            adapted = not (exclude_vectors and name.endswith("bias"))
            assert (update == pytest.approx(0.1 * weight)) == adapted, "LAMB moves an adapted layer by lr times its norm"
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
        ({"loss_scale": 0.5}, "loss scale 0.5 at step 300: under 1 float16 loses small gradients"),
        ({"skipped_steps": 20}, "of the last 200 steps were skipped for gradients that were not finite (step 300)"),
        ({"trust_ratio_max": 500.0}, "largest trust ratio 500 at step 300: a layer with next to no gradient"),
        ({}, None),
    ],
)
def test_health_warns(last: dict[str, float], message: str | None, caplog: pytest.LogCaptureFixture) -> None:
    health = Health()
    health.start(cast(RunStart, SimpleNamespace(start_step=0)))
    with caplog.at_level(logging.WARNING, "dali_train"):
        for number in range(1, 30):
            health.step(record(10 * number, skipped_steps=3))  # while the scale is looked for
        assert not caplog.records and HISTORY < 29
        health.step(record(300, **{"skipped_steps": 3, **last}))
    assert len(caplog.records) == (message is not None)
    assert message is None or message in caplog.text
