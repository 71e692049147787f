"""Make a smaller dataset of some classes and images of another one. Classes are renumbered in their old order."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dali_train.data.command import run_tool
from dali_train.data.convert.image import Recipe
from dali_train.data.convert.run import Conversion, convert_and_verify
from dali_train.data.convert.subset import subset


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make_subset.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="directory of the large dataset")
    parser.add_argument("--out", type=Path, required=True, metavar="SUBSET", help="directory of the new dataset")
    classes = parser.add_mutually_exclusive_group()
    classes.add_argument("--classes", type=int, metavar="N", help="so many classes, chosen by --seed")
    classes.add_argument("--class-list", type=Path, metavar="FILE", help="these classes: a name a line")
    parser.add_argument(
        "--images-per-class", type=int, metavar="N", help="at most so many training images of each class, chosen by --seed"
    )
    parser.add_argument("--train-shards", type=int, metavar="N", help="default: by the amount of data, at most 1024")
    parser.add_argument("--validation-shards", type=int, metavar="N", help="default: by the amount of data, at most 128")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and of the order (default: 0)")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="threads (default: one a core)"
    )
    options = parser.parse_args(arguments)
    return run_tool("make_subset", lambda: _make_subset(options))


def _make_subset(options: argparse.Namespace) -> int:
    sources, class_names = subset(
        options.dataset,
        classes=options.classes,
        class_list=options.class_list,
        images_per_class=options.images_per_class,
        seed=options.seed,
    )
    conversion = Conversion(
        name="subset",
        sources=sources,
        class_names=class_names,
        out=options.out,
        recipe=Recipe(decode_check=False),  # the large dataset's images were checked when it was made
        num_shards={"train": options.train_shards, "validation": options.validation_shards},
        seed=options.seed,
        workers=options.workers,
        on_bad="fail",
    )
    for line in convert_and_verify(conversion):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
