"""The losses, for images that may be mixtures of two, and the training accuracy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dali_train.config import Config, LossConfig
from dali_train.config.check import Extra, lookup
from dali_train.data.dataset.label_kind import CLASSES, LabelKind

Loss = Callable[[LossConfig, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Distillation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainingClasses:
    """The classes of the images that take part in training."""

    names: tuple[str, ...]  # empty: they have none
    counts: NDArray[np.int64]  # images of each, (classes,)
    num_images: int
    label_kind: LabelKind = CLASSES  # what the labels of images stand for


class LabelsLoss(Protocol):
    """The loss that a kind of labels brings, with its weights, see `LabelKind`."""

    def __call__(
        self, config: LossConfig, logits: torch.Tensor, targets: torch.Tensor, lambdas: torch.Tensor
    ) -> torch.Tensor: ...

    def count_correct(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...


DISTILLATION = Extra[Callable[[Config, int, torch.device, Sequence[str]], Distillation]](
    "dali_train.extras.distillation.teacher:Distillation", "loss.distillation"
)
CLASS_WEIGHTS = Extra[Callable[[LossConfig, TrainingClasses], dict[str, NDArray[np.float64]]]](
    "dali_train.extras.class_weights.weights:weights_of", "loss.class_weights"
)


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
    values = F.log_softmax(at_least_float32(logits), dim=-1)
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
    config: LossConfig,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lambdas: torch.Tensor,
    class_weights: torch.Tensor | None = None,
    positive_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    logits = at_least_float32(logits)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    first, second = (classes == targets[:, 0, None], classes == targets[:, 1, None])
    weights = lambdas.to(logits.dtype)[:, None]
    soft = weights * first + (1 - weights) * second  # (n, classes)
    soft = (1 - config.label_smoothing) * soft + config.label_smoothing / logits.shape[-1]
    return dense_binary_cross_entropy(config, logits, soft, class_weights, positive_weights)


def dense_binary_cross_entropy(
    config: LossConfig,
    logits: torch.Tensor,
    soft: torch.Tensor,
    class_weights: torch.Tensor | None = None,
    positive_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean binary cross-entropy of the classes, or with loss.sum_classes the mean of their sum.

    Args:
        logits: (n, classes), float32 or wider.
        soft: (n, classes), the target of each class, smoothed.
        class_weights, positive_weights: (classes,) factors of each class's loss, and of its part that pulls towards 1.
    """
    if config.target_threshold is not None:
        soft = (soft > config.target_threshold).to(logits.dtype)
    # The weight of the positive class is a tensor, filled on the device: a copy from the host might wait.
    if isinstance(config.positive_weight, float | int) and config.positive_weight != 1:
        positive_weights = logits.new_full((), config.positive_weight)
    loss = F.binary_cross_entropy_with_logits(logits, soft, class_weights, pos_weight=positive_weights)
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


class Objective:
    """The loss that a config describes.

    Args:
        distillation: adds a teacher's loss: a function of (the loss, the output of the distillation token or else the
            logits, the images) that returns the loss to train with. None: no teacher.
        weights: further arguments of the loss: class_weights, positive_weights, (classes,) each.
        labels_loss: that of the dataset's kind of labels, which has its weights; None: that of `LOSSES`.
    """

    def __init__(
        self,
        config: LossConfig,
        distillation: Distillation | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
        labels_loss: LabelsLoss | None = None,
    ) -> None:
        self._config = config
        self._distillation = distillation
        self._loss: Loss = labels_loss or partial(loss_of(config), **(weights or {}))
        self.count_correct: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = (
            labels_loss.count_correct if labels_loss is not None else first_target_correct
        )

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
        loss = self._loss(self._config, logits, targets, lambdas)
        if self._distillation is not None:
            loss = self._distillation(loss, distilled, images)
        return loss, logits


def make_objective(
    config: Config,
    model: Any,
    num_classes: int,
    device: torch.device,
    classes: TrainingClasses | None = None,
) -> Objective:
    """Return the loss of `config`. A `model` with a distillation token is set to return that token's logits too.

    Args:
        classes: for loss.class_weights, loss.positive_weight and the teacher, whose classes must be the same.

    Raises:
        ConfigError: the teacher cannot be used, or a class that has a weight does not exist.
    """
    weights = {}
    if config.loss.weights_classes:
        assert classes is not None, "loss.class_weights needs the training images of each class"
        by_name = CLASS_WEIGHTS.load()(config.loss, classes)
        weights = {name: torch.from_numpy(values).to(device, torch.float32) for name, values in by_name.items()}
    if classes is not None and (loss := classes.label_kind.loss) is not None:
        return Objective(config.loss, labels_loss=loss.load()(config, classes, weights, device))
    if config.loss.distillation == "none":
        return Objective(config.loss, weights=weights)
    if hasattr(model, "set_distilled_training"):
        model.set_distilled_training(True)
    distillation = DISTILLATION.load()(config, num_classes, device, () if classes is None else classes.names)
    return Objective(config.loss, distillation, weights)


def first_target_correct(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Count the images whose own class is predicted, partners ignored: 0-dimensional int64, on the device."""
    return (logits.argmax(dim=-1) == targets[:, 0]).sum()


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
