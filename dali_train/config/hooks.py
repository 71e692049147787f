"""Logging, tables, traces, trackers and user hooks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from dali_train.config.check import Count, CountOr0, Positive, Rule, require, section

Factory = Annotated[Callable[[], Any], Rule("a class or a function that makes a hook, not a hook itself")]
STEPS = "a first step from 1 on and a last step that is not before it"


@section("hooks")
@dataclass(frozen=True, kw_only=True)
class HooksConfig:
    log_every_steps: Count = 10
    """Steps between two lines on the console and in metrics.jsonl; the host reads the loss only then."""
    trace_samples: bool = False
    """Write samples.rank{r}.jsonl: which images each micro-batch had."""
    predictions: CountOr0 = 320
    """Validation images in the table of predictions, which comes with tables of confused classes and accuracy by class.
    0: no tables."""
    profile: Annotated[tuple[Count, Count], Rule(f"{STEPS}, e.g. 20,25")] | None = None
    """First and last step of a torch profiler trace, counted from 1, e.g. 20,25."""
    stop_early: Positive | None = None
    """Finish the run after this many epochs without a better top-1. None: train for all of run.epochs."""
    trackers: tuple[str, ...] = ()
    """Services that also record the run: tensorboard, wandb, mlflow. Each has its own environment variables:
    WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""
    user: tuple[Factory, ...] = ()
    """Your own hooks: subclasses of dali_train.hooks.Hook, or functions that return one, called on every rank. They can
    be set only in a config file."""

    def __post_init__(self) -> None:
        require(
            self.profile is None or self.profile[0] <= self.profile[1],
            f"hooks.profile is {self.profile}: use {STEPS}",
        )
