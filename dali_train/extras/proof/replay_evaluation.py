"""``dali-train prove RUN --replay eval``: evaluate checkpoints again, and compare with the lines of their evaluations.

Within one class of machine every number must be the recorded one. Elsewhere rounding moves images whose two best
classes are nearly equal, and float64 decides, as for a step (replay.py).
"""

import math
from pathlib import Path

import torch

from dali_train.checkpoint.fingerprint import machine
from dali_train.checkpoint.format import load_chosen
from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.checkpoint.state import Start
from dali_train.checkpoint.trained_model import check_registered
from dali_train.commands.equal_ranks import require_equal_ranks
from dali_train.commands.evaluate import joined_and_watched
from dali_train.commands.train import measured, restored_trainer
from dali_train.config import Config
from dali_train.errors import ConfigError
from dali_train.extras.proof.prove import with_dataset
from dali_train.extras.proof.replay import LIMIT, SCALARS, Comparison, check_comparable, print_classes
from dali_train.runtime.launch import Launch, LaunchOptions
from dali_train.runtime.process_group import host_group
from dali_train.runtime.status import METRICS, Event, best_evaluation
from dali_train.training.build import build_evaluators, prepare

Numbers = dict[str, float]


def replay_evaluation(run_dir: Path, *, dataset: str | None, options: LaunchOptions) -> bool:
    """Evaluate the checkpoints of the best and of the last evaluation again, as far as they are there, on this
    launcher's ranks, and print how the results compare with what was recorded.

    Returns:
        Whether they agree.

    Raises:
        ConfigError, CheckpointError, DatasetError: nothing can be evaluated or compared here.
    """
    run = RunDirectory(run_dir)
    config = with_dataset(run.config, dataset)
    check_registered(config.model, run_dir)
    chosen = evaluations_here(run)
    agrees = True
    with joined_and_watched(options, config, run_dir) as (launch, device):
        group = host_group(launch)
        for path, (event, there) in chosen.items():
            require_equal_ranks(config, device, group, path)
            here, numbers = evaluate_again(config, path, launch, device)
            exact = None
            if there != here:
                check_comparable({there}, here, device)
                in_float64 = config.replace({"precision.dtype": "fp64"})
                exact = (
                    numbers if config.precision.dtype == "fp64" else evaluate_again(in_float64, path, launch, device)[1]
                )
            subject, same, text = compared(event, numbers, exact, config.precision.dtype)
            agrees &= same
            if launch.rank == 0:
                if there != here:
                    print_classes({there}, here)
                print(f"{subject:8} {'' if same else 'DIFFERS: '}{path.name}: {text}")
    return agrees


def evaluations_here(run: RunDirectory) -> dict[Path, tuple[Event, str]]:
    """Return the best and the last evaluation whose checkpoints are still there, each with its class of machine.

    Raises:
        ConfigError: there is none.
    """
    machines: dict[int, str] = {}
    now = ""
    for event in run.events:
        if event["event"] == "start":
            now = event.get("machine", "")
        machines[event["step"]] = now
    paths = {}
    for event in run.events:
        path = run.directory / "checkpoints" / f"step-{event['step']:08d}"
        if event["event"] == "eval" and path.is_dir():
            paths[event["step"]] = (path, event)
    if not paths:
        raise ConfigError(f"--replay eval: {run.directory} has no checkpoint whose evaluation is in {METRICS}")
    best = best_evaluation([event for _, event in paths.values()], run.config.run.best_by)
    steps = {best["step"] if best is not None else max(paths), max(paths)}
    return {paths[step][0]: (paths[step][1], machines[step]) for step in sorted(steps)}


def evaluate_again(config: Config, path: Path, launch: Launch, device: torch.device) -> tuple[str, Numbers]:
    """Return the class of this machine, and the numbers of an evaluation's line, for a checkpoint. All ranks call this
    together."""
    plan = prepare(config, launch, device)
    checkpoint = load_chosen(path)
    start = Start(checkpoint=checkpoint)
    trainer = restored_trainer(plan, start, evaluates=True)
    start.release()
    evaluators = build_evaluators(plan)
    if evaluators is None:
        raise ConfigError(f"--replay eval: {config.data.root} has no validation split")
    record = measured(trainer, evaluators, step=checkpoint.step, epoch=0.0)
    return machine(plan), {name: value for name, value in record.scalars().items() if name != "seconds"}


def compared(recorded: Event, here: Numbers, exact: Numbers | None, precision: str) -> Comparison:
    """Compare the line of an evaluation with the numbers that were computed `here`; in another class of machine also
    with the `exact` ones."""
    was: Numbers = {name: recorded.get(name, math.nan) for name in here}
    if exact is None:
        wrong = [f"{name} is {was[name]}, here {here[name]}" for name in here if was[name] != here[name]]
        return "accuracy", not wrong, "; ".join(wrong) or f"the same {len(here)} numbers, top-1 {here['top1']:.2%}"
    # Not the mean over classes: one image may be any part of it.
    names = [name for name in here if name.endswith(("loss", "top1", "top5")) and "balanced" not in name]
    limits = {name: _limit(name, here, exact, precision) for name in names}
    wrong = [
        f"{name} is {was[name]}, here {here[name]}, in float64 {exact[name]}"
        for name in names
        if not abs(was[name] - exact[name]) <= limits[name]
    ]
    unseen = ", ".join(f"{limit:.2g} of {name}" for name, limit in limits.items())
    return "accuracy", not wrong, "; ".join(wrong) or f"within the limits; not seen are changes of up to {unseen}"


def _limit(name: str, here: Numbers, exact: Numbers, precision: str) -> float:
    """Return the largest accepted distance from the `exact` number: of a fraction, that of one image at least."""
    if name.endswith("loss"):
        smallest = SCALARS[precision] * abs(exact[name])
    else:
        of_set = f"{name.removesuffix('top1').removesuffix('top5')}num_images"  # the average has the run's own images
        smallest = 1 / exact.get(of_set, exact["num_images"])
    return LIMIT * max(abs(here[name] - exact[name]), smallest)
