"""From nothing to a trained and evaluated network in a few minutes: `dali-train quickstart`."""

import argparse
import os

from dali_train.commands.arguments import Commands
from dali_train.commands.boundary import importing


def add_quickstart_command(commands: Commands) -> None:
    summary = "Train a small ViT on handwritten digits, from scans to a table of results, in a few minutes."
    details = (
        "It writes runs/quickstart in the working directory: scikit-learn's digits (1,797 scans) as TFRecords, and a "
        "run. It trains on one rank per GPU, or without a GPU on the number of ranks that a short measurement finds "
        "fastest. After an interruption, or Ctrl-C, the same command goes on; after the end it trains another run. "
        "--section.field VALUE changes the recipe: `dali-train train --config digits --help` lists the settings."
    )
    quickstart = commands.add_parser("quickstart", help=summary, description=summary, epilog=details)
    quickstart.set_defaults(run=_quickstart, parser=quickstart)


def _quickstart(options: argparse.Namespace, overrides: list[str]) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `train` does
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.quickstart.train_digits import quickstart

    return quickstart(overrides)
