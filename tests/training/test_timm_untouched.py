"""timm is left as it is: importing this package, and what it builds, change nothing for other users of timm."""

import copy
from pathlib import Path

import timm
import torch
from timm.models import deit, eva, vision_transformer
from timm.optim import muon

from dali_train.config import load_config
from dali_train.training.model import build_model, resample_position_embedding
from dali_train.training.optim import make_optimizer

PLACES = (
    *((module, "resample_abs_pos_embed") for module in (vision_transformer, deit, eva)),
    (muon, "zeropower_via_newtonschulz"),
    (muon.Muon, "step"),
    (vision_transformer.VisionTransformer, "_pos_embed"),
)


def test_timms_functions_are_timms(tiny_config: Path) -> None:
    config = load_config(tiny_config).replace({"optimizer.name": "muon", "model.kwargs.dynamic_img_size": True})
    model = build_model(config, 3, torch.device("cpu"))
    optimizer = make_optimizer(model, config.optimizer)
    model(torch.zeros(2, 3, 48, 48)).sum().backward()
    optimizer.step()
    for place, name in PLACES:
        assert getattr(place, name).__module__.startswith("timm."), (place, name)


def test_only_the_models_own_embeddings_are_resampled_by_products(tiny_config: Path) -> None:
    """timm's bicubic interpolation has no deterministic backward pass on a GPU; both compute the same."""
    config = load_config(tiny_config).replace({"model.kwargs.dynamic_img_size": True})
    ours = build_model(config, 3, torch.device("cpu")).eval()
    theirs = timm.create_model(config.model.name, num_classes=3, **config.model.kwargs).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 48, 48)
    for model in (ours, copy.deepcopy(ours)):
        assert model._pos_embed.__func__.__globals__["resample_abs_pos_embed"] is resample_position_embedding
        assert model._pos_embed.__self__ is model
        torch.testing.assert_close(model(images), theirs(images), rtol=1e-4, atol=1e-5)
    assert "_pos_embed" not in vars(theirs)
