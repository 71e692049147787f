"""Length, directory, checkpoints and device of a run."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dali_train.config.check import (
    OVER_0,
    Count,
    Directory,
    Fraction,
    NotInRecipe,
    Positive,
    Rule,
    refuse_credentials,
    require,
    section,
)


@section("run")
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    dir: NotInRecipe[Directory]
    """Run directory, for config, metrics, checkpoints and the output of hooks."""
    epochs: Annotated[float, Rule("a number from 0.0001 to 1,000,000,000", 1e-4, 1e9)]
    """Passes over the training split. The schedule spans them, rounded up to complete steps."""
    max_steps: NotInRecipe[Count | None] = None
    """Stop after this many steps; the schedule stays that of run.epochs."""
    eval_every_epochs: NotInRecipe[Positive | None] = 1.0
    """Epochs between evaluations; the last one is at the end. None: only at the end."""
    checkpoint_every_steps: NotInRecipe[Count | None] = None
    """Save every this many steps, before each evaluation, and at the end. None: after each epoch."""
    checkpoint_every_seconds: NotInRecipe[Annotated[float, Rule("a number of seconds over 0", OVER_0)] | None] = None
    """Also save when the last checkpoint is this old, which bounds the loss if a node dies."""
    keep_checkpoints: NotInRecipe[Count] = 2
    """How many of the newest checkpoints to keep, besides the one with the best top-1, which is always kept."""
    mirror: NotInRecipe[Annotated[str, Rule("the URL of a bucket, such as s3://BUCKET/PREFIX")] | None] = None
    """URL (s3://, gs://, az://) to which checkpoints, metrics, status, accuracies and report are copied in the
    background. An empty run.dir resumes from there, so nodes need not share run.dir."""
    max_seconds: NotInRecipe[Annotated[float, Rule("a number of seconds over 0", OVER_0)] | None] = None
    """Save and stop with exit status 75 after this much wall-clock time. None: only on a signal or before the end of a
    Slurm job."""
    resume: NotInRecipe[Annotated[str, Rule("auto, never or the path of a checkpoint")]] = "auto"
    """auto: resume from the newest complete checkpoint in run.dir, if there is one. never: start at step 0, in an empty
    run.dir. Or the path of a checkpoint of another run, to start from it, or of this run, to go back to it."""
    accept_changed_recipe: NotInRecipe[bool] = False
    """Resume even if the recipe or the dataset differs from the checkpoint's; the differences are printed."""
    device: NotInRecipe[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where the model runs. auto: on a GPU if there is one."""
    deterministic: NotInRecipe[bool] = False
    """Deterministic kernels: bit-identical resumes on GPUs too, at a cost in speed."""
    published_top1: NotInRecipe[Fraction | None] = None
    """Published accuracy of the recipe's source, a fraction, drawn as a line in the report."""

    def __post_init__(self) -> None:
        if self.mirror is None:
            return
        refuse_credentials("run.mirror", self.mirror)
        scheme, separator, place = self.mirror.partition("://")
        require(
            scheme in ("s3", "gs", "az") and separator != "" and place != "",
            f"run.mirror is {self.mirror}: use the URL of a writable bucket, such as s3://BUCKET/PREFIX, "
            "gs://BUCKET/PREFIX or az://CONTAINER/PREFIX",
        )
