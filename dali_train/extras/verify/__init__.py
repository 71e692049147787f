"""Check a dataset down to each record and image: `dali-train data verify`."""

import argparse
import sys

from dali_train.commands.data import (
    Actions,
    add_action,
    add_workers,
    directory_or_url,
    positive,
)
from dali_train.text import plural, printable


def add_verify_action(actions: Actions) -> None:
    text = (
        "Check a dataset: records against checksums, index against records, manifest against files, images, duplicates."
    )
    details = (
        "Exit status 0: no faults. 1: faults, with one line each. Notes, such as images with the same bytes under two "
        "labels, concern the source rather than the files: they are printed but do not count as faults."
    )
    parser = add_action(actions, "verify", text, _verify, details)
    parser.add_argument("dataset", type=directory_or_url, metavar="DATASET", help="directory or URL")
    parser.add_argument("--sample", type=positive, metavar="N", help="check N records per split instead of all")
    parser.add_argument(
        "--no-decode", dest="decode", action="store_false", help="do not decode images, the slowest check"
    )
    add_workers(parser)


def _verify(options: argparse.Namespace) -> int:
    from dali_train.extras.verify.images import verify

    findings = verify(options.dataset, sample=options.sample, decode=options.decode, workers=options.workers)
    for line in findings.summary():
        print(printable(line))
    if findings.problems:
        print(f"{options.dataset}: {plural(len(findings.problems), 'fault')}", file=sys.stderr)
        return 1
    return 0
