"""The losses, for images that may be mixtures of two, and the training accuracy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dali_train.config import Config, LossConfig
from dali_train.config.check import lookup
from dali_train.errors import ConfigError
from dali_train.training.model import input_size
from dali_train.training.pretrained import create_pretrained

Loss = Callable[[LossConfig, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mixup_loss(
    logits: torch.Tensor, targets: torch.Tensor, lambdas: torch.Tensor, class_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean over the batch of ``lambda * CE(first class) + (1 - lambda) * CE(second class)``.

    Args:
        logits: (n, classes), any float type; computed in float32 or wider.
        targets: (n, 2) int64.
        lambdas: (n,) float32.
        class_weights: (classes,) factors of each class's cross-entropy; None: all 1.
    """
    log_probabilities = _log_probabilities(logits, class_weights)
    first, second = (-log_probabilities.gather(1, targets)).unbind(1)
    return (lambdas * first + (1 - lambdas) * second).mean()


def _log_probabilities(logits: torch.Tensor, class_weights: torch.Tensor | None) -> torch.Tensor:
    values = F.log_softmax(_at_least_float32(logits), dim=-1)
    return values if class_weights is None else values * class_weights


def _cross_entropy(
    config: LossConfig,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lambdas: torch.Tensor,
    class_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    loss = mixup_loss(logits, targets, lambdas, class_weights)
    if config.label_smoothing == 0:
        return loss
    even = -_log_probabilities(logits, class_weights).mean()  # the cross entropy with the uniform distribution
    return (1 - config.label_smoothing) * loss + config.label_smoothing * even


def _binary_cross_entropy(
    config: LossConfig, logits: torch.Tensor, targets: torch.Tensor, lambdas: torch.Tensor
) -> torch.Tensor:
    logits = _at_least_float32(logits)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    first, second = (classes == targets[:, 0, None], classes == targets[:, 1, None])
    weights = lambdas.to(logits.dtype)[:, None]
    soft = weights * first + (1 - weights) * second  # (n, classes)
    soft = (1 - config.label_smoothing) * soft + config.label_smoothing / logits.shape[-1]
    if config.target_threshold is not None:
        soft = (soft > config.target_threshold).to(logits.dtype)
    # The weight of the positive class is a tensor, filled on the device: a copy from the host might wait. Without one
    # the arithmetic stays that of earlier versions.
    weight = None if config.positive_weight == 1 else logits.new_full((), config.positive_weight)
    loss = F.binary_cross_entropy_with_logits(logits, soft, pos_weight=weight)
    return loss * logits.shape[-1] if config.sum_classes else loss


LOSSES: dict[str, Loss] = {"cross-entropy": _cross_entropy, "binary-cross-entropy": _binary_cross_entropy}
"""Each takes the settings, logits (n, classes), targets (n, 2) and lambdas (n,), and returns the batch's mean loss.

The target of an image is lambda of its first class and 1 - lambda of its second, as in `mixup_loss`.
"""


def loss_of(config: LossConfig) -> Loss:
    """Return the row of `LOSSES` that loss.name names.

    Raises:
        ConfigError: there is none.
    """
    return lookup(LOSSES, "loss.name", config.name)


def _hard_distillation(config: LossConfig, logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_at_least_float32(logits), teacher.argmax(dim=-1))


def _soft_distillation(config: LossConfig, logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    ours, theirs = (F.log_softmax(_at_least_float32(x) / config.temperature, dim=-1) for x in (logits, teacher))
    # Per image, as in DeiT's paper and in timm. DeiT's code divides by the number of classes too.
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * config.temperature**2


DISTILLATIONS: dict[str, Callable[[LossConfig, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "hard": _hard_distillation,
    "soft": _soft_distillation,
}
"""Each takes the settings, the student's and the teacher's logits, both (n, classes), and returns the mean loss of the
batch."""


class Objective:
    """The loss that a config describes, with its teacher, if it has one."""

    def __init__(
        self, config: LossConfig, teacher: "Teacher | None" = None, class_weights: torch.Tensor | None = None
    ) -> None:
        self._config = config
        self._teacher = teacher
        self._class_weights = class_weights

    def __call__(
        self,
        output: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        images: torch.Tensor,
        targets: torch.Tensor,
        lambdas: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (mean loss of the micro-batch, logits (n, classes)).

        Args:
            output: the model's output: logits, or the logits of its class token and of its distillation token.
            images: (n, 3, size, size), the model's input.
            targets, lambdas: see `LOSSES`.
        """
        logits, distilled = output if isinstance(output, tuple) else (output, output)
        if self._class_weights is None:
            loss = loss_of(self._config)(self._config, logits, targets, lambdas)
        else:
            loss = _cross_entropy(self._config, logits, targets, lambdas, self._class_weights)
        if self._teacher is None:
            return loss, logits
        weight = self._config.distillation_weight
        distillation_loss = DISTILLATIONS[self._config.distillation](
            self._config, distilled, self._teacher.logits(images)
        )
        return (1 - weight) * loss + weight * distillation_loss, logits


class Teacher:
    """A trained timm model, in eval mode and frozen, applied to the student's images, normalised as it expects them."""

    def __init__(self, config: Config, num_classes: int, device: torch.device) -> None:
        """
        Raises:
            ConfigError: timm does not know the model, its weights cannot be loaded, or its classes differ.
        """
        loss, data = config.loss, config.data
        assert loss.teacher is not None
        model = create_pretrained(
            loss.teacher,
            loss.teacher_weights or "",
            num_classes,
            {},
            field="loss.teacher",
            keep_classifier=True,
        )
        dtype = torch.float64 if config.precision.dtype == "fp64" else torch.float32
        self._model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        size = input_size(model)
        if model.pretrained_cfg.get("fixed_input_size") and data.train_sizes != [size]:
            raise ConfigError(
                f"loss.teacher {loss.teacher} takes images of {size} pixels, data.train_size is "
                f"{data.train_size}{f', data.progressive {data.progressive}' if data.progressive else ''}: "
                "use a convolutional teacher"
            )
        mean, std, their_mean, their_std = (
            torch.tensor(values, dtype=torch.float64)
            for values in (data.mean, data.std, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
        )
        # From the student's normalisation (of 0 to 255) to the teacher's (of 0 to 1).
        self._scale = (std / 255 / their_std).to(device, dtype).view(1, 3, 1, 1)
        self._offset = ((mean / 255 - their_mean) / their_std).to(device, dtype).view(1, 3, 1, 1)

    @torch.no_grad()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, classes) for the student's `images`, (n, 3, size, size)."""
        output: torch.Tensor = self._model(images * self._scale + self._offset)
        return output


def make_objective(
    config: Config,
    model: Any,
    num_classes: int,
    device: torch.device,
    class_counts: NDArray[np.int64] | None = None,
) -> Objective:
    """Return the loss of `config`. A `model` with a distillation token is set to return that token's logits too.

    Args:
        class_counts: (num_classes,) training images of each class, for loss.class_weights.

    Raises:
        ConfigError: see `Teacher`.
    """
    weights = None
    if config.loss.class_weights == "balanced":
        assert class_counts is not None, "loss.class_weights needs the training images of each class"
        weights = torch.from_numpy(balanced_weights(class_counts)).to(device, torch.float32)
    if config.loss.distillation == "none":
        return Objective(config.loss, class_weights=weights)
    if hasattr(model, "set_distilled_training"):
        model.set_distilled_training(True)
    return Objective(config.loss, Teacher(config, num_classes, device), weights)


def balanced_weights(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the weight of each class that makes all classes count the same; the mean over the images is 1, and classes
    without images have 1."""
    present = counts > 0
    return np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 1.0)


def first_target_correct(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Count the images whose own class is predicted, partners ignored: 0-dimensional int64, on the device."""
    return (logits.argmax(dim=-1) == targets[:, 0]).sum()


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
