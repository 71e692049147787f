"""The parts of airbench94 against numbers of the published program, and a run that is killed."""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import airbench94
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from dali_train.checkpoint.format import load_newest
from dali_train.cli import main
from dali_train.data.loading.pipelines import Batch
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch
from dali_train.training.build import build_trainer
from dali_train.training.loss import TrainingClasses
from dali_train.training.schedule import learning_rate

SIZE, STEPS, IMAGES = 16, 12, 50_000


def waves(*shape: int, scale: float) -> torch.Tensor:
    """Return numbers that are the same on every machine."""
    return scale * torch.arange(math.prod(shape), dtype=torch.float64).mul(1.7).sin().view(shape)


class Waves:
    """A loader of one micro-batch a step."""

    def __init__(self, step: int) -> None:
        self._images = waves(SIZE, 3, 32, 32, scale=1 + step / 10)

    def next(self) -> Batch:
        classes = torch.arange(SIZE) % 10
        plain = SimpleNamespace(dropout_seed=0, k=0)  # all that a step reads of the draws
        return Batch(self._images, torch.stack([classes, classes], 1), torch.ones(SIZE), plain)


def test_weights_after_steps_are_those_of_the_published_program() -> None:
    """Rates by group, momentum, weight decay, the frozen bias and Lookahead, in float64; the numbers were computed by
    the classes and the loop of legacy/airbench94.py for the same weights, images, size of batch and number of steps."""
    lr = airbench94.LR * SIZE / 1024
    config = airbench94.config.replace(
        batch=dict(global_batch=SIZE, micro_batch=SIZE),
        model=dict(kwargs=dict(widths=(8, 16, 16)), weights=None),
        optimizer=dict(lr=lr, kwargs=dict(momentum=0.85, bias_steps=6)),
        schedule=dict(warmup_epochs=2 * SIZE / IMAGES, warmup_lr=0.2 * lr, min_lr=0.07 * lr),
        precision=dict(dtype="fp64"),
        run=dict(epochs=STEPS * SIZE / IMAGES),
    )
    layout = Layout.from_config(Launch(world_size=1, port=1), config.parallel)
    classes = TrainingClasses(names=(), counts=np.full(10, IMAGES // 10), num_images=IMAGES)
    trainer = build_trainer(config, layout, 10, torch.device("cpu"), classes)
    model = trainer.model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                parameter.copy_(waves(*parameter.shape, scale=0.2))
        model.whiten.weight.copy_(waves(24, 3, 2, 2, scale=1.0))
    trainer.begin_averages()
    for step in range(STEPS):
        trainer.step(step, learning_rate(config, step, IMAGES), Waves(step))
    assert trainer.ema is not None
    reached = trainer.ema.state()
    for name, norm in PUBLISHED_NORMS.items():
        # The program keeps the schedule of Lookahead's decay in float32.
        assert reached[name].norm().item() == pytest.approx(norm, rel=1e-6), name


PUBLISHED_NORMS = {
    "whiten.bias": 0.00240651069,
    "groups.0.conv1.weight": 5.87688266,
    "groups.0.norm1.bias": 0.229380617,
    "groups.0.norm2.running_var": 0.666112222,
    "groups.1.conv2.weight": 6.78366507,
    "groups.1.norm1.running_mean": 3.32378608,
    "groups.2.norm2.bias": 0.0524769093,
    "groups.2.norm2.running_mean": 0.17536803,
    "head.weight": 1.78349547,
}


def test_whitened_patches_are_uncorrelated() -> None:
    images = torch.rand(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = F.avg_pool2d(images, 3, 1, 1) - 0.5  # neighbours are alike
    filters = airbench94.whitening_filters(images, eps=0.0)
    whitened = F.conv2d(images, filters[:12]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(whitened @ whitened.T / whitened.shape[1], torch.eye(12), atol=1e-4, rtol=0)
    assert torch.equal(filters[12:], -filters[:12])


CONFIG = """
import time

from dali_train import Hook, load_config


class Pause(Hook):
    def step(self, record):
        while record.step == 6 and {pauses}:
            time.sleep(0.1)


config = load_config({recipe!r}).replace({{
    "data.root": {root!r}, "data.num_threads": 1, "batch.global_batch": 16, "batch.micro_batch": 8,
    "model.weights": None, "model.kwargs.widths": (8, 16, 16), "optimizer.kwargs.bias_steps": 5,
    "run.dir": {run!r}, "run.epochs": 5, "run.checkpoint_every_steps": 2, "run.device": "cpu", "hooks.user": (Pause,),
}})
"""


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(32):
        file = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(file)
    root = tmp_path / "dataset"
    images = ["--train", str(tmp_path / "images"), "--validation-fraction", "0.25"]
    assert main(["data", "convert", "folder", *images, "--format", "raw", "--out", str(root)]) == 0

    def command(name: str, *, pauses: bool) -> list[str]:
        config = tmp_path / f"{name}-{pauses}.py"
        values = {"recipe": airbench94.__file__, "root": str(root), "run": str(tmp_path / name)}
        config.write_text(CONFIG.format(**values, pauses=pauses))
        return ["train", "--config", str(config)]

    assert main(command("undisturbed", pauses=False)) == 0
    killed = subprocess.Popen([sys.executable, "-m", "dali_train", *command("killed", pauses=True)])
    while not (tmp_path / "killed" / "checkpoints" / "step-00000004").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert main(command("killed", pauses=False)) == 0
    one, other = (load_newest(tmp_path / name / "checkpoints")[0] for name in ("undisturbed", "killed"))
    assert one is not None and other is not None and one.step == other.step == 8
    for section in ("model", "optimizer", "ema"):
        assert one.state[section].keys() == other.state[section].keys()
        assert all(torch.equal(tensor, other.state[section][name]) for name, tensor in one.state[section].items())
