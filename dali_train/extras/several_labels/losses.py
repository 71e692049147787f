"""The losses for several labels an image, of logits and of the weight of each class in each image.

An image's target is 1 for its classes and 0 for the others; that of a mixture is the mean of both images' targets with
Mixup's or CutMix's weights, and label smoothing with share s makes it (1 - s) x target + s / 2, as in timm
(timm.data.mixup.mixup_target with multi_label). Binary cross-entropy is the core's; the others are timm's modules.
"""

from collections.abc import Callable
from typing import Any

import timm
import timm.loss
import torch
from torch import nn

from dali_train.config import Config, LossConfig
from dali_train.errors import ConfigError
from dali_train.extras.several_labels import LOSSES_OF_SEVERAL
from dali_train.extras.several_labels.labels import MultiHot
from dali_train.extras.several_labels.sets_of_classes import SetsOfClasses
from dali_train.training.loss import TrainingClasses, at_least_float32, dense_binary_cross_entropy

DenseLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From logits and targets, (n, classes) each, to the micro-batch's loss."""

_MODULES = {
    "asymmetric": "AsymmetricLossMultiLabel",
    "poly": "PolyBinaryCrossEntropy",
    "two-way": "TwoWayLoss",
    "zlpr": "ZlprLoss",
    "distribution-balanced": "DistributionBalancedLoss",
}


class SeveralLabelsLoss:
    """A row of `LOSSES` whose targets number sets of classes.

    Args:
        weights: ``class_weights`` and ``positive_weights``, (classes,) each, as far as they are set.

    Raises:
        ConfigError: timm's loss does not take loss.kwargs, or the installed timm has none of that name.
    """

    def __init__(
        self, config: Config, classes: TrainingClasses, weights: dict[str, torch.Tensor], device: torch.device
    ) -> None:
        assert isinstance(classes.label_kind, SetsOfClasses)
        self._multi_hot = MultiHot(classes.label_kind, len(classes.counts), device)
        self._smoothing = config.loss.label_smoothing
        self._dense = self._dense_loss(config, classes, weights, device)

    def _dense_loss(
        self, config: Config, classes: TrainingClasses, weights: dict[str, torch.Tensor], device: torch.device
    ) -> DenseLoss:
        name = config.loss.name
        if name == "binary-cross-entropy":
            return lambda logits, soft: dense_binary_cross_entropy(config.loss, logits, self._smoothed(soft), **weights)
        if (own := LOSSES_OF_SEVERAL.get(name)) is not None:
            return lambda logits, soft: own(config.loss, logits, self._smoothed(soft))
        arguments: dict[str, Any] = dict(config.loss.kwargs)
        smooths_first = config.mixup.enabled  # timm's Mixup smooths the targets, and the loss then does not
        if name in ("asymmetric", "poly", "distribution-balanced") and not smooths_first:
            arguments["smoothing"] = self._smoothing
        if name == "asymmetric":
            arguments |= {"weight": weights.get("class_weights"), "pos_weight": _positives(config.loss, weights)}
        if name == "distribution-balanced":
            arguments |= {"class_counts": classes.counts.tolist(), "num_samples": classes.num_images}
        module = _timm_module(_MODULES[name], arguments).to(device)
        return lambda logits, soft: module(logits, self._smoothed(soft) if smooths_first else soft)

    def _smoothed(self, soft: torch.Tensor) -> torch.Tensor:
        return (1 - self._smoothing) * soft + self._smoothing / 2

    def __call__(
        self, config: LossConfig, logits: torch.Tensor, targets: torch.Tensor, lambdas: torch.Tensor
    ) -> torch.Tensor:
        logits = at_least_float32(logits)
        first, second = (self._multi_hot(column, logits.dtype) for column in targets.unbind(1))
        weight = lambdas.to(logits.dtype)[:, None]
        return self._dense(logits, weight * first + (1 - weight) * second)

    def count_correct(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Count the images whose most probable class is one of their own, partners ignored: 0-dimensional int64."""
        own = self._multi_hot(targets[:, 0], torch.int64)
        return own.gather(1, logits.argmax(dim=-1, keepdim=True)).sum()


def _positives(config: LossConfig, weights: dict[str, torch.Tensor]) -> torch.Tensor | float | None:
    if isinstance(config.positive_weight, float | int) and config.positive_weight != 1:
        return float(config.positive_weight)
    return weights.get("positive_weights")


def _timm_module(name: str, arguments: dict[str, Any]) -> nn.Module:
    kind = getattr(timm.loss, name, None)
    if kind is None:
        raise ConfigError(f"loss.name needs timm.loss.{name}, which timm {timm.__version__} lacks: use timm 1.0.30")
    try:
        module: nn.Module = kind(**arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"loss.kwargs: timm.loss.{name} of timm {timm.__version__} does not take them ({error}): correct them"
        ) from None
    return module
