"""Distillation: a trained teacher as a second source of targets (Hinton, arXiv 1503.02531; DeiT, arXiv 2012.12877)."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from dali_train.checkpoint.trained_on import trained_on
from dali_train.config import Config, LossConfig
from dali_train.errors import ConfigError
from dali_train.training.loss import at_least_float32
from dali_train.training.model import input_size
from dali_train.training.pretrained import class_names_beside, create_pretrained


class Distillation:
    """The loss of a run with a teacher."""

    def __init__(self, config: Config, num_classes: int, device: torch.device, class_names: Sequence[str]) -> None:
        """
        Raises:
            ConfigError: see `Teacher` and `check_classes`.
        """
        check_classes(config.loss, class_names)
        self._config = config.loss
        self._teacher = Teacher(config, num_classes, device)
        self._compare = DISTILLATIONS[config.loss.distillation]

    def __call__(self, loss: torch.Tensor, logits: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean of `loss`, which is that of the labels, and of the distance to the teacher.

        Args:
            logits: (n, classes), the student's, of its distillation token if it has one.
            images: (n, 3, size, size), the student's input.
        """
        weight = self._config.distillation_weight
        distance = self._compare(self._config, logits, self._teacher.logits(images))
        return (1 - weight) * loss + weight * distance


def _hard_distillation(config: LossConfig, logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(at_least_float32(logits), teacher.argmax(dim=-1))


def _soft_distillation(config: LossConfig, logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    ours, theirs = (F.log_softmax(at_least_float32(x) / config.temperature, dim=-1) for x in (logits, teacher))
    # Per image, as in DeiT's paper and in timm. DeiT's code divides by the number of classes too.
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * config.temperature**2


DISTILLATIONS: dict[str, Callable[[LossConfig, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "hard": _hard_distillation,
    "soft": _soft_distillation,
}
"""Each takes the settings, the student's and the teacher's logits, both (n, classes), and returns the mean loss of the
batch."""


def check_classes(loss: LossConfig, class_names: Sequence[str]) -> None:
    """Raises ConfigError: the file loss.teacher_weights knows its classes, and they are not those of the dataset, in
    their order."""
    weights = loss.teacher_weights
    theirs = class_names_beside(weights) if weights is not None else []
    if {*theirs} & {*class_names} and theirs != [*class_names]:
        raise ConfigError(
            f"loss.teacher_weights {weights}: its classes, from {theirs[0]!r} to {theirs[-1]!r}, are not those of the "
            f"dataset in their order, from {class_names[0]!r} to {class_names[-1]!r}: index the dataset with the names "
            "in its config.json (--class-names FILE)"
        )


class Teacher:
    """A trained timm model, in eval mode and frozen, applied to the student's images, normalised as it expects them."""

    def __init__(self, config: Config, num_classes: int, device: torch.device) -> None:
        """
        Raises:
            ConfigError: timm does not know the model, its weights cannot be loaded, or its classes differ.
        """
        loss, data = config.loss, config.data
        assert loss.teacher is not None
        model, _ = create_pretrained(
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
        theirs = trained_on(loss.teacher, loss.teacher_weights or loss.teacher, model.pretrained_cfg) or data
        mean, std, their_mean, their_std = (
            torch.tensor(values, dtype=torch.float64) for values in (data.mean, data.std, theirs.mean, theirs.std)
        )
        # From the student's normalisation to the teacher's.
        self._scale = (std / their_std).to(device, dtype).view(1, 3, 1, 1)
        self._offset = ((mean - their_mean) / their_std).to(device, dtype).view(1, 3, 1, 1)

    @torch.no_grad()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, classes) for the student's `images`, (n, 3, size, size)."""
        output: torch.Tensor = self._model(images * self._scale + self._offset)
        return output
