"""Each shipped config against the numbers of the recipe that it claims to be, and the schedule they share."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

from dali_train.commands.plan import print_plan
from dali_train.config import Config, OptimizerConfig, load_config
from dali_train.config.augment import parse_augment
from dali_train.data.loading.augment import OPERATORS
from dali_train.errors import ConfigError
from dali_train.training.model import build_model, check_evaluation_size, check_training_size
from dali_train.training.optim import make_optimizer
from dali_train.training.schedule import learning_rate

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
    assert (config.batch.grad_accum_steps(4), config.batch.grad_accum_steps(8)) == (32, 16)
    assert (config.precision.dtype, config.optimizer.clip_grad_norm) == ("fp16", 1.0)
    assert (config.mixup.alpha, config.mixup.per_image) == (0.2, False)
    assert (config.data.train_size, config.data.eval_size, config.data.eval_resize_to) == (224, 224, 256)
    assert (config.data.crop_area, config.data.crop_aspect, config.data.horizontal_flip) == (
        (0.08, 1.0),
        (3 / 4, 4 / 3),
        0.5,
    )
    assert config.data.mean == config.data.std == (127.5, 127.5, 127.5)


def test_recipe_a_lamb_has_the_sources_arguments() -> None:
    """What timm's LAMB really gets: one group with all parameters, and none of timm's own defaults in the way."""
    config = recipe("vit-b16")
    small = config.replace({"model.kwargs.depth": 1})
    model = build_model(small, 1000, torch.device("meta"))
    (group,) = make_optimizer(model, config.optimizer).param_groups
    assert len(group["params"]) == len(list(model.parameters()))
    expected = {"lr": 1.8e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": False}
    expected |= {
        "max_grad_norm": None,
        "always_adapt": True,
        "decoupled_decay": False,
        "trust_clip": False,
        "grad_averaging": True,
    }
    assert {name: group[name] for name in expected} == expected


def test_recipe_as_lamb_is_the_papers() -> None:
    """By hand, in float64: Adam without bias correction plus decay, scaled to the weights' norm, for matrices and
    vectors."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3, dtype=torch.float64)
    optimizer = make_optimizer(model, recipe("vit-b16").optimizer)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for _ in range(5):
        for parameter, weight, m, v in zip(model.parameters(), weights, first, second, strict=True):
            parameter.grad = torch.randn_like(weight)
            m.mul_(0.9).add_(0.1 * parameter.grad)
            v.mul_(0.999).add_(0.001 * parameter.grad**2)
            update = m / (v.sqrt() + 1e-6) + 0.1 * weight
            weight.sub_(1.8e-2 * weight.norm() / update.norm() * update)
        optimizer.step()
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(parameter.detach(), weight, rtol=1e-9, atol=1e-12)


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
    config = config.replace({"schedule.warmup_epochs": 0})
    assert learning_rate(config, 0, 1437) == 2e-2


# ---------------------------------------------------------------------------------------------------------------
# The other recipes: the numbers of their sources, by setting
# ---------------------------------------------------------------------------------------------------------------

RSB: dict[str, Any] = {
    "model.name": "resnet50",
    "batch.global_batch": 2048,
    "optimizer.name": "lamb",
    "loss.name": "binary-cross-entropy",
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 5,
    "schedule.min_lr": 1e-6,
    "optimizer.exclude_vectors": True,
    "data.interpolation": "bicubic",
    "data.eval_size": 224,
    "data.eval_resize_to": 236,
    "mixup.cutmix_alpha": 1.0,
    "loss.target_threshold": 0.2,
}
DEIT: dict[str, Any] = {
    "batch.global_batch": 1024,
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-4,
    "optimizer.scale_lr": "linear",
    "optimizer.base_batch": 512,
    "optimizer.weight_decay": 0.05,
    "run.epochs": 300,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 5,
    "schedule.warmup_lr": 1e-6,
    "schedule.min_lr": 1e-5,
    "data.augment": "rand-m9-mstd0.5-inc1",
    "mixup.alpha": 0.8,
    "mixup.cutmix_alpha": 1.0,
    "loss.name": "cross-entropy",
    "loss.label_smoothing": 0.1,
    "data.random_erasing": 0.25,
    "data.random_erasing_fill": "noise",
    "model.kwargs": {"drop_path_rate": 0.1},
    "data.repeats": 3,
    "data.color_jitter": 0.3,
}
DEIT3: dict[str, Any] = {
    "batch.global_batch": 2048,
    "optimizer.name": "lamb",
    "optimizer.weight_decay": 0.05,
    "run.epochs": 800,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 5,
    "schedule.warmup_lr": 1e-6,
    "loss.name": "binary-cross-entropy",
    "data.augment": "3-augment",
    "data.color_jitter": 0.3,
    "mixup.alpha": 0.8,
    "mixup.cutmix_alpha": 1.0,
    "data.repeats": 3,
    "loss.target_threshold": 0.0,
    "loss.label_smoothing": 0.0,
    "optimizer.eps": 1e-8,
    "optimizer.clip_grad_norm": 1.0,
}
FINETUNE: dict[str, Any] = {
    "run.epochs": 20,
    "data.train_size": 224,
    "data.eval_size": 224,
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-5,
    "optimizer.weight_decay": 0.1,
    "batch.global_batch": 512,
    "data.augment": "rand-m9-mstd0.5-inc1",
    "data.repeats": 1,
    "data.color_jitter": 0.0,
    "loss.name": "cross-entropy",
    "loss.label_smoothing": 0.1,
    "mixup.alpha": 0.8,
    "mixup.cutmix_alpha": 1.0,
    "schedule.warmup_epochs": 5,
    "schedule.warmup_lr": 1e-6,
    "schedule.min_lr": 1e-5,
    "optimizer.clip_grad_norm": None,
}
BIG_VISION: dict[str, Any] = {
    "model.name": "dali_vit_small_patch16",
    "batch.global_batch": 1024,
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-3,
    "optimizer.weight_decay": 0.1,  # 1e-4 a step at this rate
    "optimizer.clip_grad_norm": 1.0,
    "schedule.warmup_steps": 10_000,
    "schedule.warmup_lr": 0.0,
    "schedule.name": "cosine",
    "data.augment": "big-vision",
    "data.crop": "inception",
    "data.crop_area": (0.05, 1.0),
    "data.crop_aspect": (0.75, 1.33),
    "mixup.alpha": 0.2,
    "data.horizontal_flip": 0.5,
    "loss.name": "cross-entropy",
    "data.normalise": "inception",
}
CIFAR = ((255 * 0.4914, 255 * 0.4822, 255 * 0.4465), (255 * 0.2023, 255 * 0.1994, 255 * 0.2010))
RESNET34: dict[str, Any] = {
    "batch.global_batch": 256,
    "batch.micro_batch": 128,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
    "optimizer.kwargs": {"momentum": 0.9, "nesterov": False},
    "optimizer.weight_decay": 5e-4,
    "schedule.name": "cosine",
    "schedule.step_every": "epoch",
    "precision.dtype": "fp16",
    "data.crop_side": 32,
    "data.crop_padding": 4,
    "data.horizontal_flip": 0.5,
    "data.normalise": CIFAR,
    "loss.name": "cross-entropy",
}
VIT_CIFAR: dict[str, Any] = {
    "model.name": "vit_base_patch16_224",
    "batch.micro_batch": 256,
    "run.epochs": 300,
    "optimizer.clip_grad_norm": 1.0,
    "data.augment": "auto-cifar10",
    "data.train_size": 224,
    "data.eval_size": 224,
    "data.eval_resize_to": 224,
}
VIT_CIFAR_LAMB = VIT_CIFAR | {
    "batch.global_batch": 256 * 16,
    "precision.dtype": "fp16",
    "optimizer.name": "lamb",
    "optimizer.lr": 1.8e-2,
    "optimizer.weight_decay": 0.1,
    "schedule.name": "linear",
    "schedule.warmup_epochs": 50,
    "mixup.alpha": 0.2,
    "model.kwargs": {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1},
}
SMALL_VIT: dict[str, Any] = {
    "model.name": "vit_tiny_patch16_224",
    "run.epochs": 100,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 5,
    "optimizer.weight_decay": 0.05,
    "optimizer.clip_grad_norm": 1.0,
    "data.crop_side": 32,
    "data.crop_padding": 4,
    "mixup.alpha": 0,
}
OURS: dict[str, Any] = {
    "model.name": "vit_base_patch16_224",
    "batch.global_batch": 32_768,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 30,
    "data.augment": "rand-m9-mstd0.5",
    "mixup.alpha": 0.8,
    "mixup.cutmix_alpha": 1.0,
    "model.kwargs": {"drop_path_rate": 0.1},
    "loss.name": "binary-cross-entropy",
    "ema.decay": 0.999,
}
LARS: dict[str, Any] = {
    "model.name": "resnet50",
    "optimizer.name": "lars",
    "schedule.name": "polynomial",
    "schedule.power": 2.0,
    "optimizer.kwargs": {"momentum": 0.95, "trust_coeff": 1e-3},
    "loss.label_smoothing": 0.1,
    "run.published_top1": 0.762,
}
RECIPES: dict[str, dict[str, Any]] = {
    "rsb-a1": RSB
    | {
        "run.epochs": 600,
        "optimizer.lr": 5e-3,
        "optimizer.weight_decay": 0.01,
        "data.train_size": 224,
        "mixup.alpha": 0.2,
        "loss.label_smoothing": 0.1,
        "model.kwargs": {"drop_path_rate": 0.05},
        "data.repeats": 3,
        "data.augment": "rand-m7-mstd0.5-inc1",
        "schedule.warmup_lr": 5e-7,
        "run.published_top1": 0.804,
    },
    "rsb-a2": RSB
    | {
        "run.epochs": 300,
        "optimizer.lr": 5e-3,
        "optimizer.weight_decay": 0.02,
        "data.train_size": 224,
        "mixup.alpha": 0.1,
        "loss.label_smoothing": 0.0,
        "model.kwargs": {"drop_path_rate": 0.05},
        "data.repeats": 3,
        "data.augment": "rand-m7-mstd0.5-inc1",
        "schedule.warmup_lr": 5e-7,
        "run.published_top1": 0.798,
    },
    "rsb-a3": RSB
    | {
        "run.epochs": 100,
        "optimizer.lr": 8e-3,
        "optimizer.weight_decay": 0.02,
        "data.train_size": 160,
        "mixup.alpha": 0.1,
        "loss.label_smoothing": 0.0,
        "model.kwargs": {},
        "data.repeats": 1,
        "data.augment": "rand-m6-mstd0.5-inc1",
        "schedule.warmup_lr": 8e-7,
        "run.published_top1": 0.781,
    },
    "deit-ti": DEIT | {"model.name": "deit_tiny_patch16_224", "run.published_top1": 0.722},
    "deit-s": DEIT | {"model.name": "deit_small_patch16_224", "run.published_top1": 0.799},
    "deit-b": DEIT | {"model.name": "deit_base_patch16_224", "run.published_top1": 0.818},
    "deit3-s": DEIT3
    | {
        "model.name": "deit3_small_patch16_224",
        "optimizer.lr": 4e-3,
        "data.train_size": 224,
        "model.kwargs": {"drop_path_rate": 0.05},
        "run.published_top1": 0.814,
    },
    "deit3-b": DEIT3
    | {
        "model.name": "deit3_base_patch16_224",
        "optimizer.lr": 3e-3,
        "data.train_size": 192,
        "model.kwargs": {"img_size": 192, "drop_path_rate": 0.2},
    },
    "deit3-l": DEIT3
    | {
        "model.name": "deit3_large_patch16_224",
        "optimizer.lr": 3e-3,
        "data.train_size": 192,
        "model.kwargs": {"img_size": 192, "drop_path_rate": 0.45},
    },
    "deit3-b-finetune": FINETUNE
    | {"model.kwargs": {"img_size": 224, "drop_path_rate": 0.2}, "run.published_top1": 0.838},
    "deit3-l-finetune": FINETUNE
    | {"model.kwargs": {"img_size": 224, "drop_path_rate": 0.45}, "run.published_top1": 0.849},
    "vit-s16-90ep": BIG_VISION | {"run.epochs": 90, "run.published_top1": 0.765},
    "vit-s16-300ep": BIG_VISION | {"run.epochs": 300, "run.published_top1": 0.80},
    "resnet34-cifar10": RESNET34 | {"model.name": "resnet34", "run.epochs": 2, "run.published_top1": 0.3589},
    "resnet34-cifar10-stem": RESNET34
    | {"model.name": "dali_resnet34_cifar", "run.epochs": 200, "run.published_top1": 0.953},
    "vit-b16-cifar10": VIT_CIFAR_LAMB | {"data.crop_side": 224, "data.crop_padding": 192},
    "vit-b16-cifar10-corrected": VIT_CIFAR_LAMB | {"data.crop_side": 32, "data.crop_padding": 4},
    "vit-b16-cifar10-adamw": VIT_CIFAR
    | {
        "batch.global_batch": 256,
        "optimizer.name": "adamw",
        "optimizer.lr": 3e-3,
        "optimizer.weight_decay": 0.3,
        "schedule.name": "cosine",
        "schedule.warmup_epochs": 32,
        "loss.label_smoothing": 0.1,
        "model.activation_checkpointing": True,
    },
    "small-vit-cifar10-adamw": SMALL_VIT
    | {
        "batch.global_batch": 512,
        "optimizer.name": "adamw",
        "optimizer.lr": 1e-3,
        "optimizer.betas": (0.9, 0.999),
    },
    "small-vit-cifar10-lamb": SMALL_VIT
    | {
        "batch.global_batch": 4096,
        "optimizer.name": "lamb",
        "optimizer.lr": 1e-2,
        "optimizer.betas": (0.9, 0.95),
    },
    "mnist": {
        "model.name": "dali_lenet",
        "optimizer.name": "sgd",
        "optimizer.lr": 0.01,
        "data.seed": 1,
        "run.epochs": 10,
        "optimizer.kwargs": {"momentum": 0.5, "nesterov": False},
        "batch.micro_batch": 128,
        "data.normalise": ((255 * 0.1307,) * 3, (255 * 0.3081,) * 3),
        "loss.name": "cross-entropy",
    },
    "vit-b16-randaugment": {
        "model.name": "vit_base_patch16_224",
        "data.augment": "colossalai",
        "data.horizontal_flip": 0.0,
        "batch.global_batch": 32_768,
        "run.epochs": 300,
        "optimizer.lr": 1.8e-2,
        "mixup.alpha": 0.2,
    },
    "vit-b16-randaugment-dali": {
        "model.name": "vit_base_patch16_224",
        "data.horizontal_flip": 0.0,
        "batch.global_batch": 32_768,
        "run.epochs": 300,
        "optimizer.lr": 1.8e-2,
        "mixup.alpha": 0.2,
    },
    "vit-b16-32k": OURS
    | {
        "optimizer.name": "lamb",
        "optimizer.bias_correction": True,
        "optimizer.exclude_vectors": True,
    },
    "vit-b16-32k-adamw": OURS
    | {"optimizer.name": "adamw", "optimizer.betas": (0.9, 0.95), "optimizer.scale_lr": "sqrt"},
    "resnet50-lars-57k": LARS
    | {
        "batch.global_batch": 57_344,
        "optimizer.lr": 23.0,
        "run.epochs": 78,
        "schedule.warmup_epochs": 32,
        "optimizer.weight_decay": 2.5e-5,
    },
    "resnet50-lars-40k": LARS
    | {
        "batch.global_batch": 40_448,
        "optimizer.lr": 19.4,
        "run.epochs": 70,
        "schedule.warmup_epochs": 24,
        "optimizer.weight_decay": 1e-4,
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_has_the_numbers_of_its_source(name: str) -> None:
    config = recipe(name)
    for setting, expected in RECIPES[name].items():
        section, field = setting.split(".")
        assert getattr(getattr(config, section), field) == expected, setting


def test_dalis_randaugment_at_magnitude_10_of_30() -> None:
    """DALI's suite and, at a third of its ranges, what each operator takes: pixels, tangents, degrees, factors, a mask,
    a limit."""
    from nvidia.dali.auto_aug.rand_augment import get_rand_augment_suite

    spec = parse_augment(recipe("vit-b16-randaugment-dali").data.augment)
    ours = {name.removesuffix("Increasing").rstrip("0123456789").lower() for name in spec.operators}
    assert ours == {operator.name.replace("_", "") for operator in get_rand_augment_suite()}
    assert (spec.num_layers, spec.probability, spec.magnitude) == (2, 1, pytest.approx(10 / 30 * 10, abs=1e-3))
    level = np.array([1 / 3], dtype=np.float32)
    arguments = {name: float(OPERATORS[name].argument(level, 224)[0]) for name in spec.operators}
    expected = {
        "TranslateX100": 100 / 3,
        "ShearX": 0.1,
        "Rotate": 10,
        "ColorIncreasing": 1.3,
        "Posterize8": 0b11111110,
        "SolarizeIncreasing": 171,
    }
    assert {name: arguments[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_every_config_is_compared() -> None:
    recipe_a = {"vit-b16", "vit-b32", "vit-l32", "vit-b16-per-step", "vit-b16-warmup50"}
    assert {path.stem for path in CONFIGS.glob("*.py")} == RECIPES.keys() | recipe_a | {"digits"}


ON_IMAGENET = [
    path.stem
    for path in sorted(CONFIGS.glob("*.py"))
    if not any(word in path.stem for word in ("cifar10", "mnist", "digits"))
]


@pytest.mark.parametrize("name", ON_IMAGENET)
def test_plan_accepts_it_for_1_to_128_ranks(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe(name)
    print_plan(config, world_size=128, num_images=IMAGENET, picture=None)
    assert f"{IMAGENET:,} in 1000 classes" in capsys.readouterr().out
    batch = config.batch  # all that depends on the number of ranks
    assert [batch.grad_accum_steps(ranks) * ranks * batch.micro_batch for ranks in (1, 4, 8, 128)] == [
        batch.global_batch
    ] * 4


@pytest.mark.parametrize("name", ["resnet34-cifar10", "resnet34-cifar10-stem", "mnist", "vit-b16-cifar10"])
def test_small_images_fit_their_model(name: str) -> None:
    config = recipe(name)
    model = build_model(config, 10, torch.device("meta"))
    check_training_size(model, config)
    check_evaluation_size(model, config)


def test_a_stem_for_cifar_keeps_the_pixels() -> None:
    model = build_model(recipe("resnet34-cifar10-stem"), 10, torch.device("cpu")).eval()
    assert isinstance(model, torch.nn.Module)
    features = model.forward_features(torch.zeros(1, 3, 32, 32))  # type: ignore[operator]
    assert features.shape == (1, 512, 4, 4)


def test_the_vit_of_big_vision() -> None:
    model = build_model(recipe("vit-s16-90ep"), 1000, torch.device("cpu"))
    positions = model.pos_embed
    assert (
        isinstance(positions, torch.nn.Parameter) and not positions.requires_grad and positions.shape == (1, 196, 384)
    )
    # Patch 17 is in row 1 and column 3 of 14: sin x, cos x, sin y, cos y, with 96 frequencies from 1 to 1 / 10,000.
    for column, expected in {0: np.sin(3), 95: np.sin(3e-4), 96: np.cos(3), 192: np.sin(1), 383: np.cos(1e-4)}.items():
        assert float(positions[0, 17, column]) == pytest.approx(expected, abs=1e-6)
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == (
        768 * 384
        + 384
        + 12 * (4 * 384 + 4 * (384 * 384 + 384) + 2 * 4 * 384 * 384 + 5 * 384)
        + 2 * 384
        + 384 * 385
        + 1000 * 385
    )
    logits = model(torch.randn(2, 3, 224, 224))
    assert logits.shape == (2, 1000) and not logits.any(), "the classifier begins at zero"
    with torch.no_grad():
        torch.nn.init.normal_(model.get_submodule("head").weight)  # type: ignore[arg-type]
        assert model(torch.randn(1, 3, 224, 224)).abs().max() < 60, "tanh bounds what the classifier sees"


# ---------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------


def test_lars_is_mlperfs() -> None:
    """By hand, in float64: each matrix by eta |w| / (|g| + decay |w|), vectors as plain momentum without decay, at a
    constant rate.

    MLPerf's sgdwfastlars keeps the rate inside the momentum, timm outside, so with a rate that moves they differ: there
    each earlier update is scaled by the ratio of the rates.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3, dtype=torch.float64)
    config = recipe("resnet50-lars-57k").optimizer
    optimizer = make_optimizer(model, replace(config, lr=2.0))
    weights = [p.detach().clone() for p in model.parameters()]
    momenta = [torch.zeros_like(w) for w in weights]
    for _ in range(5):
        gradients = [torch.randn_like(w) for w in weights]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            decay, trust = (2.5e-5, 1.0) if weight.ndim > 1 else (0.0, 1.0)
            if weight.ndim > 1:
                trust = 1e-3 * float(weight.norm() / (gradient.norm() + decay * weight.norm()))
            momentum.mul_(0.95).sub_(2.0 * trust * (gradient + decay * weight))
            weight.add_(momentum)
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(parameter.detach(), weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("exclude_vectors", [True, False])
def test_layer_decay_is_timms(exclude_vectors: bool) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=3)
    config = OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5, exclude_vectors=exclude_vectors)
    scales: dict[int, tuple[float, float]] = {}
    for group in make_optimizer(model, config).param_groups:
        scales |= {id(parameter): (group["lr_scale"], group["weight_decay"]) for parameter in group["params"]}
    seen = {name: scales[id(parameter)] for name, parameter in model.named_parameters()}
    vectors = 0.0 if exclude_vectors else 0.05
    assert seen["head.weight"] == (1.0, 0.05) and seen["head.bias"] == (1.0, vectors)
    blocks = [seen[f"blocks.{number}.mlp.fc1.weight"] for number in range(3)]
    assert [scale / blocks[0][0] for scale, _ in blocks] == [1, 2, 4] and {decay for _, decay in blocks} == {0.05}
    assert seen["patch_embed.proj.weight"][0] < blocks[0][0] and seen["pos_embed"][1] == vectors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.repeats": 3}, r"data.repeats 3 does not divide batch.micro_batch 256: use a multiple of 3 such as 255"),
        ({"mixup.alpha": 0.0, "mixup.prob": 0.5}, r"mixup.prob is 0.5, but nothing is mixed: set mixup.alpha"),
        ({"data.reader": "dali", "data.crop_side": 32}, r"data.reader is dali with data.crop_side 32"),
        ({"data.crop_padding": 4}, r"data.crop_padding is 4 without data.crop_side: set data.crop_side, such as 224"),
        (
            {"data.crop_side": 32, "data.crop_padding": 32},
            r"use less than data.crop_side, or a crop could miss the image",
        ),
        ({"data.random_erasing_fill": "noise"}, r"nothing is erased: set data.random_erasing, such as 0.25"),
        ({"data.split_repeats": True}, r"data.split_repeats is true with data.repeats 1"),
        ({"ema.decay": 1.0}, r"ema.decay is 1.0: use a share between 0 and 1"),
        ({"optimizer.layer_decay": 0.0}, r"optimizer.layer_decay is 0.0: use a factor over 0 and up to 1"),
        (
            {"data.crop": "inception", "data.crop_side": 32},
            r"data.crop is inception with data.crop_side 32",
        ),
        ({"loss.target_threshold": 0.2}, r"loss.target_threshold is 0.2 with loss.name cross-entropy"),
    ],
)
def test_what_cannot_be_combined_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe("vit-b16").replace(changes)


def test_layer_decay_needs_layers() -> None:
    model = build_model(recipe("mnist"), 10, torch.device("meta"))
    with pytest.raises(
        ConfigError, match=r"optimizer.layer_decay is 0.7, but the model \(LeNet\) does not say what its layers are"
    ):
        make_optimizer(model, OptimizerConfig(lr=0.1, layer_decay=0.7))
