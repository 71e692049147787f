"""model.kwargs that no model can be built with: each is refused in one line, which names the argument."""

from typing import Any

import pytest
import torch
from timm.models import register_model

from dali_train.errors import ConfigError
from dali_train.training.model import build_model, check_sizes
from tests.config.test_config import PLAIN

META, CPU = torch.device("meta"), torch.device("cpu")
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def build(name: str, kwargs: dict[str, Any], device: torch.device = META, size: int = 32) -> None:
    config = PLAIN.replace(model={"name": name, "kwargs": kwargs}, data={"train_size": size, "eval_size": size})
    check_sizes(build_model(config, 5, device), config)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"embed_dim": -1}, r"model\.kwargs\.embed_dim is -1, .*: use other values"),
        ({"embed_dim": "x"}, r"model\.kwargs\.embed_dim is x, "),
        ({"patch_size": 0}, r"model\.kwargs\.patch_size is 0, .*ZeroDivisionError"),
        ({"num_heads": 5}, r"model\.kwargs is .*'num_heads': 5.*dim should be divisible"),
        ({"num_heads": 5, "depth": -1}, r"model\.kwargs is .*'num_heads': 5.*, with which timm cannot build"),
        ({"depth": 60_000}, r"model\.kwargs\.depth is 60000, .*more than 3,000 modules"),
        ({"img_size": 10**9}, r"model\.kwargs\.img_size is 1000000000: use numbers of at most 65,536"),
        ({"img_size": [[10**400]]}, r"model\.kwargs\.img_size is .*: use numbers of at most 65,536"),
        ({"depth_multiplier": 1e9}, r"model\.kwargs\.depth_multiplier is 1000000000\.0: use numbers of at most 10 "),
        ({"drop_path_rate": 5.0}, r"model\.kwargs\.drop_path_rate is 5\.0, .*from 0 to 1"),
        ({"drop_rate": float("nan")}, r"model\.kwargs\.drop_rate is nan, "),
        ({"act_layer": "nonsense"}, r"model\.kwargs\.act_layer is nonsense, "),
        ({"num_heds": 3}, r"model\.kwargs\.num_heds is not an argument of vit_tiny_\w+: use model\.kwargs\.num_heads"),
        ({"x": 3}, r"model\.kwargs\.x is not an argument of vit_tiny_patch16_224: leave it out"),
        ({"device": "cuda"}, r"model\.kwargs has device: leave it out, and set run\.device"),
        # A config.json may be somebody else's, and must not load files.
        ({"checkpoint_path": "a.pth"}, r"model\.kwargs has checkpoint_path, .*set model\.weights"),
        ({"pretrained": True}, r"model\.kwargs has pretrained, .*set model\.weights"),
        ({"pretrained_cfg": {}}, r"model\.kwargs has pretrained_cfg, .*set model\.weights"),
        ({"pretrained_cfg_overlay": {}}, r"model\.kwargs has pretrained_cfg_overlay, .*set model\.weights"),
        ({"features_only": True, "depth": 12}, r"model\.kwargs .*features_only.* returns no logits"),
        ({"global_pool": ""}, r"model\.kwargs .*global_pool.* returns no logits"),
        ({"img_size": 64}, r"data\.train_size is 32, .*: set data\.train_size 64, .* --model\.kwargs\.img_size 32"),
    ],
    ids=str,
)
def test_arguments_that_no_model_takes(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("vit_tiny_patch16_224", SMALL | kwargs)


def test_a_model_for_another_size_is_told_with_the_argument() -> None:
    small = {"embed_dim": 32, "depth": 1, "num_heads": 2}
    with pytest.raises(ConfigError, match=r": set data\.train_size 64, .* --model\.kwargs\.img_size 32"):
        build("dali_vit_small_patch16", {"img_size": 64, "out_indices": "", "features_only": 3, **small})


def test_a_rate_that_a_forward_pass_uses() -> None:
    with pytest.raises(ConfigError, match=r"model\.kwargs\.drop_rate is 33, .*from 0 to 1"):
        build("resnet18", {"drop_rate": 33})


def test_an_argument_that_a_forward_pass_refuses_is_not_taken_for_a_size() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.train_size is 32, .* model\.kwargs .*'drop_rate': 'x'.* other values"
    ):
        build("test_efficientnet", {"drop_rate": "x"})


@register_model
def model_without_timms_arguments(pretrained: bool = False, num_classes: int = 5) -> torch.nn.Module:
    return torch.nn.Linear(num_classes, num_classes)


def test_a_function_that_does_not_take_what_timm_passes() -> None:
    with pytest.raises(ConfigError, match=r"model\.name is model_without\w+: .* 'pretrained_cfg'.* take \*\*kwargs"):
        build("model_without_timms_arguments", {})


def test_weights_that_are_larger_than_the_hosts_memory() -> None:
    """They are not allocated: the model is built on the meta device first."""
    kwargs = {"img_size": 65_536, "patch_size": 1, "depth": 1}
    with pytest.raises(ConfigError, match=r"has weights of 3,2\d\d GB, .* use smaller values in model\.kwargs"):
        build("vit_tiny_patch16_224", kwargs, CPU)
