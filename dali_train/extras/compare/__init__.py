"""Two recipes on the same images, crops, partners and masks: `dali-train compare`."""

import argparse
from pathlib import Path

from dali_train.commands.arguments import Commands, refuse_numbers
from dali_train.commands.boundary import importing
from dali_train.runtime.status import FINISHED, START_AGAIN


def add_compare_command(commands: Commands) -> None:
    summary = "Train two recipes with several seeds, and print the difference of their pairs with its standard error."
    details = (
        "--section.field VALUE changes both recipes. Started again, it continues: finished runs are read, also those "
        "that `train` has made with --data.seed N and --run.dir DIR/NAME-seed-N, such as a job array, and an "
        "interrupted one resumes. To find a difference of d points with a probability of 80 % at a level of 5 % takes "
        "((1.96 + 0.84) s / d)**2 pairs, s being the standard deviation of a pair's difference; it is printed for 0.1."
    )
    compare = commands.add_parser("compare", help=summary, description=summary, epilog=details)
    compare.set_defaults(run=_compare, parser=compare)
    compare.add_argument("first", metavar="A.py", help="a config file, or a recipe by name")
    compare.add_argument("second", metavar="B.py", help="the one to compare with it")
    compare.add_argument("--seeds", type=int, default=5, metavar="N", help="pairs: data.seed 0 to N - 1 (default: 5)")
    text = "the folder of the runs (default: runs/compare)"
    compare.add_argument("--out", type=Path, default=Path("runs/compare"), metavar="DIR", help=text)


def _compare(options: argparse.Namespace, overrides: list[str]) -> int:
    refuse_numbers(options, "seeds")
    with importing(f"dali-train {options.command}"):
        from dali_train.extras.compare.pairs import compare

    is_complete = compare(options.first, options.second, overrides, num_seeds=options.seeds, out=options.out)
    return FINISHED if is_complete else START_AGAIN
