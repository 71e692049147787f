"""What is minimised."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dali_train.config.check import OVER_0, UNDER_1, Positive, Range, require, section


@section("loss")
@dataclass(frozen=True, kw_only=True)
class LossConfig:
    name: Literal["cross-entropy", "binary-cross-entropy"] = "cross-entropy"
    """binary-cross-entropy: each class is a yes-or-no question of its own, as in ResNet strikes back."""
    label_smoothing: Annotated[float, Range(0, UNDER_1, "a share from 0 to under 1")] = 0.0
    """Share of the target that is spread evenly over all classes."""
    target_threshold: Annotated[float, Range(0, UNDER_1, "a number from 0 to under 1")] | None = None
    """binary-cross-entropy: targets above it count as 1 and others as 0, so that both images of a mixture are in it.
    None: as they are."""
    sum_classes: bool = False
    """binary-cross-entropy: sum over the classes instead of their mean."""
    distillation: Literal["none", "hard", "soft"] = "none"
    """Learn from a teacher's answers too (DeiT). hard: from its best class. soft: from its probabilities."""
    distillation_weight: Annotated[float, Range(OVER_0, 1, "a share over 0 and up to 1")] = 0.5
    """Share of the distillation in the loss; the labels have the rest."""
    temperature: Positive = 1.0
    """soft: logits of both are divided by it, and the loss is multiplied by its square."""
    teacher: str | None = None
    """A timm model with the dataset's classes; without teacher_weights its own weights are fetched from the hub.
    local-dir:DIRECTORY: what `dali-train export --format timm` wrote."""
    teacher_weights: str | None = None
    """A safetensors file with the teacher's weights."""
    teacher_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to timm.create_model for the teacher."""

    def __post_init__(self) -> None:
        binary = self.name == "binary-cross-entropy"
        require(
            self.target_threshold is None or binary,
            f"loss.target_threshold is {self.target_threshold} with loss.name {self.name}: leave it out, or use "
            "binary-cross-entropy",
        )
        require(
            not self.sum_classes or binary,
            f"loss.sum_classes is true with loss.name {self.name}, which has no mean over classes: set it to false, "
            "or use binary-cross-entropy",
        )
        require(
            self.temperature == 1 or self.distillation == "soft",
            f"loss.temperature is {self.temperature} with loss.distillation {self.distillation}: only soft has one, "
            "set it to 1",
        )
        require(
            self.distillation == "none" or self.teacher is not None,
            f"loss.distillation is {self.distillation}, but there is no teacher: set loss.teacher to a timm model",
        )
        require(
            self.distillation != "none" or (self.teacher is None and self.teacher_weights is None),
            f"loss.teacher is {self.teacher}, but loss.distillation is none: set it to hard or soft, or leave the "
            "teacher out",
        )
