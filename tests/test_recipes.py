"""Each shipped config against the numbers of the recipe that it claims to be, and the schedule they share."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dali_train.config import Config, load_config
from dali_train.model import build_model
from dali_train.optim import make_optimizer
from dali_train.schedule import learning_rate

from .conftest import REPOSITORY

IMAGENET = 1_281_167
CONFIGS = REPOSITORY / "configs"


def recipe(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.py")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_every_config_loads_and_says_how_to_run_it(path: Path) -> None:
    load_config(path)
    docstring = path.read_text().split('"""')[1]
    assert f"--config configs/{path.name}" in docstring or "make quickstart" in docstring


@pytest.mark.parametrize(
    ("name", "model", "warmup", "step_every"),
    [
        ("vit-b16", "vit_base_patch16_224", 150, "epoch"),
        ("vit-b32", "vit_base_patch32_224", 150, "epoch"),
        ("vit-l32", "vit_large_patch32_224", 150, "epoch"),
        ("vit-b16-per-step", "vit_base_patch16_224", 150, "step"),
        ("vit-b16-warmup50", "vit_base_patch16_224", 50, "epoch"),
    ],
)
def test_recipe_a(name: str, model: str, warmup: float, step_every: str) -> None:
    config = recipe(name)
    assert config.model.name == model
    assert config.model.kwargs == {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1}
    assert (config.run.epochs, config.schedule.warmup_epochs, config.schedule.step_every) == (300, warmup, step_every)
    assert (config.batch.global_batch, config.batch.micro_batch) == (32_768, 256)
    assert (config.batch.accumulation(4), config.batch.accumulation(8)) == (32, 16)
    assert (config.precision.dtype, config.optimizer.clip_grad_norm) == ("fp16", 1.0)
    assert (config.mixup.alpha, config.mixup.per_image) == (0.2, False)
    assert (config.data.train_size, config.data.eval_size, config.data.eval_resize_to) == (224, 224, 256)
    assert (config.data.crop_area, config.data.crop_aspect, config.data.horizontal_flip) == ((0.08, 1.0), (3 / 4, 4 / 3), 0.5)
    assert config.data.mean == config.data.std == (127.5, 127.5, 127.5)


def test_recipe_a_lamb_has_the_sources_arguments() -> None:
    """What timm's LAMB really gets: one group with all parameters, and none of timm's own defaults in the way."""
    config = recipe("vit-b16")
    small = replace(config, model=replace(config.model, kwargs={**config.model.kwargs, "depth": 1}))
    model = build_model(small, 1000, torch.device("meta"))
    (group,) = make_optimizer(model, config.optimizer).param_groups
    assert len(group["params"]) == len(list(model.parameters()))
    expected = {"lr": 1.8e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": False}
    expected |= {"max_grad_norm": None, "always_adapt": True, "decoupled_decay": False, "trust_clip": False, "grad_averaging": True}
    assert {name: group[name] for name in expected} == expected


def test_vectors_can_be_excluded_from_decay_and_adaptation() -> None:
    config = recipe("digits")
    model = build_model(config, 10, torch.device("meta"))
    optimizer = make_optimizer(model, replace(config.optimizer, exclude_vectors=True))
    matrices, vectors = optimizer.param_groups
    assert all(p.ndim > 1 for p in matrices["params"]) and all(p.ndim <= 1 for p in vectors["params"])
    assert (matrices["weight_decay"], vectors["weight_decay"], vectors["always_adapt"]) == (0.1, 0.0, False)


def test_the_rate_moves_once_an_epoch_as_in_the_source() -> None:
    config = recipe("vit-b16")
    for epoch in (0, 1, 75, 149, 150, 151, 225, 299):
        expected = (epoch + 1) / 151 * 1.8e-2 if epoch < 150 else (300 - epoch) / 150 * 1.8e-2
        first = -(-epoch * IMAGENET // 32_768)
        last = -(-(epoch + 1) * IMAGENET // 32_768) - 1
        assert learning_rate(config, first, IMAGENET) == pytest.approx(expected, rel=1e-12)
        assert learning_rate(config, last, IMAGENET) == pytest.approx(expected, rel=1e-12)


def test_the_rate_of_the_twin_moves_every_step() -> None:
    config = recipe("vit-b16-per-step")
    total, warmup = config.steps(300, IMAGENET), config.steps(150, IMAGENET)
    assert (total, warmup) == (11_730, 5_865)
    rates = [learning_rate(config, step, IMAGENET) for step in range(total + 1)]
    assert all(a < b for a, b in pairwise(rates[: warmup + 1]))
    assert all(a > b for a, b in pairwise(rates[warmup:]))
    assert (rates[warmup], rates[-1]) == (1.8e-2, 0)


def test_a_run_without_warmup_starts_at_the_peak() -> None:
    config = recipe("digits")
    config = replace(config, schedule=replace(config.schedule, warmup_epochs=0))
    assert learning_rate(config, 0, 1437) == 2e-2
