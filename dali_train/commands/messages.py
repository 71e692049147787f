"""What a run says to its user where it ends, or goes on otherwise than asked."""

from pathlib import Path
from traceback import FrameSummary

from dali_train.config import Config


def why_unsaved(*, overflowed: bool, start_step: int) -> str:
    """
    Args:
        overflowed: all steps since `start_step`, the steps done before this start.
    """
    if not overflowed:
        return "weights or the last loss are not finite"
    if not start_step:
        return "all steps overflowed, so the weights are still the initial ones"
    return f"all steps since step {start_step} overflowed, so the weights are still those of step {start_step}"


def unsaved(ending: str, step: int, total_steps: int, reason: str, newest: int | None) -> str:
    return (
        f"the run {ending} at step {step} of {total_steps}, but was not saved: {reason}, and {_good(newest)}. Resume "
        "with a lower optimizer.lr, a longer schedule.warmup_epochs, or precision.dtype bf16"
    )


def faulty_replica(error: Exception, directory: Path, newest: int | None) -> str:
    return (
        f"{error}. In {directory}, {_good(newest)}: start the same command without the faulty host, and the run goes "
        "on from there"
    )


def _good(newest: int | None) -> str:
    """Say which checkpoint to go back to."""
    return "there is no checkpoint" if newest is None else f"the newest checkpoint, of step {newest}, is good"


def past_the_end(config: Config, num_images: int, total_steps: int, step: int) -> str:
    run = config.run
    asked = f"run.epochs {run.epochs:g} of {num_images} images with batch.global_batch {config.batch.global_batch}"
    if run.max_steps == total_steps:
        asked = f"run.max_steps {run.max_steps}"
    return (
        f"{asked} ends the run after {total_steps} steps, but its newest checkpoint is of step {step}: ask for at "
        f"least {step} steps, or choose another run.dir to start at step 0"
    )


def called_exit(caller: FrameSummary, code: object) -> str:
    return (
        f"{caller.filename}, line {caller.lineno}, in {caller.name} called sys.exit({code!r}) during the run: raise an "
        "exception there instead, or end the run with run.max_steps"
    )


def no_validation(root: str) -> str:
    return f"{root} has no validation split: nothing is evaluated, and no checkpoint is the best"


def stopped(reason: str) -> str:
    return f"stopped after saving: {reason}. Start the same command again to resume"
