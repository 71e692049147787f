"""The models that timm lacks: what they compute, beside their sources' own numbers."""

from pathlib import Path

import pytest
import timm
import torch
from timm.layers import DropPath

from dali_train.config import ModelConfig, OptimizerConfig, ParallelConfig, load_config
from dali_train.errors import ConfigError
from dali_train.extras.models import ViT5
from dali_train.parallel.stages import VitStage, make_stages
from dali_train.training.model import build_model, check_sizes
from dali_train.training.optim import make_optimizer
from dali_train.training.pretrained import initialise_classifier
from tests.commands.test_mistakes import PLAIN
from tests.conftest import REPOSITORY, Train
from tests.helpers import FLOAT64_BOUND, losses, samples, state_difference, words

TINY = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def tiny_vit5(**kwargs: object) -> ViT5:
    return timm.create_model("dali_vit5_small_patch16", **TINY | kwargs)


def sines(count: int, frequency: float, phase: float = 0) -> torch.Tensor:
    return torch.sin(torch.arange(count, dtype=torch.float64) * frequency + phase)


def drop_rates(model: torch.nn.Module) -> list[float]:
    return [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_deit3_drops_paths_at_one_rate_and_decays_no_token(pipeline: int) -> None:
    """As its models_v2.py does, where timm's rates grow from 0 and its scripts alone exclude tokens."""
    config = load_config(REPOSITORY / "configs/deit3-s.py").replace({"model.kwargs.depth": 3})
    model = build_model(config, 10, torch.device("meta"))
    assert drop_rates(model) == [0.05] * 6
    if pipeline > 1:
        parallel = ParallelConfig(pipeline=pipeline, num_chunks=1)
        model = VitStage(model, make_stages(model, parallel)[0], torch.float32)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, excluded = (
        {names[id(p)] for p in group["params"]} for group in make_optimizer(model, config.optimizer).param_groups
    )
    assert {"pos_embed", "cls_token", "blocks.0.norm1.weight"} <= excluded
    assert {"blocks.0.attn.qkv.weight", "patch_embed.proj.weight"} <= decayed


def test_a_constant_drop_path_needs_a_rate() -> None:
    with pytest.raises(ConfigError, match=r"constant_drop_path is true, but model.kwargs has no drop_path_rate"):
        ModelConfig(name="vit_tiny_patch16_224", constant_drop_path=True)


def test_a_batch_norm_needs_more_than_one_pixel_for_a_micro_batch_of_1() -> None:
    sized = PLAIN.replace({"model.name": "resnet18", "data.train_size": 32, "data.eval_size": 32})
    alone = sized.replace({"batch.micro_batch": 1})
    model = build_model(alone, 10, torch.device("meta"))
    with pytest.raises(ConfigError, match=r"micro_batch is 1, but BatchNorm layer4\S+ of .* one pixel .* at least 2"):
        check_sizes(model, alone)
    check_sizes(model, sized)
    check_sizes(model, alone, trains=False)
    check_sizes(model, alone.replace({"data.train_size": 64}))
    frozen = alone.replace({"model.freeze": ("all-but-head",)})
    check_sizes(build_model(frozen, 10, torch.device("meta")), frozen)


def test_classifiers_begin_as_asked() -> None:
    names = {"test_resnet": ["fc"], "deit_tiny_distilled_patch16_224": ["head", "head_dist"]}
    for name, heads in names.items():
        settings = {"name": name, "init": "portable"}
        plain, scaled, biased = (
            build_model(PLAIN.replace(model={**settings, **more}), 5, torch.device("cpu")).state_dict()
            for more in ({}, {"head_scale": 0.5}, {"head_scale": 0.0, "head_bias": -1.5})
        )
        for key, weight in plain.items():
            of_head = key.rpartition(".")[0] in heads
            assert torch.equal(scaled[key], weight * 0.5 if of_head else weight)
            new = torch.full_like(weight, -1.5 if key.endswith("bias") else 0)
            assert torch.equal(biased[key], new if of_head else weight)
    with pytest.raises(
        ConfigError, match=r"^model.head_bias is -1, but timm knows no classifier of Linear that has one"
    ):
        initialise_classifier(torch.nn.Linear(2, 2), scale=1, bias=-1)


def test_vit5_has_the_logits_of_the_published_network() -> None:
    """Those of models_vit5.py (wangf3014/ViT-5 b7b0796) on a CPU, with the same weights, and all of it in float64,
    which its norms and the frequencies of its rotations are not."""
    model = tiny_vit5().double().eval()
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
            values = 0.5 * sines(parameter.numel(), 0.37 + 0.01 * number, number)
            parameter.copy_(values.reshape(parameter.shape))
    published = [
        [0.3059132258, 0.1418122134, 0.2839612152, -0.3589250345, -0.7235736761],
        [0.3018735067, 0.1361794466, 0.2921758658, -0.3593808571, -0.7314504771],
    ]
    logits = model(sines(2 * 3 * 64 * 64, 0.11).reshape(2, 3, 64, 64))
    torch.testing.assert_close(logits, torch.tensor(published, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("size", "millions"), [("small", 22.04), ("base", 86.54), ("large", 304.26)])
def test_vit5_has_as_many_weights_as_the_published_network(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(f"dali_vit5_{size}_patch16")
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.005)


def test_vit5_reads_files_of_the_published_network(tmp_path: Path) -> None:
    model = tiny_vit5()
    published = {name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): tensor + 1
                 for name, tensor in model.state_dict().items()}  # fmt: skip
    assert "blocks.1.gamma_2" in published
    torch.save({"model": published}, tmp_path / "vit5.pth")
    options = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "vit5.pth"), "num_classes": 5}}
    loaded = tiny_vit5(**options).state_dict()
    assert all(torch.equal(tensor + 1, loaded[name]) for name, tensor in model.state_dict().items())


def test_vit5_drops_paths_at_one_rate_and_decays_no_token() -> None:
    model = tiny_vit5(drop_path_rate=0.25, depth=3)
    assert drop_rates(model) == [0.25] * 6
    groups = make_optimizer(model, OptimizerConfig(lr=1.0, weight_decay=0.1, layer_decay=0.5)).param_groups
    (stem,) = (group for group in groups if any(parameter is model.reg_token for parameter in group["params"]))
    assert stem["weight_decay"] == 0
    assert stem["lr_scale"] == min(group["lr_scale"] for group in groups)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"dynamic_img_size": True}, TypeError, "dynamic_img_size True .* fixed position"),
        ({"reg_tokens": 3}, ValueError, "reg_tokens 3 is not a square"),
        ({"embed_dim": 12}, ValueError, "embed_dim / num_heads is 6"),
    ],
)
def test_vit5_refuses(kwargs: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiny_vit5(**kwargs)


@pytest.mark.thorough
def test_vit5_in_a_pipeline_differs_by_rounding(train: Train, tmp_path: Path) -> None:
    options = words(
        "--model.name dali_vit5_small_patch16 --model.kwargs.depth 3 --run.max_steps 3 --precision.dtype fp64 "
        "--model.kwargs.drop_path_rate 0.2"
    )
    train("one", *options)
    train("pipeline", *options, "--parallel.pipeline", "2", ranks=4)
    assert samples(tmp_path / "one") == samples(tmp_path / "pipeline")
    assert losses(tmp_path / "pipeline") == pytest.approx(losses(tmp_path / "one"), rel=1e-12)
    assert state_difference(tmp_path / "one", tmp_path / "pipeline") < FLOAT64_BOUND
