"""A smaller dataset from a larger one: `dali-train data subset`."""

import argparse
from pathlib import Path

from dali_train.commands.data import (
    Actions,
    add_action,
    add_shards,
    check_destination,
    directory_or_url,
    write_dataset,
)


def add_subset_action(actions: Actions) -> None:
    text = "Make a smaller dataset from some classes and images of another one; the classes keep their order."
    parser = add_action(actions, "subset", text, _subset)
    parser.add_argument(
        "dataset", type=directory_or_url, metavar="DATASET", help="directory or URL of the large dataset"
    )
    parser.add_argument(
        "--out", type=directory_or_url, required=True, metavar="SUBSET", help="directory or URL of the subset"
    )
    classes = parser.add_mutually_exclusive_group()
    classes.add_argument(
        "--classes",
        type=int,
        metavar="N",
        help="number of classes, chosen by --seed; images with several labels keep those among them, and need one",
    )
    classes.add_argument("--class-list", type=Path, metavar="FILE", help="class names, one per line")
    parser.add_argument(
        "--images-per-class", type=int, metavar="N", help="at most N training images of each class, chosen by --seed"
    )
    add_shards(parser)


def _subset(options: argparse.Namespace) -> int:
    from dali_train.data.convert.conversion import destination
    from dali_train.data.convert.image import EncodingOptions
    from dali_train.data.dataset.manifest import Manifest
    from dali_train.extras.subset.choose import subset

    options.out, options.upload = destination(options.out)
    check_destination(options.out, {"DATASET": options.dataset})
    sources = subset(
        options.dataset,
        classes=options.classes,
        class_list=options.class_list,
        images_per_class=options.images_per_class,
        seed=options.seed,
    )
    # The large dataset's images were checked, and perhaps turned, when it was made.
    turned = Manifest.read(options.dataset).applies_orientation
    return write_dataset("subset", sources, options, EncodingOptions(decode_check=False, apply_orientation=turned))
