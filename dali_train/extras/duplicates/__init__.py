"""Images that are nearly the same, within a split and across splits: `dali-train data duplicates`."""

import argparse

from dali_train.commands.data import Actions, add_action, add_workers, directory_or_url, local_directory, positive
from dali_train.text import printable


def add_duplicates_action(actions: Actions) -> None:
    text = "Find images that are nearly the same: resized or compressed again, within a split and across splits."
    details = (
        "The list of --csv has the training images that have a twin: all that have one in the validation split, and of "
        "each other group all but the first. Delete the lines of those that are to stay; without the others trains "
        "--data.exclude FILE. Mirrored, turned and strongly cropped copies are not found."
    )
    parser = add_action(actions, "duplicates", text, _duplicates, details)
    parser.add_argument("dataset", type=directory_or_url, metavar="DATASET", help="directory or URL")
    parser.add_argument(
        "--groups", type=positive, default=10, metavar="N", help="how many groups are printed (default: %(default)s)"
    )
    parser.add_argument("--csv", type=local_directory, metavar="FILE", help="write the list for data.exclude")
    add_workers(parser)


def _duplicates(options: argparse.Namespace) -> int:
    from dali_train.extras.duplicates.near_duplicates import duplicates

    for line in duplicates(options.dataset, num_shown=options.groups, table=options.csv, workers=options.workers):
        print(printable(line))
    return 0
