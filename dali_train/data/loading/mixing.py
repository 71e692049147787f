"""Mixing: one definition for every device.

Image i becomes ``lambdas[i] * images[i] + (1 - lambdas[i]) * images[partners[i]]`` (Mixup: Zhang et al., arXiv
1710.09412) or, if it has a box, itself with the partner's pixels in the box (CutMix: Yun et al., arXiv 1905.04899).
`mix` does this for a batch on any device. The CPU pipeline instead fuses it with normalisation, while an image is in
the core's cache; a test compares the two.
"""

import torch


def mix(
    images: torch.Tensor,
    partners: torch.Tensor,
    lambdas: torch.Tensor,
    cuts: torch.Tensor | None = None,
    *,
    channels_last: bool = False,
) -> torch.Tensor:
    """Return the mixed images in new memory, with the shape, dtype and memory layout of `images`.

    Args:
        images: (n, 3, h, w), or (n, h, w, 3) with `channels_last`, contiguous, normalised; float32, float16 or
            bfloat16.
        partners: (n,) int32 or int64, on the device of `images`.
        lambdas: (n,) float32, on the device of `images`: weight of the image itself.
        cuts: (n, 4) int32, on the device of `images`: top, left, height, width in pixels. An image with a non-empty box
            gets the partner's pixels there, whatever its lambda. None: no CutMix.
    """
    weights = lambdas.view(-1, 1, 1)
    if cuts is not None:
        outside = ~inside(cuts, images, channels_last=channels_last)
        weights = torch.where(cuts[:, 2].view(-1, 1, 1) > 0, outside.to(weights.dtype), weights)  # (n, h, w)
    weights = weights.unsqueeze(-1 if channels_last else 1).to(images.dtype)
    return images.index_select(0, partners).lerp_(images, weights)


def inside(boxes: torch.Tensor, images: torch.Tensor, *, channels_last: bool) -> torch.Tensor:
    """Return which pixels of `images` are in their image's box, (n, 4): top, left, height, width; (n, h, w) bool."""
    height, width = images.shape[1:3] if channels_last else images.shape[2:4]
    top, left, rows, columns = (corner.view(-1, 1, 1) for corner in boxes.unbind(1))
    y = torch.arange(height, device=images.device).view(1, -1, 1)
    x = torch.arange(width, device=images.device).view(1, 1, -1)
    return (y >= top) & (y < top + rows) & (x >= left) & (x < left + columns)


def show_noise(
    images: torch.Tensor, boxes: torch.Tensor, noise: torch.Tensor, *, channels_last: bool = False
) -> torch.Tensor:
    """Return `images`, as for `mix`, with `noise`, (h, w, 3), normalised too, in their `boxes`, (n, 4) int32."""
    where = inside(boxes, images, channels_last=channels_last).unsqueeze(-1 if channels_last else 1)
    return torch.where(where, noise if channels_last else noise.permute(2, 0, 1), images)
