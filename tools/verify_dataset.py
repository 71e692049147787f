"""Check a dataset: records against checksums, index against records, manifest against files, duplicates.

Exit status 0: nothing is wrong. 1: something is, and each fault has a line. Notes, such as images with the same bytes
under two labels, are faults of the source rather than of the files: they are printed and leave the status alone.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dali_train.data.command import run_tool
from dali_train.data.verify import verify


def main(arguments: Sequence[str] | None = None) -> int:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="verify_dataset.py", description=summary, epilog=details, allow_abbrev=False)
    parser.add_argument("dataset", type=Path, metavar="DATASET")
    parser.add_argument("--sample", type=int, metavar="N", help="check so many records a split instead of all")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="threads (default: one a core)"
    )
    options = parser.parse_args(arguments)
    if options.sample is not None and options.sample < 1:
        parser.error(f"--sample is {options.sample}: use at least 1")
    return run_tool("verify_dataset", lambda: _verify(options))


def _verify(options: argparse.Namespace) -> int:
    findings = verify(options.dataset, sample=options.sample, workers=options.workers)
    for line in findings.summary():
        print(line)
    if findings.problems:
        print(f"{options.dataset}: {len(findings.problems)} faults", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
