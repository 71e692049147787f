"""The loss and the accuracy of images that are mixtures of two."""

import torch
import torch.nn.functional as F


def mixup_loss(logits: torch.Tensor, targets: torch.Tensor, lambdas: torch.Tensor) -> torch.Tensor:
    """The mean over the batch of ``lambda * CE(first class) + (1 - lambda) * CE(second class)``.

    Args:
        logits: (n, classes), any float type; computed in float32 or wider.
        targets: (n, 2) int64.
        lambdas: (n,) float32.
    """
    log_probabilities = F.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    first, second = (-log_probabilities.gather(1, targets)).unbind(1)
    return (lambdas * first + (1 - lambdas) * second).mean()


def first_target_correct(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How many guesses are the image's own class, the partner ignored: 0-dimensional int64, on the device."""
    return (logits.argmax(dim=-1) == targets[:, 0]).sum()
