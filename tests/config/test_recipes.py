"""The recipes that ship: each loads and plans, what it builds is what its source describes, and a wheel holds them."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision

from dali_train.cli import main
from dali_train.config import Config, OptimizerConfig, load_config
from dali_train.config.augment_spec import parse_augment
from dali_train.config.config import recipe_names, recipe_table
from dali_train.data.loading.augment import OPERATORS
from dali_train.errors import ConfigError
from dali_train.extras.plan.forecast import print_plan
from dali_train.training.cost import flops_per_image
from dali_train.training.model import build_model, check_sizes
from dali_train.training.optim import make_optimizer
from dali_train.training.schedule import learning_rate
from tests.conftest import REPOSITORY
from tests.helpers import in_tiers

IMAGENET = 1_281_167
CONFIGS = REPOSITORY / "configs"


NAMES = sorted(path.stem for path in CONFIGS.glob("*.py"))
ON_IMAGENET = [name for name in NAMES if not any(word in name for word in ("cifar10", "mnist", "digits"))]


def recipe(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.py")


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_and_says_how_to_run_it(name: str) -> None:
    docstring = (CONFIGS / f"{name}.py").read_text().split('"""')[1]
    assert f"--config configs/{name}.py" in docstring or "dali-train quickstart" in docstring
    config = recipe(name)
    assert config.run.dir == f"runs/{name}" or name in docstring.split()
    claimed = config.run.published_top1
    target = next(row[2] for row in recipe_table() if row[0] == name)
    assert claimed is None or f"{100 * claimed:g}" in docstring
    assert claimed is None or re.search(rf"{100 * claimed:g}(\.0)? %", target)


def test_every_recipe_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row[0] for row in recipe_table()] == [*dict.fromkeys(row[0] for row in recipe_table())]
    assert sorted(row[0] for row in recipe_table()) == recipe_names() == NAMES
    assert main(["recipes"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("rsb-a3 "))
    assert all(part in line for part in ("100 epochs", "78.1 %", "arXiv 2110.00476", "not run"))


@pytest.mark.thorough
def test_a_wheel_holds_the_recipes(tmp_path: Path) -> None:
    """Installed away from the repository: a recipe is found by name, and a file of that name still wins."""
    for name in ("dali_train", "configs"):
        shutil.copytree(REPOSITORY / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(tmp_path / "source")]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    subprocess.run([*pip, "install", *offline, "--target", str(installed), str(wheel)], check=True)
    elsewhere.mkdir()

    def dali_train(*words: str) -> str:
        process = subprocess.run(
            [sys.executable, "-m", "dali_train", *words],
            cwd=elsewhere,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
        )
        return process.stdout + process.stderr

    assert {line.split()[0] for line in dali_train("recipes").splitlines()[1:]} == set(NAMES)
    assert "--run.epochs = 100\n" in dali_train("train", "--config", "rsb-a3", "--help", "run.epochs")
    assert "did you mean rsb-a3, which ships?" in dali_train("train", "--config", "configs/rsb-a3.py")
    (elsewhere / "rsb-a3.py").write_text("config = 1 / 0")
    assert "rsb-a3.py, line 1: ZeroDivisionError" in dali_train("train", "--config", "rsb-a3.py")


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


@pytest.mark.parametrize("name", ON_IMAGENET)
def test_steps_divide_for_1_to_128_ranks(name: str) -> None:
    batch = recipe(name).batch  # all that depends on the number of ranks
    images = [batch.grad_accum_steps(ranks) * ranks * batch.micro_batch for ranks in (1, 4, 8, 128)]
    assert images == [batch.global_batch] * 4


ONE_OF_EACH = {(recipe(name).model.name, recipe(name).optimizer.name): name for name in ON_IMAGENET}


@pytest.mark.parametrize("name", in_tiers(ONE_OF_EACH.values(), "vit-b16-warmup50", "vit5-s"))
def test_plan_accepts_each_model_with_its_optimizer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe(name)
    fewer = {"depth": 2}  # the other blocks are alike
    for family, setting in (("resnet", "layers"), ("convnext", "depths")):
        if family in config.model.name:
            fewer = {setting: (1, 1, 1, 1)}
    changes = {f"model.kwargs.{setting}": value for setting, value in fewer.items()}
    config = config.replace({**changes, "model.weights": None})  # of a run that nobody has made here
    print_plan(config, world_size=128, num_images=IMAGENET, picture=None, gpu_name="h100")
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


def test_muon_steps_as_archiboxs_and_on_the_controls_samples() -> None:
    """One step in float64: a matrix moves along the orthogonal factor of its gradient, found by the singular value
    decomposition, times sqrt(rows / columns); a vector as NAdam moves it."""
    config, control = recipe("vit-s16-90ep-muon"), recipe("vit-s16-90ep")
    for section in ("data", "model", "batch", "mixup", "precision"):
        assert getattr(config, section) == getattr(control, section)
    rates = [learning_rate(config, round(epoch * IMAGENET / 1024), IMAGENET) for epoch in (0, 69.9, 80, 85)]
    assert rates == pytest.approx([0.03, 0.03, 0.015, 0.0075], rel=1e-4)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 32, dtype=torch.float64)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    make_optimizer(model, config.optimizer).step()
    moved = {
        name: (before[name] * (1 - rate * 0.01) - parameter.detach()) / rate
        for (name, parameter), rate in zip(model.named_parameters(), (0.03, 0.001), strict=True)
    }
    left, _, right = torch.linalg.svd(gradients["weight"], full_matrices=False)
    singular = left.mT @ moved["weight"] @ right.mT
    assert torch.linalg.norm(singular - singular.diag().diag()) < 1e-9
    assert singular.diag() == pytest.approx(torch.full((8,), 2.0), rel=0.15)  # five iterations leave as much
    assert moved["bias"] == pytest.approx(1.9 * gradients["bias"].sign(), rel=1e-6)  # (0.9 * 0.1 + 0.1) / 0.1


def test_the_runs_that_set_algoperfs_targets() -> None:
    """139,999 steps, three quarters of 186,666, and 6,999 of warmup; rates by the formulas of optax."""
    vit, resnet = recipe("algoperf-vit-s16"), recipe("algoperf-resnet50")
    total, warmup = 139_999, 6_999
    end = warmup + int((total - warmup) * 0.9007765761611038)
    for config in (vit, resnet):
        assert config.steps(config.run.epochs, IMAGENET) == total
    for step in (0, 1, 3_500, warmup - 1, warmup, warmup + 1, 73_499, end - 1, end, end + 1, total - 1):
        rising, progress = min(1, step / warmup), max(0, step - warmup) / (total - warmup)
        assert learning_rate(vit, step, IMAGENET) == pytest.approx(
            8.445074561975979e-4 * rising * 0.5 * (1 + np.cos(np.pi * progress)), rel=1e-9
        )
        left = 1 - min(1, max(0, step - warmup) / (end - warmup))
        assert learning_rate(resnet, step, IMAGENET) == pytest.approx(
            4.131896390902391 * rising * (0.001 + 0.999 * left), rel=1e-9
        )


@pytest.mark.parametrize("name", ["algoperf-vit-s16", "algoperf-resnet50"])
def test_algoperfs_optimizers_by_hand(name: str) -> None:
    """In float64. NAdamW is that of arXiv 1910.05446, table 1; all parameters have weight decay."""
    torch.manual_seed(0)
    model, config = torch.nn.Linear(5, 3, dtype=torch.float64), recipe(name).optimizer
    optimizer = make_optimizer(model, config)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    (b1, b2), lr, decay = (0.8895758153482813, 0.9978504782314613), config.lr, config.weight_decay
    for step in range(1, 5):
        for parameter, weight, m, v in zip(model.parameters(), weights, first, second, strict=True):
            gradient = parameter.grad = torch.randn_like(weight)
            if name == "algoperf-resnet50":
                m.mul_(0.9274758113254791).add_(gradient + decay * weight)
                weight.sub_(lr * m)
                continue
            m.mul_(b1).add_((1 - b1) * gradient)
            v.mul_(b2).add_((1 - b2) * gradient**2)
            ahead = (b1 * m + (1 - b1) * gradient) / (1 - b1**step)
            weight.sub_(lr * (ahead / ((v / (1 - b2**step)).sqrt() + 1e-8) + decay * weight))
        optimizer.step()
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(parameter.detach(), weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("epochs", "first", "last"), [(16, 11, 13), (88, 65, 76)])
def test_ffcvs_image_sizes_and_rates(epochs: int, first: int, last: int) -> None:
    """Sizes by the script's interpolation between the epochs in its config; rates are those that its run of 16 epochs
    logged at the end of an epoch (assets/agg.csv at 4dd291a)."""
    config = recipe(f"ffcv-resnet50-{epochs}ep")
    for epoch in range(epochs):
        expected = round(float(np.interp(epoch, [first, last], [160, 192])) / 32) * 32
        assert next((size for until, size in config.data.progressive if epoch < until), 192) == expected
    logged = {0: 0.8473609134615381, 1: 1.697275913461538, 2: 1.578960622710622, 11: 0.486103479853479, 15: 0.00038919}
    for epoch, rate in logged.items() if epochs == 16 else ():
        step = round((epoch + 311 / 312) * IMAGENET / 4096)  # the script drops the last images of an epoch
        assert learning_rate(config, step, IMAGENET) == pytest.approx(rate, abs=0.85 / 312)


@pytest.mark.parametrize(("name", "multiply_adds"), [("convnext-t", 4.5e9), ("rsb-a2", 4.1e9), ("vit-s16-90ep", 4.6e9)])
def test_flops_are_three_times_those_of_the_published_forward_pass(name: str, multiply_adds: float) -> None:
    """ConvNeXt-T has depthwise convolutions."""
    assert flops_per_image(recipe(name), 1000) == pytest.approx(3 * 2 * multiply_adds, rel=0.02)


def test_ffcvs_blurred_network() -> None:
    """torchvision's ResNet-50 with the inputs of six convolutions blurred, and its weight decay: on all but what it
    calls bn."""
    torch.manual_seed(0)
    config = recipe("ffcv-resnet50-16ep").replace({"model.channels_last": False})
    model = build_model(config, 1000, torch.device("cpu")).eval()
    reference = torchvision.models.resnet50().eval()
    reference.load_state_dict(model.state_dict())
    row = torch.tensor([0.25, 0.5, 0.25])
    for name, layer in reference.named_modules():
        if re.fullmatch(r"layer[234]\.0\.(conv2|downsample\.0)", name):
            blur = torch.nn.Conv2d(layer.in_channels, layer.in_channels, 3, 1, 1, 1, layer.in_channels, bias=False)
            blur.weight.data[:] = torch.outer(row, row)
            layer.register_forward_pre_hook(lambda _, inputs, blur=blur: blur(inputs[0]))
    images = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        torch.testing.assert_close(model(images), reference(images), rtol=1e-4, atol=1e-4)
    decays = {
        id(parameter): group["weight_decay"]
        for group in make_optimizer(model, config.optimizer).param_groups
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0 if "bn" in name else 1e-4), name


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
    assert seen["head.weight"] == (1.0, 0.05)
    assert seen["head.bias"] == (1.0, vectors)
    blocks = [seen[f"blocks.{number}.mlp.fc1.weight"] for number in range(3)]
    assert [scale / blocks[0][0] for scale, _ in blocks] == [1, 2, 4]
    assert {decay for _, decay in blocks} == {0.05}
    assert seen["patch_embed.proj.weight"][0] < blocks[0][0]
    assert seen["pos_embed"][1] == vectors


def test_layer_decay_needs_layers() -> None:
    model = build_model(recipe("mnist"), 10, torch.device("meta"))
    with pytest.raises(
        ConfigError, match=r"optimizer.layer_decay is 0.7, but the model \(LeNet\) does not declare its layers"
    ):
        make_optimizer(model, OptimizerConfig(lr=0.1, layer_decay=0.7))
