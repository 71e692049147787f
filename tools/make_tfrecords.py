"""Convert an image dataset into shuffled, verified, indexed TFRecords. Killed or stopped, start it again: it goes on."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dali_train.data.convert.image import Recipe
from dali_train.data.convert.run import Conversion, ConversionError, convert
from dali_train.data.convert.small import digits
from dali_train.data.convert.sources import SourceError


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    sources, names = digits()
    conversion = Conversion(
        name=options.dataset,
        sources=sources,
        class_names=names,
        out=options.out,
        recipe=Recipe(),
        num_shards={},
        seed=0,
        workers=2,
        on_bad="fail",
    )
    manifest = convert(conversion)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="dataset", required=True)
    c = commands.add_parser("digits")
    c.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
