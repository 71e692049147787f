"""Check what a run says of itself: `dali-train prove`, and `--replay`, which trains one step again."""

import argparse

from dali_train.checkpoint.run_directory import ALL_CHECKPOINTS, local_run
from dali_train.commands.arguments import Commands, add_launch_options, launch_options, on_runs, refuse_settings
from dali_train.commands.boundary import importing
from dali_train.runtime.status import FINISHED


def add_prove_command(commands: Commands) -> None:
    summary = "Check a run's record of samples, draws and weights against its recipe. Exits with 1 if they differ."
    prove = on_runs(commands, "prove", summary, _prove)
    prove.add_argument(
        "--dataset", metavar="DIR", help="the dataset, of which only dataset.json and the index are read"
    )
    prove.add_argument("--all-draws", action="store_true", help="check the draws of all steps, not of a part of them")
    prove.add_argument(
        "--replay",
        type=_step_or_eval,
        metavar="STEP|eval",
        help="instead, train this step again (counted from 1) from the checkpoint before it and compare, or evaluate "
        "the best and the last checkpoint again; to get the same bits, start as many processes as the run had",
    )
    add_launch_options(prove)


def _step_or_eval(text: str) -> int | str:
    return text if text == "eval" else int(text)


def _prove(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides)
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.proof.prove import prove
        from dali_train.extras.proof.replay import replay
        from dali_train.extras.proof.replay_evaluation import replay_evaluation

    run = options.run_dir
    if options.replay is None:
        return FINISHED if prove(run, dataset=options.dataset, all_draws=options.all_draws) else 1
    launch = launch_options(options)
    with local_run(run, ALL_CHECKPOINTS) as directory:
        if options.replay == "eval":
            agrees = replay_evaluation(directory, dataset=options.dataset, options=launch)
        else:
            agrees = replay(directory, options.replay, dataset=options.dataset, options=launch)
    return FINISHED if agrees else 1
