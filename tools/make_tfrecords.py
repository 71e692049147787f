"""Convert an image dataset into shuffled, verified, indexed TFRecords.

The result is the same, bit for bit, for any number of workers. A run that was stopped, killed or out of disk space
goes on when the same command is started again.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dali_train.data.command import run_tool
from dali_train.data.convert.download import DOWNLOADS, download
from dali_train.data.convert.image import Recipe
from dali_train.data.convert.imagenet import imagenet
from dali_train.data.convert.run import DOWNLOAD_DIRECTORY, Conversion, ConversionError, convert_and_verify
from dali_train.data.convert.small import DIGIT_CLASSES, FASHION_CLASSES, Sources, cifar10, digits, mnist
from dali_train.data.convert.trees import folders


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return run_tool(f"make_tfrecords {options.dataset}", lambda: _convert(options))


def _convert(options: argparse.Namespace) -> int:
    sources, class_names = _sources(options)
    conversion = Conversion(
        name=options.dataset,
        sources=sources,
        class_names=class_names,
        out=options.out,
        recipe=Recipe(
            format=options.format,
            max_side=options.max_side,
            short_side=options.short_side,
            quality=options.quality,
            decode_check=options.decode_check,
        ),
        num_shards={"train": options.train_shards, "validation": options.validation_shards},
        seed=options.seed,
        workers=options.workers,
        on_bad=options.on_bad,
    )
    for line in convert_and_verify(conversion):
        print(line)
    return 0


def _sources(options: argparse.Namespace) -> Sources:
    match options.dataset:
        case "imagenet":
            return imagenet(options.train_archive, options.validation_archive, options.devkit)
        case "folder":
            return folders(options.train, options.validation, validation_fraction=options.validation_fraction, seed=options.seed)
        case "digits":
            return digits()
    source = _fetched(options) if options.download else options.source
    if source is None:
        raise ConversionError("name the published files with --source, or let --download fetch them")
    match options.dataset:
        case "cifar10":
            return cifar10(source)
        case "mnist":
            return mnist(source, class_names=DIGIT_CLASSES, title="mnist")
    return mnist(source, class_names=FASHION_CLASSES, title="fashion-mnist")


def _fetched(options: argparse.Namespace) -> Path:
    """Where the downloaded files are."""
    directory: Path = options.source or options.out / DOWNLOAD_DIRECTORY
    download(DOWNLOADS[options.dataset], directory, mirror=options.mirror)
    return directory


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="make_tfrecords.py", description=summary, epilog=details, allow_abbrev=False)
    commands = parser.add_subparsers(dest="dataset", required=True, metavar="DATASET")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=[shared], allow_abbrev=False)
        return command

    shared = _shared_options()
    command = add("imagenet", "ImageNet (ILSVRC 2012) from the official archives, without unpacking them.")
    command.add_argument("--train-archive", type=Path, metavar="FILE", help="ILSVRC2012_img_train.tar")
    command.add_argument("--validation-archive", type=Path, metavar="FILE", help="ILSVRC2012_img_val.tar; needs --devkit")
    command.add_argument("--devkit", type=Path, metavar="FILE", help="ILSVRC2012_devkit_t12.tar.gz: the validation labels")

    command = add("folder", "Image files in one folder a class, in directories or tar archives.")
    command.add_argument("--train", type=Path, metavar="DIR", help="holds CLASS/name.jpg; the sorted names are the labels")
    command.add_argument("--validation", type=Path, metavar="DIR", help="the same classes")
    command.add_argument("--validation-fraction", type=float, metavar="F", help="instead: hold out this part of each class")

    downloadable = {
        "cifar10": "CIFAR-10: the binary version (archive or directory), or a tree train/CLASS, test/CLASS of images.",
        "mnist": "MNIST: the directory of the official idx files, gzipped or not.",
        "fashion-mnist": "Fashion-MNIST: the directory of the official idx files, gzipped or not.",
    }
    for name, text in downloadable.items():
        command = add(name, text)
        command.add_argument("--source", type=Path, metavar="PATH", help="the published files, or where --download puts them")
        command.add_argument("--download", action="store_true", help="fetch the files that are not there yet, checksums checked")
        command.add_argument("--mirror", metavar="URL", help=f"fetch from here instead of {DOWNLOADS[name].address}")
    add(
        "digits",
        "scikit-learn's 1,797 handwritten digits, enlarged to 32 x 32 pixels. The last fifth of the file, which is ordered "
        "by writer, is the validation split: digits of writers that training never sees, a harder test than a random split.",
    )
    return parser


def _shared_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", type=Path, required=True, metavar="DATASET", help="directory of the new dataset")
    group = parser.add_argument_group("shards")
    group.add_argument("--train-shards", type=int, metavar="N", help="default: 1024, fewer for a small set")
    group.add_argument("--validation-shards", type=int, metavar="N", help="default: 128, fewer for a small set")
    group.add_argument("--seed", type=int, default=0, help="of the order of the images over all shards (default: 0)")
    group.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="threads (default: one a core, %(default)s here)",
    )
    group = parser.add_argument_group("images")
    group.add_argument(
        "--format",
        choices=("jpeg", "raw"),
        default="jpeg",
        help="raw: RGB pixels that need no decoder, for images of a few thousand pixels (default: jpeg)",
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument("--max-side", type=int, metavar="PIXELS", help="shrink images whose longer side exceeds this")
    size.add_argument("--short-side", type=int, metavar="PIXELS", help="shrink images whose shorter side exceeds this")
    group.add_argument(
        "--quality", type=int, default=95, metavar="Q", help="JPEG quality of what must be encoded anew (default: %(default)s)"
    )
    group.add_argument(
        "--no-decode-check", dest="decode_check", action="store_false", help="do not decode the images that stay as they are"
    )
    group.add_argument(
        "--on-bad",
        choices=("fail", "skip"),
        default="fail",
        help="images that cannot be decoded, named in quarantine.jsonl: fail when all are known, or leave them out (default: fail)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
