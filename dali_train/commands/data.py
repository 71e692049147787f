"""``dali-train data``: convert images into a dataset, and actions of extras (index, subset, verify, ...) by rows.

Exit status: 0 done, 2 a mistake in the command or its input, 1 a failure (a full disk, damaged records, no network) or
faults found by `verify`, 130 stopped with Ctrl-C.

The modules that do the work are imported only by the commands that need them, so that ``dali-train --help`` is fast.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dali_train.commands.arguments import Commands
from dali_train.commands.boundary import run_command
from dali_train.config.check import Extra, load_all
from dali_train.data.convert.datasets import DATASETS, load_sources
from dali_train.errors import DatasetError
from dali_train.runtime.object_store import is_remote
from dali_train.runtime.process import num_cores
from dali_train.text import printable, shortened

EXTRA_ACTIONS: Sequence[Extra[Callable[[Commands], None]]] = (
    Extra("dali_train.extras.indexing:add_index_action"),
    Extra("dali_train.extras.subset:add_subset_action"),
    Extra("dali_train.extras.verify:add_verify_action"),
    Extra("dali_train.extras.duplicates:add_duplicates_action"),
    Extra("dali_train.extras.pictures:add_show_action"),
)
"""Functions that add an action of dali_train/extras with `add_action`."""

Actions = Any  # what argparse's add_subparsers returns, whose class is private

if TYPE_CHECKING:
    from dali_train.data.convert.image import EncodingOptions
    from dali_train.data.convert.sources import Sources


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
    actions: Actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_convert(actions)
    for add in load_all(EXTRA_ACTIONS):
        add(actions)


def add_action(
    actions: Actions, name: str, text: str, work: Callable[[argparse.Namespace], int], details: str = ""
) -> argparse.ArgumentParser:
    """Add ``data NAME`` to the subparsers `actions`, which runs `work`; return its parser.

    Args:
        text: what it does, for both helps.
        details: below its own help.
    """
    action: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text, epilog=details, allow_abbrev=False
    )
    action.set_defaults(work=work)
    return action


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: use at least 1")
    return int(text)


def local_directory(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text}: use a directory")
    return Path(text)


def directory_or_url(text: str) -> Path | str:
    return text if is_remote(text) else local_directory(text)


def add_workers(parser: argparse._ActionsContainer) -> None:
    cores = num_cores()
    parser.add_argument(
        "--workers", type=positive, default=cores, metavar="N", help=f"threads (default: one per core, {cores} here)"
    )


def add_shards(parser: argparse._ActionsContainer) -> None:
    for split, most in (("train", 1024), ("validation", 128)):
        text = f"default: by the amount of data, at most {most}"
        parser.add_argument(f"--{split}-shards", type=int, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and choice of images (default: 0)")
    add_workers(parser)


def _add_convert(actions: Actions) -> None:
    text = "Convert an image dataset into shuffled, verified, indexed TFRecords."
    how = (
        "The result is the same, bit for bit, for any number of workers. After an interruption or on a full disk, the "
        "same command resumes. Machines that share a disk convert together: the same command with --plan once, then "
        "with --part 1/N to N/N in any order, repeating those that failed, then with --finish."
    )
    parser = add_action(actions, "convert", text, _convert, how)
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
        "--out", type=directory_or_url, required=True, metavar="DATASET", help="directory or URL of the new dataset"
    )
    add_shards(parser.add_argument_group("shards"))
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
    check_destination(
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
    return write_dataset(options.source_kind, load_sources(options), options, encoding)


def check_destination(out: Path, sources: Mapping[str, Any]) -> None:
    """Raises DatasetError: `out` cannot be written to, or lies in one of the directories `sources`, by the options that
    name them."""
    if not os.access(out / "dataset.json", os.F_OK):  # nothing is written to a complete one
        check_writable(out)  # first: the path of links that refer to each other cannot be resolved
    for option, source in sources.items():
        if (
            isinstance(source, Path)
            and os.access(source, os.F_OK)
            and source.is_dir()
            and out.resolve().is_relative_to(source.resolve())
        ):
            raise DatasetError(f"--out {out}: lies in {option} {source}: name a directory outside of it")


def check_writable(out: Path) -> None:
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


def write_dataset(name: str, sources: "Sources", options: argparse.Namespace, encoding: "EncodingOptions") -> int:
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
