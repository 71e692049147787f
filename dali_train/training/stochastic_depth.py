"""Stochastic depth with its rate in a tensor, so that blocks that differ only in the rate share compiled code."""

import torch
from timm.layers import DropPath
from torch import nn


class TensorRateDropPath(nn.Module):
    """timm's `DropPath`: drop each sample's residual branch with probability `drop_prob` in training.

    timm's rate is a Python number, for which torch.compile makes one graph per block. The masks differ from timm's,
    which are drawn by another operator.
    """

    keep_prob: torch.Tensor  # (), float32

    def __init__(self, replaced: DropPath, device: torch.device) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = replaced.drop_prob, replaced.scale_by_keep
        self.register_buffer("keep_prob", torch.tensor(1 - replaced.drop_prob, device=device), persistent=False)
        self.train(replaced.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) < self.keep_prob
        scale = kept / self.keep_prob if self.scale_by_keep else kept
        return x * scale.to(x.dtype)


def share_graphs(block: nn.Module) -> None:
    """Replace the stochastic depth of a block by one that compiles to the same code for every rate."""
    device = next(block.parameters()).device
    for module in list(block.modules()):
        for name, child in module.named_children():
            if isinstance(child, DropPath):
                setattr(module, name, TensorRateDropPath(child, device))
