"""timm's position embeddings for images of other sizes, resampled by a matrix product. Only ``training/model.py``
imports this.

timm resamples them in each forward pass with `torch.nn.functional.interpolate`, always in float32, and CUDA has no
deterministic backward pass for that. Interpolation is linear, so a product with the interpolated identity matrix gives
the same values, and is deterministic.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.models import deit, eva, vision_transformer


def resample(
    embedding: torch.Tensor,
    new_size: Sequence[int],
    old_size: Sequence[int] | None = None,
    num_prefix_tokens: int = 1,
    **options: Any,
) -> torch.Tensor:
    """Return `embedding`, (1, prefix + height * width, dim), for another grid of patches, in the same dtype.

    Computed in float64: the product is small, and neither autocast nor TF32 rounds it.

    Args:
        new_size, old_size: (height, width) in patches.
        num_prefix_tokens: the first tokens, which have no place in the image, stay as they are.
        options: timm's, which it gives when weights are loaded, not in a forward pass; then it resamples itself.
    """
    if options or old_size is None:
        return resample_abs_pos_embed(embedding, new_size, old_size, num_prefix_tokens, **options)
    if tuple(new_size) == tuple(old_size):
        return embedding
    places = old_size[0] * old_size[1]
    identity = torch.eye(places, dtype=torch.float64, device=embedding.device).view(1, places, *old_size)
    weights = F.interpolate(identity, size=tuple(new_size), mode="bicubic", antialias=True).flatten(2).mT
    resampled = weights @ embedding[:, num_prefix_tokens:].double()
    return torch.cat([embedding[:, :num_prefix_tokens], resampled.to(embedding.dtype)], dim=1)


for _models in (vision_transformer, deit, eva):
    _models.resample_abs_pos_embed = resample
