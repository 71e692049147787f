"""Models that timm lacks, registered with it. Only ``training/model.py`` imports this."""

from typing import Any

import torch
from timm.layers import lecun_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import nn

__all__ = ["dali_lenet", "dali_resnet34_cifar", "dali_vit_small_patch16"]  # timm lists these

default_cfgs = generate_default_cfgs(
    {
        "dali_lenet.untrained": {
            "num_classes": 10,
            "input_size": (3, 28, 28),
            "fixed_input_size": True,
            "crop_pct": 1.0,
            "mean": (0.1307,) * 3,
            "std": (0.3081,) * 3,
            "first_conv": "conv1",
            "classifier": "fc2",
        },
        "dali_resnet34_cifar.untrained": {
            "num_classes": 10,
            "input_size": (3, 32, 32),
            "crop_pct": 1.0,
            "mean": (0.4914, 0.4822, 0.4465),
            "std": (0.2023, 0.1994, 0.2010),
            "first_conv": "conv1",
            "classifier": "fc",
        },
        "dali_vit_small_patch16.untrained": {
            "input_size": (3, 224, 224),
            "fixed_input_size": True,
            "crop_pct": 0.875,
            "mean": (0.5,) * 3,
            "std": (0.5,) * 3,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
)


class LeNet(nn.Module):
    """Two convolutions of 5 x 5 with pooling, two linear layers: the network of PyTorch's early MNIST example.

    The data path delivers RGB, so a grey image has three equal channels: with in_chans 3 the first layer has more
    weights than with one channel, but no more expressive power.
    """

    def __init__(self, num_classes: int = 10, in_chans: int = 3, img_size: int | tuple[int, int] = 28) -> None:
        super().__init__()
        size = img_size if isinstance(img_size, int) else img_size[0]  # timm passes a pair
        side = ((size - 4) // 2 - 4) // 2
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = 500
        self.conv1 = nn.Conv2d(in_chans, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(50 * side * side, 500)
        self.fc2 = nn.Linear(500, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, num_classes) of images (n, in_chans, img_size, img_size)."""
        x = torch.max_pool2d(torch.relu(self.conv1(images)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        logits: torch.Tensor = self.fc2(torch.relu(self.fc1(x.flatten(1))))
        return logits


@register_model
def dali_lenet(pretrained: bool = False, **kwargs: Any) -> LeNet:
    model: LeNet = build_model_with_cfg(LeNet, "dali_lenet", pretrained, **kwargs)
    return model


class CifarResNet(ResNet):
    """timm's ResNet with a stem for images of 32 pixels: a 3 x 3 convolution without stride, and no max-pool."""

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        super().__init__(*arguments, **kwargs)
        old: Any = self.get_submodule("conv1")
        self.conv1 = nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.maxpool = nn.Identity()


@register_model
def dali_resnet34_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    settings = {"block": BasicBlock, "layers": (3, 4, 6, 3), **kwargs}
    model: CifarResNet = build_model_with_cfg(CifarResNet, "dali_resnet34_cifar", pretrained, **settings)
    return model


class SinCosVisionTransformer(VisionTransformer):
    """timm's ViT changed to match big_vision's config vit_s16_i1k.py (Beyer et al., arXiv 2205.01580).

    Position embeddings are fixed sines and cosines, the mean of all patches goes through a linear layer with tanh
    before the classifier, and weights are initialised as in Flax.
    """

    def __init__(self, **kwargs: Any) -> None:
        settings = {
            "class_token": False,
            "global_pool": "avg",
            "fc_norm": False,
            "act_layer": "gelu_tanh",
            "weight_init": "jax",
        }
        super().__init__(**{**settings, **kwargs})
        height, width = self.patch_embed.grid_size
        self.pos_embed = nn.Parameter(sines_and_cosines(height, width, self.embed_dim), requires_grad=False)
        # timm's forward pass applies it after pooling, before the classifier.
        representation = nn.Linear(self.embed_dim, self.embed_dim)
        lecun_normal_(representation.weight)
        nn.init.zeros_(representation.bias)
        self.fc_norm = nn.Sequential(representation, nn.Tanh())
        for block in self.blocks:  # Flax has separate matrices for queries, keys and values, initialised independently
            for part in block.attn.qkv.weight.chunk(3):
                nn.init.xavier_uniform_(part)


def sines_and_cosines(height: int, width: int, channels: int) -> torch.Tensor:
    """Return (1, height * width, channels): sines and cosines of x, then of y, with wavelengths from 2 pi to 20,000 pi
    patches."""
    frequencies = 10_000.0 ** -torch.linspace(0, 1, channels // 4)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = [place.flatten()[:, None] * frequencies for place in (x, y)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)[None]


@register_model
def dali_vit_small_patch16(pretrained: bool = False, **kwargs: Any) -> SinCosVisionTransformer:
    settings = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    model: SinCosVisionTransformer = build_model_with_cfg(
        SinCosVisionTransformer, "dali_vit_small_patch16", pretrained, **settings
    )
    return model
