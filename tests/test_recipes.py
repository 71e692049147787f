"""Each shipped config against the numbers of its source, and what it builds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

from dali_train.commands.plan import print_plan
from dali_train.config import Config, OptimizerConfig, load_config
from dali_train.config.augment_spec import parse_augment
from dali_train.data.loading.augment import OPERATORS
from dali_train.errors import ConfigError
from dali_train.training.model import build_model, check_sizes
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


# ---------------------------------------------------------------------------------------------------------------
# The numbers of the sources: a config that is changed to them stays as it is. None: the source has no such argument.
# ---------------------------------------------------------------------------------------------------------------

Numbers = dict[str, dict[str, Any]]
COLOSSALAI: Numbers = dict(
    model=dict(kwargs=dict(pos_drop_rate=0.1, proj_drop_rate=0.1)),
    batch=dict(global_batch=32_768, micro_batch=256),
    optimizer=dict(name="lamb", lr=1.8e-2, weight_decay=0.1, clip_grad_norm=1.0),
    schedule=dict(name="linear", step_every="epoch"),
    mixup=dict(alpha=0.2, cutmix_alpha=0),
    precision=dict(dtype="fp16"),
    data=dict(train_size=224, eval_size=224, crop_area=(0.08, 1.0), crop_aspect=(3 / 4, 4 / 3), normalise="inception"),
    run=dict(epochs=300),
)
BASE: Numbers = dict(model=dict(name="vit_base_patch16_224"))
LONG_WARMUP: Numbers = dict(schedule=dict(warmup_epochs=150), data=dict(horizontal_flip=0.5))
COSINE: Numbers = dict(schedule=dict(name="cosine", warmup_epochs=5))
RSB: Numbers = dict(
    model=dict(name="resnet50"),
    batch=dict(global_batch=2048),
    optimizer=dict(name="lamb", exclude_vectors=True),
    loss=dict(name="binary-cross-entropy", target_threshold=0.2),
    schedule=dict(min_lr=1e-6),
    data=dict(interpolation="bicubic", eval_size=224, eval_resize_to=236),
    mixup=dict(cutmix_alpha=1.0),
)
RSB_LONG: Numbers = dict(
    optimizer=dict(lr=5e-3),
    data=dict(train_size=224, repeats=3, augment="rand-m7-mstd0.5-inc1"),
    model=dict(kwargs=dict(drop_path_rate=0.05)),
    schedule=dict(warmup_lr=5e-7),
)
FACEBOOK: Numbers = dict(mixup=dict(alpha=0.8, cutmix_alpha=1.0), schedule=dict(warmup_lr=1e-6, min_lr=1e-5))
DEIT: Numbers = dict(
    batch=dict(global_batch=1024),
    optimizer=dict(name="adamw", lr=2.5e-4, scale_lr="linear", weight_decay=0.05),
    run=dict(epochs=300),
    data=dict(augment="rand-m9-mstd0.5-inc1", random_erasing=0.25, repeats=3, color_jitter=0.3),
    loss=dict(name="cross-entropy", label_smoothing=0.1),
    model=dict(kwargs=dict(drop_path_rate=0.1)),
)
DEIT3: Numbers = dict(
    batch=dict(global_batch=2048),
    optimizer=dict(name="lamb", weight_decay=0.05, eps=1e-8, clip_grad_norm=1.0),
    run=dict(epochs=800),
    loss=dict(name="binary-cross-entropy", target_threshold=0.0, label_smoothing=0.0),
    data=dict(augment="3-augment", color_jitter=0.3, repeats=3),
)
DEIT3_192: Numbers = dict(optimizer=dict(lr=3e-3), data=dict(train_size=192), model=dict(kwargs=dict(img_size=192)))
FINETUNE: Numbers = dict(
    run=dict(epochs=20),
    data=dict(train_size=224, eval_size=224, augment="rand-m9-mstd0.5-inc1", repeats=1, color_jitter=0.0),
    optimizer=dict(name="adamw", lr=1e-5, weight_decay=0.1, clip_grad_norm=None),
    batch=dict(global_batch=512),
    loss=dict(name="cross-entropy", label_smoothing=0.1),
)
BIG_VISION: Numbers = dict(
    model=dict(name="dali_vit_small_patch16"),
    batch=dict(global_batch=1024),
    optimizer=dict(name="adamw", lr=1e-3, weight_decay=0.1, clip_grad_norm=1.0),  # 1e-4 a step at this rate
    schedule=dict(name="cosine", warmup_epochs=10_000 * 1024 / 1_281_167, warmup_lr=0.0),
    data=dict(
        augment="big-vision",
        crop="inception",
        crop_area=(0.05, 1.0),
        crop_aspect=(0.75, 1.33),
        horizontal_flip=0.5,
        normalise="inception",
    ),
    mixup=dict(alpha=0.2),
    loss=dict(name="cross-entropy"),
)
CIFAR: Numbers = dict(data=dict(crop_side=32, crop_padding=4, normalise="cifar10"))
RESNET34: Numbers = dict(
    batch=dict(global_batch=256, micro_batch=128),
    optimizer=dict(name="sgd", lr=0.1, kwargs=dict(momentum=0.9, nesterov=False), weight_decay=5e-4),
    schedule=dict(name="cosine", step_every="epoch"),
    precision=dict(dtype="fp16"),
    data=dict(horizontal_flip=0.5),
    loss=dict(name="cross-entropy"),
)
VIT_CIFAR: Numbers = dict(
    model=dict(name="vit_base_patch16_224"),
    batch=dict(micro_batch=256),
    run=dict(epochs=300),
    optimizer=dict(clip_grad_norm=1.0),
    data=dict(augment="auto-cifar10", train_size=224, eval_size=224, eval_resize_to=224),
)
VIT_CIFAR_LAMB: Numbers = COLOSSALAI | dict(
    batch=dict(global_batch=256 * 16), schedule=dict(name="linear", warmup_epochs=50), data={}
)
SMALL_VIT: Numbers = dict(
    model=dict(name="vit_tiny_patch16_224"),
    run=dict(epochs=100),
    optimizer=dict(weight_decay=0.05, clip_grad_norm=1.0),
    mixup=dict(alpha=0),
)
OURS: Numbers = dict(
    model=dict(name="vit_base_patch16_224", kwargs=dict(drop_path_rate=0.1, pos_drop_rate=None)),
    batch=dict(global_batch=32_768),
    schedule=dict(name="cosine", warmup_epochs=30),
    data=dict(augment="rand-m9-mstd0.5"),
    mixup=dict(alpha=0.8, cutmix_alpha=1.0),
    loss=dict(name="binary-cross-entropy"),
    ema=dict(decay=0.999),
)
LARS: Numbers = dict(
    model=dict(name="resnet50"),
    optimizer=dict(name="lars", kwargs=dict(momentum=0.95, trust_coeff=1e-3)),
    schedule=dict(name="polynomial", power=2.0),
    loss=dict(label_smoothing=0.1),
)


def published(top1: float, **more: dict[str, Any]) -> Numbers:
    return dict(run=dict(published_top1=top1, **more.pop("run", {})), **more)


SOURCES: dict[str, tuple[Numbers, ...]] = {
    "vit-b16": (COLOSSALAI, LONG_WARMUP, BASE),
    "vit-b32": (COLOSSALAI, LONG_WARMUP, dict(model=dict(name="vit_base_patch32_224"))),
    "vit-l32": (COLOSSALAI, LONG_WARMUP, dict(model=dict(name="vit_large_patch32_224"))),
    "vit-b16-per-step": (COLOSSALAI | dict(schedule=dict(step_every="step")), LONG_WARMUP, BASE),
    "vit-b16-warmup50": (COLOSSALAI, BASE, dict(schedule=dict(warmup_epochs=50))),
    "vit-b16-randaugment": (COLOSSALAI, BASE, dict(data=dict(augment="colossalai", horizontal_flip=0.0))),
    "vit-b16-randaugment-dali": (COLOSSALAI, BASE, dict(data=dict(horizontal_flip=0.0))),
    "rsb-a1": (
        *(RSB, COSINE, RSB_LONG),
        published(0.804, run=dict(epochs=600), optimizer=dict(weight_decay=0.01), mixup=dict(alpha=0.2)),
        dict(loss=dict(label_smoothing=0.1)),
    ),
    "rsb-a2": (
        *(RSB, COSINE, RSB_LONG),
        published(0.798, run=dict(epochs=300), optimizer=dict(weight_decay=0.02), mixup=dict(alpha=0.1)),
        dict(loss=dict(label_smoothing=0.0)),
    ),
    "rsb-a3": (
        *(RSB, COSINE),
        published(0.781, run=dict(epochs=100), optimizer=dict(lr=8e-3, weight_decay=0.02), mixup=dict(alpha=0.1)),
        dict(
            loss=dict(label_smoothing=0.0), schedule=dict(warmup_lr=8e-7), model=dict(kwargs=dict(drop_path_rate=None))
        ),
        dict(data=dict(train_size=160, repeats=1, augment="rand-m6-mstd0.5-inc1")),
    ),
    "deit-ti": (DEIT, FACEBOOK, COSINE, published(0.722, model=dict(name="deit_tiny_patch16_224"))),
    "deit-s": (DEIT, FACEBOOK, COSINE, published(0.799, model=dict(name="deit_small_patch16_224"))),
    "deit-b": (DEIT, FACEBOOK, COSINE, published(0.818, model=dict(name="deit_base_patch16_224"))),
    "deit3-s": (
        *(DEIT3, FACEBOOK, COSINE),
        published(0.814, model=dict(name="deit3_small_patch16_224", kwargs=dict(drop_path_rate=0.05))),
        dict(optimizer=dict(lr=4e-3), data=dict(train_size=224)),
    ),
    "deit3-b": (
        *(DEIT3, FACEBOOK, COSINE, DEIT3_192),
        dict(model=dict(name="deit3_base_patch16_224", kwargs=dict(drop_path_rate=0.2))),
    ),
    "deit3-l": (
        *(DEIT3, FACEBOOK, COSINE, DEIT3_192),
        dict(model=dict(name="deit3_large_patch16_224", kwargs=dict(drop_path_rate=0.45))),
    ),
    "deit3-b-finetune": (
        *(FINETUNE, FACEBOOK, COSINE),
        published(0.838, model=dict(name="deit3_base_patch16_224", kwargs=dict(img_size=224, drop_path_rate=0.2))),
    ),
    "deit3-l-finetune": (
        *(FINETUNE, FACEBOOK, COSINE),
        published(0.849, model=dict(name="deit3_large_patch16_224", kwargs=dict(img_size=224, drop_path_rate=0.45))),
    ),
    "vit-s16-90ep": (BIG_VISION, published(0.765, run=dict(epochs=90))),
    "vit-s16-300ep": (BIG_VISION, published(0.80, run=dict(epochs=300))),
    "resnet34-cifar10": (RESNET34, CIFAR, published(0.3589, run=dict(epochs=2), model=dict(name="resnet34"))),
    "resnet34-cifar10-stem": (
        *(RESNET34, CIFAR),
        published(0.953, run=dict(epochs=200), model=dict(name="dali_resnet34_cifar")),
    ),
    "vit-b16-cifar10": (VIT_CIFAR, VIT_CIFAR_LAMB, dict(data=dict(crop_side=224, crop_padding=192))),
    "vit-b16-cifar10-corrected": (VIT_CIFAR, VIT_CIFAR_LAMB, CIFAR),
    "vit-b16-cifar10-adamw": (
        VIT_CIFAR,
        dict(batch=dict(global_batch=256), optimizer=dict(name="adamw", lr=3e-3, weight_decay=0.3)),
        dict(schedule=dict(name="cosine", warmup_epochs=32), loss=dict(label_smoothing=0.1)),
        dict(model=dict(activation_checkpointing=True, kwargs=dict(pos_drop_rate=None))),
    ),
    "small-vit-cifar10-adamw": (
        *(SMALL_VIT, COSINE, CIFAR),
        dict(batch=dict(global_batch=512), optimizer=dict(name="adamw", lr=1e-3, betas=(0.9, 0.999))),
    ),
    "small-vit-cifar10-lamb": (
        *(SMALL_VIT, COSINE, CIFAR),
        dict(batch=dict(global_batch=4096), optimizer=dict(name="lamb", lr=1e-2, betas=(0.9, 0.95))),
    ),
    "mnist": (
        dict(model=dict(name="dali_lenet"), batch=dict(micro_batch=128), run=dict(epochs=10)),
        dict(optimizer=dict(name="sgd", lr=0.01, kwargs=dict(momentum=0.5, nesterov=False))),
        dict(data=dict(seed=1, normalise="mnist"), loss=dict(name="cross-entropy")),
    ),
    "vit-b16-32k": (OURS, dict(optimizer=dict(name="lamb", kwargs={}, exclude_vectors=True))),
    "vit-b16-32k-adamw": (OURS, dict(optimizer=dict(name="adamw", betas=(0.9, 0.95), scale_lr="sqrt"))),
    "resnet50-lars-57k": (
        LARS,
        published(0.762, run=dict(epochs=78), batch=dict(global_batch=57_344), schedule=dict(warmup_epochs=32)),
        dict(optimizer=dict(lr=23.0, weight_decay=2.5e-5)),
    ),
    "resnet50-lars-40k": (
        LARS,
        published(0.762, run=dict(epochs=70), batch=dict(global_batch=40_448), schedule=dict(warmup_epochs=24)),
        dict(optimizer=dict(lr=19.4, weight_decay=1e-4)),
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_config_has_the_numbers_of_its_source(name: str) -> None:
    for numbers in SOURCES[name]:
        assert recipe(name).replace(**numbers) == recipe(name)


def test_every_config_is_compared() -> None:
    assert {path.stem for path in CONFIGS.glob("*.py")} == SOURCES.keys() | {"digits"}


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


def test_the_rate_moves_once_an_epoch_as_in_the_source() -> None:
    config = recipe("vit-b16")
    for epoch in (0, 1, 75, 149, 150, 151, 225, 299):
        expected = (epoch + 1) / 151 * 1.8e-2 if epoch < 150 else (300 - epoch) / 150 * 1.8e-2
        first = -(-epoch * IMAGENET // 32_768)
        last = -(-(epoch + 1) * IMAGENET // 32_768) - 1
        assert learning_rate(config, first, IMAGENET) == pytest.approx(expected, rel=1e-12)
        assert learning_rate(config, last, IMAGENET) == pytest.approx(expected, rel=1e-12)


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


ON_IMAGENET = [name for name in SOURCES if not any(word in name for word in ("cifar10", "mnist"))]


@pytest.mark.parametrize("name", ON_IMAGENET)
def test_steps_divide_for_1_to_128_ranks(name: str) -> None:
    batch = recipe(name).batch  # all that depends on the number of ranks
    images = [batch.grad_accum_steps(ranks) * ranks * batch.micro_batch for ranks in (1, 4, 8, 128)]
    assert images == [batch.global_batch] * 4


ONE_OF_EACH = {(recipe(name).model.name, recipe(name).optimizer.name): name for name in ON_IMAGENET}


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_plan_accepts_each_model_with_its_optimizer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe(name)
    fewer = {"layers": (1, 1, 1, 1)} if "resnet" in config.model.name else {"depth": 2}  # the other blocks are alike
    changes = {f"model.kwargs.{setting}": value for setting, value in fewer.items()}
    config = config.replace({**changes, "model.weights": None})  # of a run that nobody has made here
    print_plan(config, world_size=128, num_images=IMAGENET, picture=None)
    assert f"{IMAGENET:,} in 1000 classes" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["resnet34-cifar10", "resnet34-cifar10-stem", "mnist", "vit-b16-cifar10"])
def test_small_images_fit_their_model(name: str) -> None:
    config = recipe(name)
    model = build_model(config, 10, torch.device("meta"))
    check_sizes(model, config)


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


def test_layer_decay_needs_layers() -> None:
    model = build_model(recipe("mnist"), 10, torch.device("meta"))
    with pytest.raises(
        ConfigError, match=r"optimizer.layer_decay is 0.7, but the model \(LeNet\) does not declare its layers"
    ):
        make_optimizer(model, OptimizerConfig(lr=0.1, layer_decay=0.7))
