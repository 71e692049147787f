"""Distillation: a trained teacher as a second source of targets, and its settings."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from dali_train.config.check import OVER_0, ByContent, Conflict, NeedsOneLabel, Positive, Rule


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """What the section loss says of a teacher."""

    distillation: NeedsOneLabel[Literal["none", "hard", "soft"]] = "none"
    """Also learn from a teacher's predictions (DeiT). hard: from its top class. soft: from its probabilities."""
    distillation_weight: Annotated[float, Rule("a share over 0 and up to 1", OVER_0, 1)] = 0.5
    """Weight of the distillation loss; the loss of the labels has 1 minus this."""
    temperature: Positive = 1.0
    """soft: student's and teacher's logits are divided by it, and the loss is multiplied by its square."""
    teacher: ByContent[str | None] = None
    """A timm model with the dataset's classes; without teacher_weights its own weights are fetched from the hub.
    local-dir:DIRECTORY: what `dali-train export --format timm` wrote."""
    teacher_weights: ByContent[str | None] = None
    """A file with the teacher's weights, of the kinds that model.weights takes."""

    CONFLICTS: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            names=("temperature", "distillation"),
            when=lambda loss: loss.temperature != 1 and loss.distillation != "soft",
            remedy="only soft has one, set it to 1",
        ),
        Conflict(
            names=("distillation", "teacher"),
            when=lambda loss: loss.distillation != "none" and loss.teacher is None,
            remedy="set loss.teacher to a timm model",
        ),
        Conflict(
            names=("teacher", "teacher_weights", "distillation"),
            when=lambda loss: (
                loss.distillation == "none" and (loss.teacher is not None or loss.teacher_weights is not None)
            ),
            remedy="set it to hard or soft, or leave the teacher out",
        ),
    )
    CONFLICTS_OF_RUN: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            names=("parallel.pipeline", "loss.distillation"),
            when=lambda config: config.parallel.pipeline > 1 and config.loss.distillation != "none",
            remedy="the last stage has no images to show the teacher; set parallel.pipeline 1, the default",
        ),
    )
