"""Patch embeddings as matrix products, as on a GPU."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F

from dali_train.training.model import embed_patches_by_products


@pytest.mark.parametrize(
    ("name", "size", "kwargs"),
    [
        ("vit_tiny_patch16_224", (48, 32), {"img_size": (48, 32)}),
        ("vit_tiny_patch16_224", (50, 40), {"dynamic_img_size": True, "dynamic_img_pad": True}),
        ("swin_tiny_patch4_window7_224", (224, 224), {}),
    ],
)
def test_the_embedding_is_that_of_a_convolution(
    name: str, size: tuple[int, int], kwargs: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = timm.create_model(name, num_classes=3, **kwargs).double()
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    changed = copy.deepcopy(model)
    embed_patches_by_products(changed)
    expected = model.patch_embed(images)
    expected.square().sum().backward()
    changed = copy.deepcopy(changed)  # as for a moving average
    assert changed.state_dict().keys() == model.state_dict().keys()

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("a convolution")

    monkeypatch.setattr(F, "conv2d", refuse)
    monkeypatch.setattr(torch.nn.Conv2d, "_conv_forward", refuse)
    for embed in (changed.patch_embed, torch.compile(changed.patch_embed, backend="eager", fullgraph=True)):
        changed.zero_grad()
        embedded = embed(images)
        embedded.square().sum().backward()
        assert torch.allclose(embedded, expected, rtol=1e-12, atol=1e-12)
        gradients = [net.patch_embed.proj.weight.grad for net in (changed, model)]
        assert torch.allclose(*gradients, rtol=1e-10, atol=1e-10)
