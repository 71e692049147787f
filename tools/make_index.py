"""Index TFRecords that someone else wrote, so that training can read them: DATASET/train/*, DATASET/validation/*."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dali_train.data.command import run_tool
from dali_train.data.indexing import build_index


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make_index.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="directory with the folders train and/or validation")
    parser.add_argument(
        "--label-base", type=int, default=1, metavar="N", help="label of the first class (default: 1, as for ImageNet)"
    )
    parser.add_argument("--num-classes", type=int, metavar="N", help="default: as many as the largest label tells")
    parser.add_argument("--no-crc", dest="check_crc", action="store_false", help="check only the framing: far less is read")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="threads (default: one a core)"
    )
    options = parser.parse_args(arguments)
    return run_tool("make_index", lambda: _index(options))


def _index(options: argparse.Namespace) -> int:
    manifest = build_index(
        options.dataset,
        label_base=options.label_base,
        num_classes=options.num_classes,
        check_crc=options.check_crc,
        workers=options.workers,
    )
    for name, split in manifest.splits.items():
        print(f"{name}: {split.num_records:,} images in {len(split.shards)} shards, {manifest.num_classes} classes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
