"""From a folder of images to a trained network by one command: `dali-train fit`."""

import argparse
from pathlib import Path

from dali_train.commands.arguments import Commands
from dali_train.data.convert.datasets import GROUP_BY, LABEL_SEPARATOR, MULTI_HOT, SEVERAL_LABELS
from dali_train.extras.init import add_network_options


def add_fit_command(commands: Commands) -> None:
    summary = "From a folder of images to a trained network: index, init, train, mistakes, export, in one command."
    details = (
        "No image is copied. Each step is a command of its own, which is printed; --section.field VALUE is passed to "
        "`train`. After an interruption, or Ctrl-C, the same command goes on where it was."
    )
    fit = commands.add_parser("fit", help=summary, description=summary, epilog=details)
    fit.set_defaults(run=_fit, parser=fit)
    text = "class folders, train/ and val/ of them, a table (.csv) of files and labels, tars, or a dataset or index"
    fit.add_argument("source", metavar="SOURCE", help=text)
    text = "the run directory, which also gets the index and the config file (default: runs/fit)"
    fit.add_argument("--out", type=Path, default=Path("runs/fit"), metavar="RUN", help=text)
    add_network_options(fit)
    text = "held out of each class for validation, where the source has no such split (default: 0.2)"
    fit.add_argument("--validation-fraction", type=float, metavar="F", help=text)
    fit.add_argument("--group-by", **GROUP_BY)
    fit.add_argument("--label-separator", **LABEL_SEPARATOR)
    fit.add_argument("--multi-hot", **MULTI_HOT)
    fit.add_argument("--several-labels", **SEVERAL_LABELS)


def _fit(options: argparse.Namespace, overrides: list[str]) -> int:
    from dali_train.extras.fit.steps import Fit

    return Fit(options, overrides).run()
