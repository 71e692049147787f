"""`dali-train fit`: from images to a model, whatever interrupts it; and the parts that choose networks and lengths."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dali_train import cli
from dali_train.config import load_config
from dali_train.data.dataset.index import Split
from dali_train.errors import ConfigError
from dali_train.extras.cost import speed
from dali_train.extras.fit import steps as fit_steps
from dali_train.extras.fit.large_photographs import saving
from dali_train.extras.init import _seconds
from dali_train.extras.init.config_file import write_config
from dali_train.extras.init.network import describe_weights
from dali_train.extras.init.trial import Trial
from dali_train.runtime.status import MISTAKE, START_AGAIN, read_status
from tests.conftest import photograph
from tests.helpers import wait_until, words
from tests.ranks import POOL, command

CLASSES = {"dark": 60, "bright": 190}
CHANGE = """
config = config.replace({"data.eval_views": "mirrored"})"""
LENGTH = words("--epochs 60 --schedule.warmup_epochs 0 --run.checkpoint_every_steps 5 --run.eval_every_epochs 60")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of 30 small images that differ in brightness."""
    directory = tmp_path_factory.mktemp("fit") / "photos"
    generator = np.random.default_rng(0)
    for name, mean in CLASSES.items():
        (directory / name).mkdir(parents=True)
        for number in range(30):
            pixels = generator.normal(mean, 20, (16, 16, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(directory / name / f"{number:02}.jpg")
    return directory


def start(source: Path, out: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "dali_train", "fit", str(source), "--out", str(out), *options, *LENGTH]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_from_a_folder_to_a_model(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step in a process that was forked, which does not import torch for seconds."""
    log, out = tmp_path / "log", tmp_path / "run"
    monkeypatch.setattr(fit_steps, "_run", lambda line: POOL.run(1, command, list(line), log=log)[0])
    assert cli.main(["fit", str(photos), "--out", str(out), "--epochs", "2", "--schedule.warmup_epochs", "0"]) == 0
    assert re.search(r"top-1 [\d.]+% of 12 validation images", log.read_text())
    assert f"model and card  {out}/export/timm" in capsys.readouterr().out
    assert read_status(out).state == "finished"  # type: ignore[union-attr]
    assert (out / "export" / "timm" / "README.md").is_file() and (out / "report" / "index.html").is_file()


def test_large_photographs_may_be_stored_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`fit` prints the command, which gives the same images of the same classes, and advises nothing of its result."""
    for number in range(8):
        path = tmp_path / "my photos" / ("day", "night")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(number, 810, 1080).save(path)

    def run_until_training(line: list[str]) -> int:
        return cli.main(line) if line[0] in ("data", "init") else MISTAKE

    monkeypatch.setattr(fit_steps, "_run", run_until_training)
    out = tmp_path / "a run"
    assert cli.main(["fit", str(tmp_path / "my photos"), "--out", str(out), "--epochs", "1"]) == MISTAKE
    printed = capsys.readouterr().out
    advice = re.search(
        r"^decoding: about .* an epoch on \d+ cores?; .*\n  dali-train (data convert .*)\n", printed, re.M
    )
    assert advice is not None, printed
    assert cli.main(shlex.split(advice[1])) == 0
    indexed, stored = (Split(path, "train") for path in (out / "dataset", f"{out}-400px"))
    assert len(stored) == len(indexed) and np.array_equal(stored.class_counts, indexed.class_counts)
    assert set(stored.rows["height"]) == {400} and set(stored.rows["width"]) == {533}
    assert saving(stored) is None


@pytest.mark.thorough
def test_a_dataset_without_a_validation_split(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no accuracy and no mistake, but a model."""
    log, out = tmp_path / "log", tmp_path / "run"
    monkeypatch.setattr(fit_steps, "_run", lambda line: POOL.run(1, command, list(line), log=log)[0])
    assert cli.main(["data", "index", str(photos), "--out", str(tmp_path / "index")]) == 0
    words = ["fit", str(tmp_path / "index"), "--out", str(out), "--epochs", "1", "--schedule.warmup_epochs", "0"]
    assert cli.main(words) == 0, log.read_text()
    assert "the next steps go on without it" in capsys.readouterr().out
    assert (out / "export" / "timm" / "README.md").is_file()


@pytest.mark.thorough
def test_from_a_folder_to_a_model_through_kills(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    mistaken = start(photos, out, "--weights", str(tmp_path / "missing.pth"))
    assert mistaken.wait() == 2 and (out / "dataset" / "dataset.json").exists()
    first = start(photos, out)
    until_a_checkpoint(out)
    first.kill()  # fit alone: what it started notices
    first.wait()
    second = start(photos, out)
    time.sleep(2)
    os.killpg(second.pid, signal.SIGTERM)  # in whatever step it is by now
    assert second.wait() in (START_AGAIN, 128 + signal.SIGTERM, -signal.SIGTERM, 0)
    printed, _ = (third := start(photos, out)).communicate()
    assert third.returncode == 0, printed
    assert read_status(out).state == "finished"  # type: ignore[union-attr]
    assert next(line for line in printed.splitlines() if line.startswith("[1/5]")).endswith("(done before)")
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "start" for event in steps) >= 2, "it was not interrupted while it trained"
    top1 = next(event["top1"] for event in steps if event["event"] == "eval")
    assert f"top-1 {top1:.2%} of 12 validation images" in printed
    assert (out / "export" / "timm" / "README.md").is_file() and (out / "report" / "index.html").is_file()
    assert len(Split(out / "dataset", "train")) == 48 and (top1 == 1 or (out / "mistakes.png").is_file())
    # Nothing is left to be done, and nothing else may be asked for in this directory.
    assert cli.main(["fit", str(photos), "--out", str(out), *LENGTH]) == 0
    assert cli.main(["fit", str(photos), "--out", str(out), "--model", "resnet18", *LENGTH]) == 2
    capsys.readouterr()
    (out / "fit.py").write_text((out / "fit.py").read_text() + CHANGE)
    assert cli.main(["fit", str(photos), "--out", str(out), *LENGTH]) == 2
    assert "(data.eval_views one -> mirrored): undo the change" in capsys.readouterr().err
    shutil.copy(photos / "dark" / "00.jpg", photos / "dark" / "30.jpg")
    assert cli.main(["fit", str(photos), "--out", str(out), *LENGTH]) == 2
    (photos / "dark" / "30.jpg").unlink()
    assert "dark/30.jpg is not in the index: move it away" in capsys.readouterr().err
    assert cli.main(["fit", str(photos), "--out", str(photos), *LENGTH]) == 2
    of_a_dataset = ["fit", str(out / "dataset"), "--out", str(tmp_path / "other"), "--validation-fraction", "0.2"]
    assert cli.main([*of_a_dataset, *LENGTH]) == 2 and not (tmp_path / "other").exists()


def until_a_checkpoint(run: Path) -> None:
    wait_until(lambda: any((run / "checkpoints").glob("step-*/manifest.json")), seconds=120)


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [("run.dir", "--out"), ("data.root", "SOURCE"), ("run.epochs", "--epochs"), ("model.weights", "--weights")],
)
def test_settings_that_it_chooses_itself(
    setting: str, remedy: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", str(photos), "--out", str(tmp_path / "out"), f"--{setting}", "other"]) == 2
    assert f"--{setting} with fit, which " in (error := capsys.readouterr().err) and remedy in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800), ("1h30m", 5400), ("90s", 90), ("2 h", 7200)])
def test_times(text: str, seconds: float) -> None:
    assert _seconds(text) == seconds


@pytest.mark.parametrize("text", ["30", "", "m", "-1h", "1d", "half an hour"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(Exception, match="use hours, minutes and seconds"):
        _seconds(text)


def test_the_first_pass_of_each_kind_does_not_count() -> None:
    """And they take turns."""
    calls: list[str] = []

    def timed(name: str, *seconds: float) -> Callable[[], float]:
        coming = iter(seconds)

        def one() -> float:
            calls.append(name)
            return next(coming)

        return one

    assert speed._fastest([timed("fp32", 0.1, 3, 2, 4), timed("bf16", 9, 5, 6, 5)]) == [2, 5]
    assert calls == ["fp32", "bf16"] * 4


def test_the_epochs_that_fit_into_a_time() -> None:
    trial = Trial(import_s=3, start_s=7, step_s=2, evaluation_s=5)
    assert trial.afterwards_s == 2 * (3 + 7) + 5
    assert trial.probe_s(400, 100) == 3 + 7 + 5 * 5 and trial.probe_s(400, 0) == 3 + 7

    def run_s(epochs: float) -> float:  # of 10 steps each, and an evaluation after every second one
        return trial.run_s(math.ceil(10 * epochs), math.ceil(epochs / 2))

    assert run_s(3) == 3 + 7 + 30 * 2 + 2 * 5
    for epochs in (1, 2, 3, 7):
        exactly = trial.afterwards_s + 1.1 * run_s(epochs)
        assert trial.epochs_in(exactly + 0.1, run_s) == epochs
        one_step_less = epochs - 1 if epochs > 1 else 0.9
        assert trial.epochs_in(exactly - 0.1, run_s) == pytest.approx(one_step_less)
    with pytest.raises(ConfigError, match="allow more time"):
        trial.epochs_in(40, run_s)


@pytest.fixture(scope="module")
def index(photos: Path) -> Path:
    assert cli.main(words(f"data index {photos} --out {photos.parent / 'index'} --validation-fraction 0.2")) == 0
    return photos.parent / "index"


@pytest.mark.thorough
def test_a_time_is_tried_with_several_processes(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dali_train.extras.init.trial._SHARE", 0.0)
    monkeypatch.setattr("dali_train.extras.init.trial._SHORTEST_S", 0.0)  # the fewest steps are a trial
    assert cli.main(words(f"init {index} --output {tmp_path / 'config.py'} --for 15m --num-processes 2")) == 0
    assert load_config(tmp_path / "config.py").run.epochs >= 1


def has_trained(directory: Path) -> bool:
    with suppress(FileNotFoundError):  # of a folder that init removes meanwhile
        return any(directory.glob("dali-train-*/**/trial/metrics.jsonl"))
    return False


@pytest.mark.thorough
def test_a_trial_that_is_interrupted_writes_no_config(index: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dali_train", "init", str(index), "--output", "config.py", "--for", "50m"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    )
    wait_until(has_trained, tmp_path, seconds=120)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate()
    assert process.returncode == 128 + signal.SIGINT and "no config was written" in printed, printed
    assert not (tmp_path / "config.py").exists()


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A directory as `export` writes it."""
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    (tmp_path / "model.safetensors").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("resnet50-0676ba61.pth", "resnet50"),
        ("resnet50d_ra2-464e36ba.pth", "resnet50d"),
        ("vit_base_patch16_224.augreg_in1k.safetensors", "vit_base_patch16_224"),
    ],
)
def test_a_file_of_weights_is_named_after_its_network(name: str, model: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert describe_weights(str(tmp_path / name), None).model == model


def test_which_network_weights_are_for(described: Path) -> None:
    file = str(described / "model.safetensors")
    assert describe_weights(file, None).model == "vit_tiny_patch16_224"
    assert describe_weights(file, "resnet18").model == "resnet18"
    published = describe_weights("timm/vit_base_patch16_224.augreg_in1k", None)
    assert published.model == "vit_base_patch16_224" and published.normalise == "inception"
    assert describe_weights("resnet18.a1_in1k", None).interpolation == "bicubic"
    assert describe_weights(file, None).normalise == "inception", "timm's"
    trained_with: dict[str, object] = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    for more, interpolation in (
        ({}, "bicubic"),
        ({"interpolation": "bilinear"}, "bilinear"),
        ({"std": [1]}, "bicubic"),
    ):
        own = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {**trained_with, **more}}
        (described / "config.json").write_text(json.dumps(own))
        found = describe_weights(file, None)
        assert found.interpolation == interpolation
        assert found.normalise == "imagenet" or "std" in more
    own = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": trained_with}
    (described / "config.json").write_text(json.dumps(own))
    assert describe_weights(f"local-dir:{described}", "vit_tiny_patch16_224").normalise == "imagenet"
    (described / "config.json").unlink()
    for weights, message in ((file, "--model"), (str(described / "gone.pth"), "no such file"), ("resnet7", "timm")):
        with pytest.raises(ConfigError, match=message):
            describe_weights(weights, None)


@pytest.mark.parametrize(
    ("model", "lr", "freeze", "of_few_steps"),
    [("resnet18", 3e-4, ("batch-norm",), (("fc.*", 10, 1),)), ("vit_tiny_patch16_224", 5e-4, (), ())],
)
def test_a_config_with_weights(
    model: str, lr: float, freeze: tuple[str, ...], of_few_steps: tuple[Any, ...], photos: Path, tmp_path: Path
) -> None:
    import timm

    assert cli.main(words(f"data index {photos} --out {tmp_path / 'index'} --validation-fraction 0.2")) == 0
    file = tmp_path / f"{model}.pth"
    torch.save(timm.create_model(model, num_classes=5).state_dict(), file)
    write_config(str(tmp_path / "index"), tmp_path / "config.py", weights=str(file), gpu_memory_gb=16)
    config = load_config(tmp_path / "config.py")
    assert (config.model.name, config.model.weights, config.model.freeze) == (model, str(file), freeze)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.groups) == ("adamw", lr, of_few_steps)
    assert config.optimizer.clip_grad_norm == 1.0
    assert (config.run.epochs, config.schedule.warmup_epochs) == (20, 1)
    write_config(str(tmp_path / "index"), tmp_path / "short.py", weights=str(file), gpu_memory_gb=16, epochs=3)
    config = load_config(tmp_path / "short.py")
    assert (config.run.epochs, config.schedule.warmup_epochs, config.run.eval_every_epochs) == (3, 0, 1)
    write_config(str(tmp_path / "index"), tmp_path / "long.py", weights=str(file), gpu_memory_gb=16, epochs=1000)
    assert load_config(tmp_path / "long.py").optimizer.groups == ()


def test_images_per_step(photos: Path, tmp_path: Path) -> None:
    """Networks whose BatchNorms keep the statistics of pretrained weights have one rate, for 64 images."""
    for number, source in enumerate(sorted(photos.rglob("*.jpg"))[:2]):
        folder = tmp_path / "photos" / f"class-{number}"
        folder.mkdir(parents=True)
        for copy in range(2_500):
            (folder / f"{copy}.jpg").hardlink_to(source)
    assert cli.main(words(f"data index {tmp_path / 'photos'} --out {tmp_path / 'index'}")) == 0
    for model, with_weights, images in (
        ("resnet18", True, 64),
        ("resnet18", False, 128),
        ("vit_tiny_patch16_224", True, 128),
    ):
        weights = tmp_path / f"{model}.pth"
        weights.touch()
        config = tmp_path / f"{model}_{with_weights}.py"
        write_config(
            str(tmp_path / "index"),
            config,
            gpu_memory_gb=16,
            model=model,
            weights=str(weights) if with_weights else None,
        )
        assert load_config(config).batch.global_batch == images


@pytest.mark.parametrize(
    ("fraction", "epochs", "every", "reason"),
    [
        ("0.2", 4, 1, ""),
        ("0.2", 20, 4, "an epoch has only 1 step"),
        ("0.2", 1000, 67, "an epoch has only 1 step"),
        ("0.9", 20, 9, "an evaluation has 54 images, an epoch 6"),
    ],
)
def test_how_often_a_config_evaluates(
    fraction: str, epochs: int, every: int, reason: str, photos: Path, tmp_path: Path
) -> None:
    """Neither after steps that change little, nor for longer than the training in between takes."""
    assert cli.main(words(f"data index {photos} --out {tmp_path / 'index'} --validation-fraction {fraction}")) == 0
    write_config(str(tmp_path / "index"), tmp_path / "config.py", gpu_memory_gb=16, epochs=epochs)
    assert load_config(tmp_path / "config.py").run.eval_every_epochs == every
    assert reason in (tmp_path / "config.py").read_text()


def table(directory: Path, *lines: str) -> Path:
    for name in ("a.jpg", "b.jpg", "c.png", "d.jpg"):
        (directory / "images").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (len(name), 90, 200)).save(directory / "images" / name)
    path = directory / "labels.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return path


def test_a_table_of_files_and_labels(tmp_path: Path) -> None:
    rows = ("images/a.jpg,10,train", "images/b,9,train", "images/c.png,10,val", "images/d.jpg,9,test")
    path = table(tmp_path, "file_name,class,split", *rows)
    assert cli.main(words(f"data index {path} --out {tmp_path / 'index'}")) == 0
    train, validation = (Split(tmp_path / "index", name) for name in ("train", "validation"))
    assert train.manifest.class_names == ("9", "10")
    labels: Any = {train.files.name(int(row["shard"])): int(row["label"]) for row in train.rows}  # type: ignore[union-attr]
    assert labels == {"images/a.jpg": 1, "images/b.jpg": 0}
    assert len(validation) == 1
    # Such as a run beside the table, with its pictures: the table says which images there are.
    shutil.copytree(tmp_path / "images", tmp_path / "runs" / "photos")
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "new.jpg")
    assert len(Split(tmp_path / "index", "train")) == 2
    assert cli.main(words(f"data convert table --source {path} --out {tmp_path / 'copy'}")) == 0
    assert sorted(Split(tmp_path / "copy", "train").rows["label"].tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("file,label", "images/a.jpg,cat", "images/a.jpg,dog"), "is in line 2 already"),
        (("file,label", "images/z.jpg,cat"), "there is no file"),
        (("file,label", "../a.jpg,cat"), "does not lie below"),
        (("file,label", "images/a.jpg,"), "has no label"),
        (("file,label", "images/a.jpg,cat,dog"), "one cell under each of the 2"),
        (("file,label", "images/a.jpg"), "one cell under each of the 2"),
        (("file,label,split", "images/a.jpg,cat,later"), "is no split"),
        (("file,kind", "images/a.jpg,cat"), "--label-key"),
        (("file,label",), "has no rows"),
        (("file,label,label", "images/a.jpg,cat,dog"), "have one name"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_tables_that_are_refused(
    lines: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words(f"data index {table(tmp_path, *lines)} --out {tmp_path / 'index'}")) == 2
    assert message in capsys.readouterr().err
