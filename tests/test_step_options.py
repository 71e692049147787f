"""Compiled models and recomputed activations: the same numbers for a micro-batch, whatever ran before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch._dynamo.utils import counters

from dali_train.config import ModelConfig, load_config
from dali_train.model import build_model, repeated_blocks

CPU = torch.device("cpu")


def model(config: Path, **fields: Any) -> nn.Module:
    """The tests' ViT: dropout, stochastic depth."""
    loaded = load_config(config)
    return build_model(replace(loaded, model=ModelConfig(**{**vars(loaded.model), **fields})), 5, CPU).train()


def gradients(model: nn.Module, images: torch.Tensor, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(images).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(a, b, strict=True))


@pytest.mark.parametrize("fields", [{"compile": "model"}, {"compile": "blocks", "activation_checkpointing": True}], ids=str)
def test_dropout_belongs_to_the_micro_batch(tiny_config: Path, fields: dict[str, Any]) -> None:
    compiled = model(tiny_config, **fields)
    images = torch.randn(4, 3, 32, 32)
    first = gradients(compiled, images, seed=1)
    assert not equal(first, gradients(compiled, images, seed=2)), "dropout is on"
    # What an evaluation does, with last batches of several sizes.
    graphs = []
    for sizes in ((4, 4, 3), (4, 1), (5, 2), (6,), (7, 3)):
        with torch.inference_mode():
            compiled.eval()
            for size in sizes:
                compiled(torch.randn(size, 3, 32, 32))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[2:] == graphs[2:3] * 3, "no graph for each batch size"
    compiled.train()
    torch.rand(17)
    assert equal(first, gradients(compiled, images, seed=1))
    assert graphs[-1] == counters["stats"]["unique_graphs"], "nor anew for training"
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in model(tiny_config).named_parameters()]


def test_recomputed_activations_change_no_gradient(tiny_config: Path) -> None:
    images = torch.randn(4, 3, 32, 32)
    kept = [0, 0]
    found = []
    for number, checkpointing in enumerate((False, True)):

        def keep(tensor: torch.Tensor, number: int = number) -> torch.Tensor:
            kept[number] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found.append(gradients(model(tiny_config, activation_checkpointing=checkpointing), images, seed=1))
    assert equal(*found)
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize(
    ("name", "block", "count"),
    [
        ("vit_tiny_patch16_224", "Block", 12),
        ("swin_tiny_patch4_window7_224", "SwinTransformerBlock", 12),  # not the four stages
        ("convnext_tiny", "ConvNeXtBlock", 18),
        ("resnet50", "Bottleneck", 16),
        ("mixer_b16_224", "MixerBlock", 12),
        ("vgg11", "", 0),
    ],
)
def test_blocks_are_found_by_structure(name: str, block: str, count: int) -> None:
    with torch.device("meta"):
        blocks = repeated_blocks(timm.create_model(name))
    assert len(blocks) == count and {type(found).__name__ for found in blocks} <= {block}
