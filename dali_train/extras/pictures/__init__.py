"""Pictures of images: contact sheets of a dataset (`dali-train data show`), and of a run's samples and predictions."""

import argparse
from pathlib import Path

from dali_train.commands.data import (
    Actions,
    add_action,
    check_writable,
    directory_or_url,
    local_directory,
    positive,
)
from dali_train.runtime.object_store import is_remote
from dali_train.text import printable


def add_show_action(actions: Actions) -> None:
    text = "Show a dataset: counts and sizes as text, histograms and a contact sheet of its images as PNG."
    parser = add_action(actions, "show", text, _show)
    parser.add_argument("dataset", type=directory_or_url, metavar="DATASET", help="directory or URL")
    text = "directory for SPLIT.png (default: DATASET/contact_sheets, or ./contact_sheets for a bucket)"
    parser.add_argument("--out", type=local_directory, metavar="DIR", help=text)
    parser.add_argument(
        "--rows", type=positive, default=5, metavar="N", help="rows of images per sheet (default: %(default)s)"
    )
    parser.add_argument(
        "--columns", type=positive, default=8, metavar="N", help="images per row (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of images (default: 0)")


def _show(options: argparse.Namespace) -> int:
    from dali_train.data.dataset.index import Split
    from dali_train.data.dataset.manifest import SPLITS, Manifest
    from dali_train.extras.pictures.sheets import describe, overview

    manifest = Manifest.read(options.dataset)
    splits = [Split(options.dataset, name) for name in SPLITS if name in manifest.splits]
    for line in describe(manifest, splits):
        print(printable(line))
    directory = options.out or (Path() if is_remote(str(options.dataset)) else options.dataset) / "contact_sheets"
    check_writable(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for split in splits:
        path = directory / f"{split.name}.png"
        sheet = overview(split, rows=options.rows, columns=options.columns, seed=options.seed)
        sheet.save(path)
        print(path)
    return 0
