"""Show a dataset: counts and size histograms as text, and a contact sheet of its images as PNG."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dali_train.data.command import run_tool
from dali_train.data.index import Split
from dali_train.data.manifest import SPLITS, Manifest
from dali_train.data.show import contact_sheet, describe


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="show_dataset.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("dataset", type=Path, metavar="DATASET")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where SPLIT.png are written (default: DATASET/contact_sheets)")
    parser.add_argument("--rows", type=int, default=5, metavar="N", help="of images on a sheet (default: %(default)s)")
    parser.add_argument("--columns", type=int, default=8, metavar="N", help="of images on a sheet (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of images (default: 0)")
    options = parser.parse_args(arguments)
    if min(options.rows, options.columns) < 1:
        parser.error(f"--rows {options.rows} --columns {options.columns}: use at least 1 of each")
    return run_tool("show_dataset", lambda: _show(options))


def _show(options: argparse.Namespace) -> int:
    manifest = Manifest.read(options.dataset)
    splits = [Split(options.dataset, name) for name in SPLITS if name in manifest.splits]
    for line in describe(manifest, splits):
        print(line)
    directory = options.out or options.dataset / "contact_sheets"
    directory.mkdir(parents=True, exist_ok=True)
    for split in splits:
        path = directory / f"{split.name}.png"
        contact_sheet(split, rows=options.rows, columns=options.columns, seed=options.seed).save(path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
