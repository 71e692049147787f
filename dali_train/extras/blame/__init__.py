"""The images of a strange step, as the network saw them: `dali-train blame`."""

import argparse
from pathlib import Path

from dali_train.checkpoint.run_directory import ALL_CHECKPOINTS, local_run
from dali_train.commands.arguments import Commands, load_user_extensions, on_runs, refuse_numbers, refuse_settings
from dali_train.commands.boundary import importing
from dali_train.errors import ConfigError
from dali_train.runtime.status import FINISHED


def add_blame_command(commands: Commands) -> None:
    summary = "Show the images that made a step's loss, trained again from the checkpoint before it; no log is needed."
    blame = on_runs(commands, "blame", summary, _blame)
    blame.add_argument("--step", type=int, metavar="N", help="counted from 1 (default: where the loss jumps most)")
    blame.add_argument("--dataset", metavar="DATASET", help="where the run's dataset is now (default: its data.root)")
    blame.add_argument("--images", type=int, default=16, metavar="N", help="how many images are shown (default: 16)")
    text = "the PNG file to draw them into (default: RUN/blame/step-N.png)"
    blame.add_argument("--picture", type=Path, metavar="FILE", help=text)
    blame.add_argument("--config", type=Path, metavar="FILE", help="a config file that registers your own model")


def _blame(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides)
    refuse_numbers(options, "step", "images")
    if isinstance(options.run_dir, str) and options.picture is None:
        raise ConfigError(f"blame {options.run_dir}: a bucket is only read, so name a file to write, --picture FILE")
    load_user_extensions(options)
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.blame.step import blame

    with local_run(options.run_dir, ALL_CHECKPOINTS) as run_dir:
        blame(run_dir, options.step, dataset=options.dataset, count=options.images, picture=options.picture)
    return FINISHED
