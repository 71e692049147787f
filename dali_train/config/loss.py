"""The training loss."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dali_train.config.check import OVER_0, UNDER_1, Positive, Rule, refuse, section


@section("loss")
@dataclass(frozen=True, kw_only=True)
class LossConfig:
    name: str = "cross-entropy"
    """cross-entropy, binary-cross-entropy (one binary classification per class, as in ResNet strikes back), or a row
    that the config file adds to dali_train.training.loss.LOSSES."""
    label_smoothing: Annotated[float, Rule("a share from 0 to under 1", 0, UNDER_1)] = 0.0
    """Share of the target that is spread evenly over all classes."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: cross-entropy weights an image of a class with n of the N training images by N / (n x classes), so that
    rare classes count as much as frequent ones; the mean weight is 1."""
    target_threshold: Annotated[float, Rule("a number from 0 to under 1", 0, UNDER_1)] | None = None
    """binary-cross-entropy: targets above it count as 1 and others as 0, so that a mixture has both classes. None:
    targets are used as they are."""
    distillation: Literal["none", "hard", "soft"] = "none"
    """Also learn from a teacher's predictions (DeiT). hard: from its top class. soft: from its probabilities."""
    distillation_weight: Annotated[float, Rule("a share over 0 and up to 1", OVER_0, 1)] = 0.5
    """Weight of the distillation loss; the loss of the labels has 1 minus this."""
    temperature: Positive = 1.0
    """soft: student's and teacher's logits are divided by it, and the loss is multiplied by its square."""
    teacher: str | None = None
    """A timm model with the dataset's classes; without teacher_weights its own weights are fetched from the hub.
    local-dir:DIRECTORY: what `dali-train export --format timm` wrote."""
    teacher_weights: str | None = None
    """A file with the teacher's weights, of the kinds that model.weights takes."""

    def __post_init__(self) -> None:
        refuse(
            self.target_threshold is not None and self.name == "cross-entropy",
            self,
            "target_threshold name",
            "leave it out, or use binary-cross-entropy",
        )
        refuse(
            self.class_weights != "none" and self.name != "cross-entropy",
            self,
            "class_weights name",
            "leave it out, or use cross-entropy or data.shuffle balanced",
        )
        hard = self.distillation != "soft"
        refuse(self.temperature != 1 and hard, self, "temperature distillation", "only soft has one, set it to 1")
        without = self.distillation == "none"
        has_teacher = self.teacher is not None
        refuse(not without and not has_teacher, self, "distillation teacher", "set loss.teacher to a timm model")
        refuse(
            without and (has_teacher or self.teacher_weights is not None),
            self,
            "teacher teacher_weights distillation",
            "set it to hard or soft, or leave the teacher out",
        )
