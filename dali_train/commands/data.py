"""``dali-train data``: make, index, check and show datasets.

Exit status: 0 done, 2 a mistake in the command or its input, 1 a failure (a full disk, damaged records, no network) or
faults found by `verify`, 130 stopped with Ctrl-C.

The modules that do the work are imported only by the commands that need them, so that ``dali-train --help`` is fast.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dali_train.commands.boundary import run_command
from dali_train.config.check import load_row
from dali_train.data.convert.datasets import CLASS_ORDER, DATASETS, load_sources
from dali_train.errors import DatasetError
from dali_train.runtime.object_store import is_remote
from dali_train.runtime.process import num_cores
from dali_train.text import plural, printable, shortened

# What most datasets do without, imported where it is asked for.
SUBSET = "dali_train.extras.subset:subset"
SHEETS = "dali_train.extras.pictures.sheets"
IN_PLACE = "dali_train.extras.index_in_place"

if TYPE_CHECKING:
    from dali_train.data.convert.datasets import InPlace
    from dali_train.data.convert.image import EncodingOptions
    from dali_train.data.convert.sources import Sources
    from dali_train.data.dataset.build_index import Fetch
    from dali_train.extras.formats.listing import Within


def add_data_command(commands: Any) -> None:
    """Add ``data`` and its commands to the subparsers `commands`; the parsed options' ``run`` is `run`."""
    text = "Make, index, check and show datasets."
    parser = commands.add_parser("data", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    _add_actions(parser)


def run(options: argparse.Namespace, unknown: Sequence[str]) -> int:
    """Run a parsed command and return its exit status. `unknown` are the arguments that match no option."""
    name = " ".join(filter(None, ("dali-train data", options.action, getattr(options, "source_kind", None))))

    def work() -> int:
        if unknown:
            raise DatasetError(f"{' '.join(unknown)}: unknown; `{name} --help` lists the options")
        try:
            status: int = options.work(options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped; start the same command again to resume") from None
        return status

    return run_command(name, work)


def data_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dali-train data", allow_abbrev=False)
    _add_actions(parser)
    return parser


def main(action: str, arguments: Sequence[str] | None = None) -> int:
    """Run ``dali-train data ACTION`` by itself, for the scripts in tools/."""
    return run(data_parser().parse_args([action, *(sys.argv[1:] if arguments is None else arguments)]), [])


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

    text = "Convert an image dataset into shuffled, verified, indexed TFRecords."
    details = (
        "The result is the same, bit for bit, for any number of workers. After an interruption or on a full disk, the "
        "same command resumes. Machines that share a disk convert together: the same command with --plan once, then "
        "with --part 1/N to N/N in any order, repeating those that failed, then with --finish."
    )
    _add_convert(add("convert", text, _convert, details))
    text = "Index images where they lie, so that training can read them: TFRecords, class folders, tars, MDS."
    details = (
        "Class folders, WebDataset's tars and MDS that is not compressed are read in place: the index, in OUT, is all "
        "that is written, and no image is copied. Images have the order that `convert` gives them, so that a run gets "
        "the same losses. After an interruption the same command resumes. TFRecords are in DATASET/train and "
        "DATASET/validation (or val), or are DATASET/train-* and DATASET/validation-* (or val-*); in a bucket they are "
        "in DATASET/train and DATASET/validation. Files outside OUT/train and OUT/validation are linked there."
    )
    _add_index(add("index", text, _index, details))
    text = "Make a smaller dataset from some classes and images of another one; the classes keep their order."
    _add_subset(add("subset", text, _subset))
    text = (
        "Check a dataset: records against checksums, index against records, manifest against files, images, duplicates."
    )
    details = (
        "Exit status 0: no faults. 1: faults, with one line each. Notes, such as images with the same bytes under two "
        "labels, concern the source rather than the files: they are printed but do not count as faults."
    )
    _add_verify(add("verify", text, _verify, details))
    text = "Show a dataset: counts and sizes as text, histograms and a contact sheet of its images as PNG."
    _add_show(add("show", text, _show))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: use at least 1")
    return int(text)


def _directory(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text}: use a directory")
    return Path(text)


def _dataset(text: str) -> Path | str:
    return text if is_remote(text) else _directory(text)


def _add_workers(parser: argparse._ActionsContainer) -> None:
    cores = num_cores()
    parser.add_argument(
        "--workers", type=_positive, default=cores, metavar="N", help=f"threads (default: one per core, {cores} here)"
    )


def _add_shards(parser: argparse._ActionsContainer) -> None:
    for split, most in (("train", 1024), ("validation", 128)):
        text = f"default: by the amount of data, at most {most}"
        parser.add_argument(f"--{split}-shards", type=int, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and choice of images (default: 0)")
    _add_workers(parser)


# data convert


def _add_convert(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="source_kind", required=True, metavar="SOURCE")
    shared = _conversion_options()
    for name, converter in DATASETS.items():
        text = converter.help
        command = commands.add_parser(name, help=text, description=text, parents=[shared], allow_abbrev=False)
        for option, details in converter.arguments.items():
            command.add_argument(option, **details)
        default = "turn them" if converter.applies_orientation else "keep the bytes"
        command.add_argument(
            "--apply-orientation",
            action=argparse.BooleanOptionalAction,
            default=converter.applies_orientation,
            help="turn photographs upright whose EXIF orientation is not, which re-encodes them with --quality; "
            f"training ignores that tag (default: {default})",
        )
        if converter.download is not None:
            text = "fetch the files that are missing in --source (default: OUT/downloads), and verify checksums"
            command.add_argument("--download", action="store_true", help=text)
            command.add_argument("--mirror", metavar="URL", help=f"use instead of {converter.download.address}")


def _conversion_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--out", type=_dataset, required=True, metavar="DATASET", help="directory or URL of the new dataset"
    )
    _add_shards(parser.add_argument_group("shards"))
    group = parser.add_argument_group("images")
    text = "raw: RGB pixels that need no decoder, for images of a few thousand pixels (default: jpeg)"
    group.add_argument("--format", choices=("jpeg", "raw"), default="jpeg", help=text)
    size = group.add_mutually_exclusive_group()
    size.add_argument("--max-side", type=int, metavar="PIXELS", help="shrink images whose longer side exceeds this")
    size.add_argument("--short-side", type=int, metavar="PIXELS", help="shrink images whose shorter side exceeds this")
    text = "JPEG quality of images that must be re-encoded (default: %(default)s)"
    group.add_argument("--quality", type=int, default=95, metavar="Q", help=text)
    text = "do not decode images that are stored unchanged"
    group.add_argument("--no-decode-check", dest="decode_check", action="store_false", help=text)
    text = (
        "images that cannot be decoded are listed in quarantine.jsonl: fail at the end, or leave them out (default: "
        "fail)"
    )
    group.add_argument("--on-bad", choices=("fail", "skip"), default="fail", help=text)
    group = parser.add_mutually_exclusive_group()
    text = "with several machines, first: claim DATASET for this conversion, and print the number of shards"
    group.add_argument("--plan", dest="phase", action="store_const", const="plan", default="all", help=text)
    text = "with several machines: make every N-th shard starting with the I-th, while others make the rest"
    group.add_argument("--part", dest="phase", metavar="I/N", help=text)
    text = "with several machines, when all shards are made: list bad images, write the index, verify all files"
    group.add_argument("--finish", dest="phase", action="store_const", const="finish", help=text)
    return parser


def _convert(options: argparse.Namespace) -> int:
    from dali_train.data.convert.conversion import destination
    from dali_train.data.convert.image import EncodingOptions

    options.out, options.upload = destination(options.out, options.phase)
    arguments = DATASETS[options.source_kind].arguments
    _check_destination(
        options.out, {option: getattr(options, option.strip("-").replace("-", "_"), None) for option in arguments}
    )
    encoding = EncodingOptions(
        format=options.format,
        max_side=options.max_side,
        short_side=options.short_side,
        quality=options.quality,
        decode_check=options.decode_check,
        apply_orientation=options.apply_orientation,
    )
    return _write(options.source_kind, load_sources(options), options, encoding)


def _check_destination(out: Path, sources: Mapping[str, Any]) -> None:
    """Raises DatasetError: `out` cannot be written to, or lies in one of the directories `sources`, by the options that
    name them."""
    if not os.access(out / "dataset.json", os.F_OK):  # nothing is written to a complete one
        _check_writable(out)  # first: the path of links that refer to each other cannot be resolved
    for option, source in sources.items():
        if (
            isinstance(source, Path)
            and os.access(source, os.F_OK)
            and source.is_dir()
            and out.resolve().is_relative_to(source.resolve())
        ):
            raise DatasetError(f"--out {out}: lies in {option} {source}: name a directory outside of it")


def _check_writable(out: Path) -> None:
    try:
        out.stat()
    except FileNotFoundError:
        if out.is_symlink():
            raise DatasetError(f"--out {out}: is a link to what does not exist: remove it, or mend it") from None
    except (NotADirectoryError, PermissionError):
        pass  # what is there already tells more
    except OSError as error:  # a name that is too long, a loop of links
        raise DatasetError(f"--out {shortened(str(out), 200)}: {error.strerror}: name another directory") from error
    # Path.exists raises PermissionError below a directory that is closed to the user.
    existing = next(path for path in (out, *out.absolute().parents) if os.access(path, os.F_OK))
    if not existing.is_dir():
        raise DatasetError(f"--out {out}: {existing} is a file: name a new directory, or an empty one")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DatasetError(f"--out {out}: {existing} cannot be written to: name another directory, or allow it")


def _write(name: str, sources: "Sources", options: argparse.Namespace, encoding: "EncodingOptions") -> int:
    from dali_train.data.convert.conversion import Conversion, class_order_of, convert

    splits, class_names = sources
    conversion = Conversion(
        name=name,
        splits=splits,
        class_names=class_names,
        out=options.out,
        upload=options.upload,
        encoding=encoding,
        num_shards={"train": options.train_shards, "validation": options.validation_shards},
        seed=options.seed,
        workers=options.workers,
        on_bad=getattr(options, "on_bad", "fail"),
        class_order=class_order_of(options, name),
    )
    for line in convert(conversion, getattr(options, "phase", "all")):
        print(printable(line))
    return 0


# data index


def _add_index(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", type=_dataset, metavar="DATASET", help="directory or URL with the images")
    parser.add_argument(
        "--out",
        type=_dataset,
        metavar="OUT",
        help="directory or URL of the index, which is the one to train on (default, only for TFRecords: DATASET)",
    )
    _add_workers(parser)
    group = parser.add_argument_group("TFRecords")
    text = f"label of the first class (default: {_TFRECORDS['label_base']}, as for ImageNet)"
    group.add_argument("--label-base", type=int, default=_TFRECORDS["label_base"], metavar="N", help=text)
    text = "check only the framing, which reads far less"
    group.add_argument("--no-crc", dest="check_crc", action="store_false", help=text)
    group = parser.add_argument_group("images in place")
    text = "without a validation split: hold out this fraction of each class, chosen by --seed"
    group.add_argument("--validation-fraction", type=float, metavar="F", help=text)
    text = "of the order in which `convert` would store the images (default: 0)"
    group.add_argument("--seed", type=int, default=_IN_PLACE["seed"], metavar="N", help=text)
    text = "number the images as they lie in their files, for data.shuffle block"
    group.add_argument("--keep-order", action="store_true", help=text)
    text = "do not decode the images: one that cannot be decoded then ends a run"
    group.add_argument("--no-decode-check", dest="decode_check", action="store_false", help=text)
    text = "images that cannot be decoded are listed in quarantine.jsonl: fail at the end, or leave them out"
    group.add_argument(
        "--on-bad", choices=("fail", "skip"), default=_IN_PLACE["on_bad"], help=f"{text} (default: fail)"
    )
    classes = parser.add_mutually_exclusive_group()
    classes.add_argument("--num-classes", type=int, metavar="N", help="default: from the largest label")
    text = (
        "class names in the order of their labels, one per line (default: the names in the records, if any); of class "
    )
    text += "folders, which are called so or by numbers from 0, their order, or their names"
    classes.add_argument("--class-names", type=Path, metavar="FILE", help=text)
    classes.add_argument("--class-order", **CLASS_ORDER)
    for key, feature, others in (
        ("image", "image/encoded", "a column of MDS or of a table"),
        ("label", "image/class/label", "a column of MDS or of a table, or WebDataset's field of KEY.json"),
    ):
        text = f"the feature that holds the {key} (default: {feature}); {others}"
        parser.add_argument(f"--{key}-key", metavar="NAME", help=text)


# Options of one kind of source only, and their defaults.
_TFRECORDS: dict[str, Any] = {"label_base": 1, "check_crc": True, "num_classes": None}
_IN_PLACE: dict[str, Any] = {
    "validation_fraction": None,
    "seed": 0,
    "keep_order": False,
    "decode_check": True,
    "on_bad": "fail",
}


def _index(options: argparse.Namespace) -> int:
    from dali_train.data.convert.datasets import in_place
    from dali_train.data.dataset.build_index import bucket_as_directory

    dataset = options.dataset
    kind = in_place(dataset) if isinstance(dataset, Path) else _in_place_in_bucket(dataset) if options.out else None
    without = dict(_IN_PLACE if kind is None else _TFRECORDS)
    if kind == "folder":  # whose names are the labels
        without |= dict.fromkeys(("image_key", "label_key"))
    else:
        without["class_order"] = CLASS_ORDER["default"]
    for name, default in without.items():
        if getattr(options, name) != default:
            what = "TFRecords, which are indexed" if kind is None else f"images that are read in place ({kind})"
            option = {"decode_check": "--no-decode-check", "check_crc": "--no-crc"}.get(name, f"--{name}")
            raise DatasetError(f"{option.replace('_', '-')}: has no effect on {what}: leave it out")
    if kind is not None:
        return _index_in_place(options, kind)
    if isinstance(dataset, Path):
        if is_remote(str(options.out)):
            raise DatasetError(f"--out {options.out}: name a directory, which is to hold links to the TFRecords")
        return _index_directory(options, dataset, options.out or dataset, nullcontext)
    if options.out is not None:
        raise DatasetError(
            f"--out {options.out} with {dataset}: the index of a bucket is written to it, leave --out out; only "
            "WebDataset's tars and MDS are indexed in place there"
        )
    with bucket_as_directory(dataset) as (directory, fetch):
        return _index_directory(options, directory, directory, fetch)


def _in_place_in_bucket(url: str) -> "InPlace | None":
    from dali_train.data.convert.datasets import in_place_by_names
    from dali_train.runtime.object_store import Bucket

    if url.startswith("http"):
        return None  # it lists nothing
    kind = in_place_by_names([*Bucket(url).sizes("")])
    if kind == "folder":
        raise DatasetError(
            f"{url}: holds single images, and a request for each would be slow: write them as tars, or convert them "
            "with `dali-train data convert folder` where they lie on a disk"
        )
    return kind


def _index_in_place(options: argparse.Namespace, kind: "InPlace") -> int:
    from dali_train.data.convert.conversion import class_order_of
    from dali_train.data.dataset.manifest import cache_directory

    source, out = options.dataset, options.out
    url: str | None = None
    if out is None:
        raise DatasetError(
            f"{source}: its images are read in place ({kind}): name a directory for the index with --out"
        )
    if not isinstance(out, Path):
        if out.startswith("http"):
            raise DatasetError(f"--out {out}: a server of this kind is only read; use s3://, gs:// or az://")
        url = out
        out = cache_directory() / "indexes" / hashlib.sha256(url.encode()).hexdigest()[:16]
    if isinstance(source, Path):
        _check_destination(out, {"DATASET": source})
        source = source.resolve()
    else:
        _check_writable(out)

    def load(directory: Path, within: "Within") -> "Sources":
        options.source, options.train, options.validation, options.out = directory, directory, None, out
        arguments = (options,) if kind == "folder" else (options, within)
        return DATASETS[kind].load(*arguments)

    in_place = load_row(IN_PLACE, "data index of images in place")
    task = in_place.IndexInPlace(
        name=kind,
        load=load,
        options={name: getattr(options, name) for name in ("image_key", "label_key")},
        class_order=class_order_of(options, kind),
        source=source,
        out=out,
        url=url,
        seed=options.seed,
        keep_order=options.keep_order,
        decode=options.decode_check,
        on_bad=options.on_bad,
        workers=options.workers,
    )
    for line in in_place.index_in_place(task):
        print(printable(line if url is None else line.replace(str(out), url)))
    return 0


def _index_directory(options: argparse.Namespace, dataset: Path, out: Path, fetch: "Fetch") -> int:
    from dali_train.data.dataset.build_index import Features, build_index, unused_classes
    from dali_train.data.dataset.manifest import IMAGE_KEY, LABEL_KEY, read_class_names

    if dataset.is_dir():
        _check_writable(out)
    num_classes = options.num_classes
    names = read_class_names(options.class_names) if options.class_names is not None else []
    manifest = build_index(
        dataset,
        out=out,
        label_base=options.label_base,
        num_classes=len(names) or num_classes,
        features=Features(image=options.image_key or IMAGE_KEY, label=options.label_key or LABEL_KEY),
        check_crc=options.check_crc,
        workers=options.workers,
        fetch=fetch,
    )
    if names:
        manifest = replace(manifest, class_names=tuple(names))
        manifest.write(out)
    for name, split in manifest.splits.items():
        images, shards = plural(split.num_records, "image"), plural(len(split.shards), "shard")
        print(f"{name}: {images} in {shards}, {plural(manifest.num_classes, 'class')}")
    unused = unused_classes(out)
    if unused:
        labels = ", ".join(str(number + manifest.label_base) for number in unused[:10]) + (
            ", ..." if len(unused) > 10 else ""
        )
        print(f"note: no record has the label {labels}: {len(unused)} of {manifest.num_classes} classes are unused")
    return 0


# data subset


def _add_subset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", type=_dataset, metavar="DATASET", help="directory or URL of the large dataset")
    parser.add_argument("--out", type=_dataset, required=True, metavar="SUBSET", help="directory or URL of the subset")
    classes = parser.add_mutually_exclusive_group()
    classes.add_argument("--classes", type=int, metavar="N", help="number of classes, chosen by --seed")
    classes.add_argument("--class-list", type=Path, metavar="FILE", help="class names, one per line")
    parser.add_argument(
        "--images-per-class", type=int, metavar="N", help="at most N training images of each class, chosen by --seed"
    )
    _add_shards(parser)


def _subset(options: argparse.Namespace) -> int:
    from dali_train.data.convert.conversion import destination
    from dali_train.data.convert.image import EncodingOptions
    from dali_train.data.dataset.manifest import Manifest

    options.out, options.upload = destination(options.out)
    _check_destination(options.out, {"DATASET": options.dataset})
    sources = load_row(SUBSET, "data subset")(
        options.dataset,
        classes=options.classes,
        class_list=options.class_list,
        images_per_class=options.images_per_class,
        seed=options.seed,
    )
    # The large dataset's images were checked, and perhaps turned, when it was made.
    turned = Manifest.read(options.dataset).applies_orientation
    return _write("subset", sources, options, EncodingOptions(decode_check=False, apply_orientation=turned))


# data verify


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", type=_dataset, metavar="DATASET", help="directory or URL")
    parser.add_argument("--sample", type=_positive, metavar="N", help="check N records per split instead of all")
    parser.add_argument(
        "--no-decode", dest="decode", action="store_false", help="do not decode images, the slowest check"
    )
    _add_workers(parser)


def _verify(options: argparse.Namespace) -> int:
    from dali_train.data.dataset.verify import verify

    findings = verify(options.dataset, sample=options.sample, decode=options.decode, workers=options.workers)
    for line in findings.summary():
        print(printable(line))
    if findings.problems:
        print(f"{options.dataset}: {plural(len(findings.problems), 'fault')}", file=sys.stderr)
        return 1
    return 0


# data show


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", type=_dataset, metavar="DATASET", help="directory or URL")
    text = "directory for SPLIT.png (default: DATASET/contact_sheets, or ./contact_sheets for a bucket)"
    parser.add_argument("--out", type=_directory, metavar="DIR", help=text)
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

    manifest = Manifest.read(options.dataset)
    splits = [Split(options.dataset, name) for name in SPLITS if name in manifest.splits]
    for line in load_row(f"{SHEETS}:describe", "data show")(manifest, splits):
        print(printable(line))
    directory = options.out or (Path() if is_remote(str(options.dataset)) else options.dataset) / "contact_sheets"
    _check_writable(directory)
    directory.mkdir(parents=True, exist_ok=True)
    overview = load_row(f"{SHEETS}:overview", "data show")
    for split in splits:
        path = directory / f"{split.name}.png"
        sheet = overview(split, rows=options.rows, columns=options.columns, seed=options.seed)
        sheet.save(path)
        print(path)
    return 0
