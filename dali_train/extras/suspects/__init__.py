"""Training images whose labels may be wrong: `dali-train suspects`."""

import argparse
from pathlib import Path

from dali_train.commands.arguments import (
    Commands,
    add_choice_of_weights,
    load_user_extensions,
    on_runs,
    refuse_numbers,
    refuse_settings,
)
from dali_train.commands.boundary import importing
from dali_train.errors import ConfigError
from dali_train.runtime.status import FINISHED


def add_suspects_command(commands: Commands) -> None:
    summary = "Find training images whose labels may be wrong, by the ledger of a run with hooks.ledger true."
    suspects = on_runs(commands, "suspects", summary, _suspects)
    suspects.add_argument(
        "--dataset", metavar="DATASET", help="where the run's dataset is now (default: its data.root)"
    )
    suspects.add_argument("--images", type=int, default=16, metavar="N", help="how many images are shown (default: 16)")
    text = "the PNG file to draw them into (default: RUN/suspects/suspects.png)"
    suspects.add_argument("--picture", type=Path, metavar="FILE", help=text)
    text = "the list of all of them, for data.exclude (default: RUN/suspects/suspects.csv)"
    suspects.add_argument("--csv", type=Path, metavar="FILE", help=text)
    add_choice_of_weights(suspects)


def _suspects(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_settings(options, overrides)
    refuse_numbers(options, "images")
    if isinstance(options.run_dir, str) and None in (options.picture, options.csv):
        raise ConfigError(
            f"suspects {options.run_dir}: a bucket is only read, so name the files to write, --picture FILE --csv FILE"
        )
    load_user_extensions(options)
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.mirror.mirror import with_ledger
        from dali_train.extras.suspects.find import show_suspects

    with with_ledger(options.run_dir, options.checkpoint) as run_dir:
        show_suspects(
            run_dir,
            dataset=options.dataset,
            count=options.images,
            picture=options.picture,
            table=options.csv,
            checkpoint=options.checkpoint,
            weights=options.weights,
        )
    return FINISHED
