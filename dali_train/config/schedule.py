"""The learning rate over the run."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dali_train.config.check import OVER_0, NotNegative, Positive, Rule, refuse, section


@section("schedule")
@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """A linear warmup to the peak rate (optimizer.lr, scaled by optimizer.scale_lr), then a decay."""

    name: str = "linear"
    """How the rate decays until run.epochs: linear, cosine, polynomial, step (times decay_rate every decay_epochs),
    warmup-stable-decay (constant until decay_epochs before the end), or a row that the config file adds to
    dali_train.training.schedule.SCHEDULES."""
    warmup_epochs: NotNegative = 0.0
    """Passes over the training split during which the rate rises."""
    warmup_lr: NotNegative | None = None
    """Rate of the first warmup step, from which it rises by (peak - warmup_lr) / warmup per step, as in timm; 0 as in
    big_vision. None: step t has (t + 1) / (warmup + 1) of the peak, as in ColossalAI."""
    decay_from: Literal["warmup-end", "start"] = "warmup-end"
    """Where the decay starts. start: at step 0, so that the warmup replaces its first part, as in timm by default, DeiT
    and ResNet strikes back; the rate then drops slightly at the end of the warmup."""
    min_lr: NotNegative = 0.0
    """Final rate, and the minimum after the warmup. It is not scaled with the batch."""
    power: Positive = 1.0
    """Exponent of polynomial, and of the decay of warmup-stable-decay."""
    decay_epochs: Positive | None = None
    """step: epochs between two decays. warmup-stable-decay: length of the decay."""
    decay_rate: Annotated[float, Rule("a factor over 0 and up to 1", OVER_0, 1)] = 0.1
    """Factor of each decay of step."""
    step_every: Literal["step", "epoch"] = "step"
    """Whether the rate changes at every optimizer step or only at the start of an epoch."""

    def __post_init__(self) -> None:
        by_epoch, length = self.step_every == "epoch", self.decay_epochs
        whole = "it must be a whole number there"
        refuse(by_epoch and self.warmup_epochs % 1 != 0, self, "warmup_epochs step_every", whole)
        needs_length = self.name in ("step", "warmup-stable-decay")
        refuse(needs_length and length is None, self, "name decay_epochs", "set schedule.decay_epochs")
        remedy = "it has no effect there; leave it out, or use"
        refuse(
            self.name in ("linear", "cosine", "polynomial") and length is not None,
            self,
            "decay_epochs name",
            f"{remedy} step or warmup-stable-decay",
        )
        refuse(
            self.name in ("linear", "cosine", "step") and self.power != 1,
            self,
            "power name",
            f"{remedy} polynomial or warmup-stable-decay",
        )
