"""Models that timm lacks, registered with it: importing this is enough. Their names begin with dali_."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, RmsNorm, apply_rot_embed_cat, lecun_normal_, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from dali_train.training.model import make_drop_path_constant

__all__ = [  # timm lists these
    "dali_lenet",
    "dali_resnet34_cifar",
    "dali_resnet50_blur",
    "dali_vit5_base_patch16",
    "dali_vit5_large_patch16",
    "dali_vit5_small_patch16",
    "dali_vit_small_patch16",
]

_VIT5_CFG = {
    "input_size": (3, 224, 224),
    "fixed_input_size": True,
    "crop_pct": 1.0,
    "interpolation": "bicubic",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "first_conv": "patch_embed.proj",
    "classifier": "head",
}

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
        "dali_resnet50_blur.untrained": {
            "input_size": (3, 224, 224),
            "crop_pct": 0.875,
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
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
        "dali_vit5_small_patch16.untrained": _VIT5_CFG,
        "dali_vit5_base_patch16.untrained": _VIT5_CFG,
        "dali_vit5_large_patch16.untrained": _VIT5_CFG,
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


class BlurredConv2d(nn.Conv2d):
    """A convolution of its input blurred by the 3 x 3 binomial filter, against aliasing where it has a stride.

    timm's `aa_layer` blurs the output of a convolution without stride instead, which costs four times as much.
    """

    blur: torch.Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        size: Any = {name: getattr(conv, name) for name in ("kernel_size", "stride", "padding")}
        super().__init__(conv.in_channels, conv.out_channels, **size, bias=False, device="meta")
        self.weight = conv.weight
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("blur", (row[:, None] * row).expand(conv.in_channels, 1, 3, 3).clone(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, out, h', w') of `x`, (n, in, h, w)."""
        return super().forward(F.conv2d(x, self.blur, padding=1, groups=self.in_channels))


class BlurredResNet(ResNet):
    """timm's ResNet with `BlurredConv2d` for every convolution with a stride but the first, as in FFCV's training
    script (libffcv/ffcv-imagenet, train_imagenet.py at 4dd291a). Weights have timm's and torchvision's names."""

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        super().__init__(*arguments, **kwargs)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Conv2d) and child.stride != (1, 1) and child is not self.conv1:
                    setattr(module, name, BlurredConv2d(child))


@register_model
def dali_resnet50_blur(pretrained: bool = False, **kwargs: Any) -> BlurredResNet:
    settings = {"block": Bottleneck, "layers": (3, 4, 6, 3), **kwargs}
    model: BlurredResNet = build_model_with_cfg(BlurredResNet, "dali_resnet50_blur", pretrained, **settings)
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
            for matrix in block.attn.qkv.weight.chunk(3):
                nn.init.xavier_uniform_(matrix)


def sines_and_cosines(height: int, width: int, channels: int) -> torch.Tensor:
    """Return (1, height * width, channels): sines and cosines of x, then of y, with wavelengths from 2 pi to 20,000 pi
    patches."""
    frequencies = 10_000.0 ** -torch.linspace(0, 1, channels // 4)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = [coordinate.flatten()[:, None] * frequencies for coordinate in (x, y)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)[None]


@register_model
def dali_vit_small_patch16(pretrained: bool = False, **kwargs: Any) -> SinCosVisionTransformer:
    settings = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    model: SinCosVisionTransformer = build_model_with_cfg(
        SinCosVisionTransformer, "dali_vit_small_patch16", pretrained, **settings
    )
    return model


class RotaryAttention(Attention):
    """timm's attention whose normalised queries and keys are rotated by the position of their token.

    `rotations`, (tokens, 2 * head width), holds the sines and then the cosines of each token's angles.
    """

    rotations: torch.Tensor

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """Return (n, tokens, width) of the same; the masks are None and False in an image's transformer."""
        num_images, num_tokens, _ = x.shape
        qkv = self.qkv(x).reshape(num_images, num_tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv.unbind(0)
        # In float32 under autocast, as in the source; attention itself is in the dtype of the values.
        queries, keys = (
            apply_rot_embed_cat(norm(tokens.to(norm.weight.dtype)), self.rotations).to(values.dtype)
            for norm, tokens in ((self.q_norm, queries), (self.k_norm, keys))
        )
        dropout = self.attn_drop.p if self.training else 0.0
        x = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal
        )
        projected: torch.Tensor = self.proj_drop(self.proj(x.transpose(1, 2).reshape(num_images, num_tokens, -1)))
        return projected


class ViT5(VisionTransformer):
    """ViT-5 (arXiv 2602.08071; wangf3014/ViT-5, models_vit5.py at b7b0796), built of timm's vision transformer.

    RMSNorm; queries and keys are normalised and rotated by (row, column), beside learned position embeddings; four
    registers, which lie on a grid of 2 x 2 of their own; LayerScale; no bias of queries, keys and values. All blocks
    have the same rate of stochastic depth. Parameters have timm's names: LayerScale's are ls1.gamma, not gamma_1. The
    registers follow the class token, before the patches; since attention does not depend on the order of tokens, the
    logits are those of the source, which puts them last.

    Raises:
        TypeError: arguments for images whose size changes, or dropped patches, for which tokens have no fixed position.
        ValueError: `reg_tokens` is not a square, or `embed_dim / num_heads` is not divisible by 4.
    """

    def __init__(self, *, drop_path_rate: float = 0.0, **kwargs: Any) -> None:
        for name in ("dynamic_img_size", "dynamic_img_pad", "patch_drop_rate"):
            if kwargs.get(name):
                raise TypeError(f"{name} {kwargs[name]} is not supported, because each token has a fixed position")
        settings = {
            "no_embed_class": True,
            "reg_tokens": 4,
            "qkv_bias": False,
            "qk_norm": True,
            "init_values": 1e-4,
            "norm_layer": partial(RmsNorm, eps=1e-6),
            "attn_layer": RotaryAttention,
        }
        super().__init__(**{**settings, **kwargs})
        # timm's rate of stochastic depth grows from 0 in the first block; the source has one rate in all.
        make_drop_path_constant(self.blocks, drop_path_rate)
        for tokens in (self.cls_token, self.reg_token, self.pos_embed):
            if tokens is not None:
                trunc_normal_(tokens, std=0.02)
        self._set_rotations()

    def set_input_size(self, *arguments: Any, **kwargs: Any) -> None:
        """Change the size of the images and of the patches, as in timm."""
        super().set_input_size(*arguments, **kwargs)
        self._set_rotations()

    def _set_rotations(self) -> None:
        num_registers = self.num_reg_tokens
        heads = self.blocks[0].attn
        side = math.isqrt(num_registers)
        height, width = self.patch_embed.grid_size
        if side**2 != num_registers:
            raise ValueError(f"reg_tokens {num_registers} is not a square, such as 4 or 9: registers lie on a grid")
        if heads.head_dim % 4:
            raise ValueError(
                f"embed_dim / num_heads is {heads.head_dim}, which 4 does not divide: sine and cosine of 2 axes"
            )
        angles = torch.cat(
            [
                torch.zeros(int(self.has_class_token), heads.head_dim, dtype=torch.float64),  # not rotated
                rotary_angles(side, side, heads.head_dim, theta=100.0),
                rotary_angles(height, width, heads.head_dim, theta=10_000.0),
            ]
        )
        rotations = torch.cat([angles.sin(), angles.cos()], dim=1).to(self.pos_embed)
        for block in self.blocks:
            block.attn.register_buffer("rotations", rotations.clone(), persistent=False)


def rotary_angles(height: int, width: int, channels: int, theta: float) -> torch.Tensor:
    """Return (height * width, channels) in float64: the angle by which each pair of channels is rotated.

    The first half of the channels turns with the row, the second with the column, by 1 to nearly 1 / theta radians a
    patch.
    """
    frequencies = theta ** -(torch.arange(0, channels // 2, 2, dtype=torch.float64) / (channels // 2))
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    halves = [(position.flatten()[:, None] * frequencies).repeat_interleave(2, dim=1) for position in (rows, columns)]
    return torch.cat(halves, dim=1)


def _vit5(name: str, pretrained: bool, **kwargs: Any) -> ViT5:
    model: ViT5 = build_model_with_cfg(
        ViT5, name, pretrained, pretrained_filter_fn=partial(checkpoint_filter_fn, adapt_layer_scale=True), **kwargs
    )
    return model


@register_model
def dali_vit5_small_patch16(pretrained: bool = False, **kwargs: Any) -> ViT5:
    settings = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    return _vit5("dali_vit5_small_patch16", pretrained, **settings)


@register_model
def dali_vit5_base_patch16(pretrained: bool = False, **kwargs: Any) -> ViT5:
    settings = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12, **kwargs}
    return _vit5("dali_vit5_base_patch16", pretrained, **settings)


@register_model
def dali_vit5_large_patch16(pretrained: bool = False, **kwargs: Any) -> ViT5:
    settings = {"patch_size": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16, **kwargs}
    return _vit5("dali_vit5_large_patch16", pretrained, **settings)
