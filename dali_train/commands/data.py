"""``dali-train data``: make, index, check and show datasets.

Exit status: 0 done, 2 a mistake in the command or in what it is given, 1 a failure (a full disk, damaged records, no
network) or faults that `verify` found, 130 stopped with Ctrl-C.

The modules that do the work are imported by the commands that need them, so that ``dali-train --help`` need not wait
for them.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dali_train.data.convert.download import DOWNLOADS, download
from dali_train.errors import DatasetError


def add_data_command(commands: Any) -> None:
    """Add ``data`` and its commands to the subparsers `commands`; the parsed options' ``run`` is `run`."""
    text = "Make, index, check and show datasets."
    parser = commands.add_parser("data", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    _add_actions(parser)


def run(options: argparse.Namespace, unknown: Sequence[str]) -> int:
    """Carry out a parsed command; returns the exit status. `unknown` are arguments that no option took."""
    name = " ".join(filter(None, ("dali-train data", options.action, getattr(options, "source_kind", None))))

    def work() -> int:
        if unknown:
            raise DatasetError(f"{' '.join(unknown)}: unknown; `{name} --help` lists the options")
        status: int = options.work(options)
        return status

    return run_tool(name, work)


def run_tool(name: str, work: Callable[[], int]) -> int:
    """What `work` returns; an error becomes one line for people and the exit status that says of which kind it is (see
    above)."""
    from dali_train.data.convert.archive import SourceError
    from dali_train.data.convert.download import DownloadError
    from dali_train.data.convert.image import EncodingOptionsError
    from dali_train.data.convert.run import ConversionError, ConversionFailedError
    from dali_train.data.dataset.tfrecord import TFRecordError

    mistakes = (
        ConversionError,
        EncodingOptionsError,
        SourceError,
        DatasetError,
    )  # in the command, or in what it is given
    try:
        return work()
    except (*mistakes, ConversionFailedError, DownloadError, TFRecordError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, mistakes) else 1
    except KeyboardInterrupt:
        print(f"{name}: stopped; start the same command again to resume", file=sys.stderr)
        return 130  # as the shell reports a command that Ctrl-C ended


def main(action: str, arguments: Sequence[str] | None = None) -> int:
    """``dali-train data ACTION`` by itself, for the scripts in tools/."""
    parser = argparse.ArgumentParser(prog="dali-train data", allow_abbrev=False)
    _add_actions(parser)
    return run(parser.parse_args([action, *(sys.argv[1:] if arguments is None else arguments)]), [])


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(
        name: str, text: str, work: Callable[[argparse.Namespace], int], details: str = ""
    ) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=text, epilog=details, allow_abbrev=False
        )
        action.set_defaults(work=work)
        return action

    _add_convert(
        add(
            "convert",
            "Convert an image dataset into shuffled, verified, indexed TFRecords.",
            _convert,
            "The result is the same, bit for bit, for any number of workers. A run that was stopped, killed or out "
            "of disk space resumes when the same command is started again.",
        )
    )
    _add_index(
        add(
            "index",
            "Index TFRecords that someone else wrote, so that training can read them.",
            _index,
            "They lie in DATASET/train and DATASET/validation (or val), or as train-* and validation-* (or val-*) "
            "in DATASET. Shards that lie elsewhere than in OUT/train and OUT/validation are linked there.",
        )
    )
    _add_subset(
        add(
            "subset",
            "Make a smaller dataset of some classes and images of another one, renumbered in their old order.",
            _subset,
        )
    )
    _add_verify(
        add(
            "verify",
            "Check a dataset: records against checksums, index against records, manifest against files, images, "
            "duplicates.",
            _verify,
            "Exit status 0: nothing is wrong. 1: something is, and each fault has a line. Notes, such as images "
            "with the same bytes under two labels, are faults of the source rather than of the files: they are "
            "printed and do not count.",
        )
    )
    _add_show(
        add(
            "show",
            "Show a dataset: counts and size histograms as text, and a contact sheet of its images as PNG.",
            _show,
        )
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: use at least 1")
    return int(text)


def _add_workers(parser: argparse._ActionsContainer) -> None:
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers", type=int, default=cores, metavar="N", help=f"threads (default: one per core, {cores} here)"
    )


# data convert


def _add_convert(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="source_kind", required=True, metavar="SOURCE")
    shared = _conversion_options()

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[shared], allow_abbrev=False)

    command = add("imagenet", "ImageNet (ILSVRC 2012) from the official archives, without unpacking them.")
    command.add_argument("--train-archive", type=Path, metavar="FILE", help="ILSVRC2012_img_train.tar")
    command.add_argument(
        "--validation-archive", type=Path, metavar="FILE", help="ILSVRC2012_img_val.tar; needs --devkit"
    )
    command.add_argument(
        "--devkit", type=Path, metavar="FILE", help="ILSVRC2012_devkit_t12.tar.gz: the validation labels"
    )

    command = add("folder", "Image files in one folder per class, in directories or tar archives.")
    command.add_argument(
        "--train",
        type=Path,
        metavar="DIR",
        help="holds CLASS/name.jpg, the sorted names are the labels; or train/ and val/ or test/",
    )
    command.add_argument("--validation", type=Path, metavar="DIR", help="the same classes")
    command.add_argument(
        "--validation-fraction", type=float, metavar="F", help="instead: hold out this part of each class"
    )

    downloadable = {
        "cifar10": "CIFAR-10: the binary version (archive or directory), or a tree train/CLASS, test/CLASS of images.",
        "mnist": "MNIST: the directory of the official idx files, gzipped or not.",
        "fashion-mnist": "Fashion-MNIST: the directory of the official idx files, gzipped or not.",
    }
    for name, text in downloadable.items():
        command = add(name, text)
        command.add_argument(
            "--source", type=Path, metavar="PATH", help="the published files, or where --download puts them"
        )
        command.add_argument(
            "--download", action="store_true", help="fetch the files that are not there yet, checksums checked"
        )
        command.add_argument("--mirror", metavar="URL", help=f"fetch from here instead of {DOWNLOADS[name].address}")
    add(
        "digits",
        "scikit-learn's 1,797 handwritten digits, enlarged to 32 x 32 pixels. The last fifth of the file, which is "
        "ordered by writer, is the validation split: digits of writers that training never sees, a harder test than "
        "a random split.",
    )


def _conversion_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", type=Path, required=True, metavar="DATASET", help="directory of the new dataset")
    group = parser.add_argument_group("shards")
    group.add_argument("--train-shards", type=int, metavar="N", help="default: 1024, fewer for a small set")
    group.add_argument("--validation-shards", type=int, metavar="N", help="default: 128, fewer for a small set")
    group.add_argument(
        "--seed", type=int, default=0, help="seed of the order of the images over all shards (default: 0)"
    )
    _add_workers(group)
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
        "--quality",
        type=int,
        default=95,
        metavar="Q",
        help="JPEG quality of what must be encoded anew (default: %(default)s)",
    )
    group.add_argument(
        "--no-decode-check",
        dest="decode_check",
        action="store_false",
        help="do not decode the images that stay as they are",
    )
    group.add_argument(
        "--on-bad",
        choices=("fail", "skip"),
        default="fail",
        help=(
            "images that cannot be decoded, named in quarantine.jsonl: fail when all are known, or leave them out "
            "(default: fail)"
        ),
    )
    return parser


def _convert(options: argparse.Namespace) -> int:
    from dali_train.data.convert.image import EncodingOptions
    from dali_train.data.convert.run import Conversion, convert

    sources, class_names = _sources(options)
    conversion = Conversion(
        name=options.source_kind,
        sources=sources,
        class_names=class_names,
        out=options.out,
        encoding=EncodingOptions(
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
    for line in convert(conversion):
        print(line)
    return 0


def _sources(options: argparse.Namespace) -> Any:
    """The splits and the class names."""
    from dali_train.data.convert.imagenet import imagenet
    from dali_train.data.convert.small import DIGIT_CLASSES, FASHION_CLASSES, cifar10, digits, mnist
    from dali_train.data.convert.trees import folders

    match options.source_kind:
        case "imagenet":
            return imagenet(options.train_archive, options.validation_archive, options.devkit)
        case "folder":
            return folders(
                options.train, options.validation, validation_fraction=options.validation_fraction, seed=options.seed
            )
        case "digits":
            return digits()
    source = _downloaded(options) if options.download else options.source
    if source is None:
        raise DatasetError("name the published files with --source, or let --download fetch them")
    match options.source_kind:
        case "cifar10":
            return cifar10(source)
        case "mnist":
            return mnist(source, class_names=DIGIT_CLASSES, title="mnist")
    return mnist(source, class_names=FASHION_CLASSES, title="fashion-mnist")


def _downloaded(options: argparse.Namespace) -> Path:
    """Where the downloaded files are."""
    from dali_train.data.convert.run import DOWNLOAD_DIRECTORY

    directory: Path = options.source or options.out / DOWNLOAD_DIRECTORY
    download(DOWNLOADS[options.source_kind], directory, mirror=options.mirror)
    return directory


# data index


def _add_index(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="directory with the TFRecords")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="OUT",
        help="directory of the index, e.g. where DATASET is read-only (default: DATASET)",
    )
    parser.add_argument(
        "--label-base", type=int, default=1, metavar="N", help="label of the first class (default: 1, as for ImageNet)"
    )
    parser.add_argument("--num-classes", type=int, metavar="N", help="default: the largest label decides")
    parser.add_argument("--image-key", metavar="NAME", help="the feature that holds the image (default: image/encoded)")
    parser.add_argument(
        "--label-key", metavar="NAME", help="the feature that holds the label (default: image/class/label)"
    )
    parser.add_argument(
        "--no-crc", dest="check_crc", action="store_false", help="check only the framing: far less is read"
    )
    _add_workers(parser)


def _index(options: argparse.Namespace) -> int:
    from dali_train.data.dataset.build_index import DEFAULT_FEATURES, Features, build_index, unused_classes

    out = options.out or options.dataset
    manifest = build_index(
        options.dataset,
        out=out,
        label_base=options.label_base,
        num_classes=options.num_classes,
        features=Features(
            image=options.image_key or DEFAULT_FEATURES.image,
            label=options.label_key or DEFAULT_FEATURES.label,
        ),
        check_crc=options.check_crc,
        workers=options.workers,
    )
    for name, split in manifest.splits.items():
        print(f"{name}: {split.num_records:,} images in {len(split.shards)} shards, {manifest.num_classes} classes")
    unused = unused_classes(out)
    if unused:
        labels = ", ".join(str(number + manifest.label_base) for number in unused[:10]) + (
            ", ..." if len(unused) > 10 else ""
        )
        print(f"note: no record has the label {labels}: {len(unused)} of {manifest.num_classes} classes are unused")
    return 0


# data subset


def _add_subset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="directory of the large dataset")
    parser.add_argument("--out", type=Path, required=True, metavar="SUBSET", help="directory of the new dataset")
    classes = parser.add_mutually_exclusive_group()
    classes.add_argument("--classes", type=int, metavar="N", help="number of classes, chosen by --seed")
    classes.add_argument("--class-list", type=Path, metavar="FILE", help="these classes: one name per line")
    parser.add_argument(
        "--images-per-class", type=int, metavar="N", help="at most N training images of each class, chosen by --seed"
    )
    parser.add_argument("--train-shards", type=int, metavar="N", help="default: by the amount of data, at most 1024")
    parser.add_argument(
        "--validation-shards", type=int, metavar="N", help="default: by the amount of data, at most 128"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice and of the order (default: 0)")
    _add_workers(parser)


def _subset(options: argparse.Namespace) -> int:
    from dali_train.data.convert.image import EncodingOptions
    from dali_train.data.convert.run import Conversion, convert
    from dali_train.data.convert.subset import subset

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
        encoding=EncodingOptions(decode_check=False),  # the large dataset's images were checked when it was made
        num_shards={"train": options.train_shards, "validation": options.validation_shards},
        seed=options.seed,
        workers=options.workers,
        on_bad="fail",
    )
    for line in convert(conversion):
        print(line)
    return 0


# data verify


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", type=Path, metavar="DATASET")
    parser.add_argument("--sample", type=_positive, metavar="N", help="check N records per split instead of all")
    parser.add_argument(
        "--no-decode", dest="decode", action="store_false", help="do not decode the images, which takes longest"
    )
    _add_workers(parser)


def _verify(options: argparse.Namespace) -> int:
    from dali_train.data.dataset.verify import verify

    findings = verify(options.dataset, sample=options.sample, decode=options.decode, workers=options.workers)
    for line in findings.summary():
        print(line)
    if findings.problems:
        print(f"{options.dataset}: {len(findings.problems)} faults", file=sys.stderr)
        return 1
    return 0


# data show


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", type=Path, metavar="DATASET")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for SPLIT.png (default: DATASET/contact_sheets)"
    )
    parser.add_argument(
        "--rows", type=_positive, default=5, metavar="N", help="rows of images per sheet (default: %(default)s)"
    )
    parser.add_argument(
        "--columns", type=_positive, default=8, metavar="N", help="images per row (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of images (default: 0)")


def _show(options: argparse.Namespace) -> int:
    from dali_train.data.dataset.index import Split
    from dali_train.data.dataset.manifest import SPLITS, Manifest
    from dali_train.data.dataset.show import describe, overview

    manifest = Manifest.read(options.dataset)
    splits = [Split(options.dataset, name) for name in SPLITS if name in manifest.splits]
    for line in describe(manifest, splits):
        print(line)
    directory = options.out or options.dataset / "contact_sheets"
    directory.mkdir(parents=True, exist_ok=True)
    for split in splits:
        path = directory / f"{split.name}.png"
        overview(split, rows=options.rows, columns=options.columns, seed=options.seed).save(path)
        print(path)
    return 0
