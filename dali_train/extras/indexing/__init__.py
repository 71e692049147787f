"""Index images where they lie: `dali-train data index`, for TFRecords of others and for images in place."""

import argparse
import hashlib
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dali_train.commands.data import (
    Actions,
    add_action,
    add_workers,
    check_destination,
    check_writable,
    directory_or_url,
)
from dali_train.data.convert.datasets import CLASS_ORDER, DATASETS, GROUP_BY, LABEL_SEPARATOR, MULTI_HOT, SEVERAL_LABELS
from dali_train.errors import DatasetError
from dali_train.runtime.object_store import is_remote
from dali_train.text import plural, printable

if TYPE_CHECKING:
    from dali_train.data.convert.datasets import InPlace
    from dali_train.data.convert.sources import Sources
    from dali_train.extras.formats.listing import Within
    from dali_train.extras.indexing.foreign_shards import Fetch


def add_index_action(actions: Actions) -> None:
    text = "Index images where they lie, so that training can read them: TFRecords, class folders, tars, MDS."
    details = (
        "Class folders, ImageNet's archives, WebDataset's tars and MDS that is not compressed are read in place: the "
        "index, in OUT, is all that is written, and no image is copied. Images have the order that `convert` gives "
        "them, so that a run gets the same losses. After an interruption the same command resumes. TFRecords are in "
        "DATASET/train and DATASET/validation (or val, else test), or are DATASET/*train* and DATASET/*validation*; in "
        "a bucket they are in DATASET/train and DATASET/validation. Files outside OUT/train and OUT/validation are "
        "linked there."
    )
    parser = add_action(actions, "index", text, _index, details)
    parser.add_argument("dataset", type=directory_or_url, metavar="DATASET", help="directory or URL with the images")
    parser.add_argument(
        "--out",
        type=directory_or_url,
        metavar="OUT",
        help="directory or URL of the index, which is the one to train on (default, only for TFRecords: DATASET)",
    )
    add_workers(parser)
    group = parser.add_argument_group("TFRecords")
    text = f"label of the first class (default: {_TFRECORDS['label_base']}, as for ImageNet)"
    group.add_argument("--label-base", type=int, default=_TFRECORDS["label_base"], metavar="N", help=text)
    text = "check only the framing, which reads far less"
    group.add_argument("--no-crc", dest="check_crc", action="store_false", help=text)
    group = parser.add_argument_group("images in place")
    text = "without a validation split: hold out this fraction of each class, chosen by --seed"
    group.add_argument("--validation-fraction", type=float, metavar="F", help=text)
    group.add_argument("--group-by", **GROUP_BY)
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
    group.add_argument("--label-separator", **LABEL_SEPARATOR)
    group.add_argument("--multi-hot", **MULTI_HOT)
    group.add_argument("--several-labels", **SEVERAL_LABELS)
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
    "group_by": None,
    "seed": 0,
    "keep_order": False,
    "decode_check": True,
    "on_bad": "fail",
    "label_separator": None,
    "multi_hot": False,
    "several_labels": False,
}


def _index(options: argparse.Namespace) -> int:
    from dali_train.data.convert.datasets import images_root, in_place
    from dali_train.extras.indexing.foreign_shards import bucket_as_directory, find_splits

    if isinstance(options.dataset, Path):
        options.dataset = images_root(options.dataset)
    dataset = options.dataset
    kind = in_place(dataset) if isinstance(dataset, Path) else _in_place_in_bucket(dataset) if options.out else None
    if kind is None and not isinstance(dataset, Path) and options.out is not None:
        raise DatasetError(
            f"--out {options.out} with {dataset}: the index of a bucket is written to it, leave --out out; only "
            "WebDataset's tars and MDS are indexed in place there"
        )
    without = dict(_IN_PLACE if kind is None else _TFRECORDS)
    if kind in ("folder", "imagenet"):  # whose names are the labels
        without |= dict.fromkeys(("image_key", "label_key"))
    if kind != "folder":
        without |= {"class_order": CLASS_ORDER["default"], "several_labels": False}
    if kind == "imagenet":
        without |= {"class_names": None}
    if kind != "table":
        without |= {"label_separator": None, "multi_hot": False}
    for name, default in without.items():
        if getattr(options, name) != default:
            if kind is None and isinstance(dataset, Path):
                find_splits(dataset)  # raises what else is to be done where there are no TFRecords
            what = "TFRecords, which are indexed" if kind is None else f"images that are read in place ({kind})"
            option = {"decode_check": "--no-decode-check", "check_crc": "--no-crc"}.get(name, f"--{name}")
            remedy = "leave it out"
            if kind is None and name == "validation_fraction":
                copy = f"--source {shlex.quote(str(dataset))} --out DATASET --label-key image/class/label"
                remedy += f", or divide a copy: `dali-train data convert tfrecord {copy} --validation-fraction F`"
            raise DatasetError(f"{option.replace('_', '-')}: has no effect on {what}: {remedy}")
    if kind is not None:
        return _index_in_place(options, kind)
    if isinstance(dataset, Path):
        if is_remote(str(options.out)):
            raise DatasetError(f"--out {options.out}: name a directory, which is to hold links to the TFRecords")
        _index_directory(options, dataset, options.out or dataset, nullcontext)
        return _print_duplicates(options.out or dataset)
    with bucket_as_directory(dataset) as (directory, fetch):
        _index_directory(options, directory, directory, fetch)
    return _print_duplicates(dataset)


def _in_place_in_bucket(url: str) -> "InPlace | None":
    from dali_train.data.convert.datasets import in_place_by_names
    from dali_train.runtime.object_store import Bucket

    if url.startswith("http"):
        return None  # it lists nothing
    kind = in_place_by_names([*Bucket(url).sizes("")])
    if kind == "imagenet":
        raise DatasetError(f"{url}: holds ImageNet's archives, which are only read from a disk: copy them to one")
    if kind == "folder":
        raise DatasetError(
            f"{url}: holds single images, and a request for each would be slow: write them as tars, or convert them "
            "with `dali-train data convert folder` where they lie on a disk"
        )
    return kind


def _index_in_place(options: argparse.Namespace, kind: "InPlace") -> int:
    from dali_train.data.convert.conversion import class_order_of
    from dali_train.data.convert.sources import hold_out
    from dali_train.data.dataset.manifest import cache_directory
    from dali_train.extras.formats.imagenet import official_archives
    from dali_train.extras.indexing.in_place import STATE_DIRECTORY, IndexInPlace, index_in_place

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
        check_destination(out, {"DATASET": source})
        source = source.resolve()
    else:
        check_writable(out)

    def load(directory: Path, within: "Within") -> "Sources":
        if kind == "imagenet":
            sources, class_names = official_archives(directory, kept_in=out / STATE_DIRECTORY)
            held_out = hold_out(sources, options.validation_fraction, seed=options.seed, group_by=options.group_by)
            return held_out, class_names
        options.source, options.train, options.validation, options.out = directory, directory, None, out
        arguments = (options,) if kind == "folder" else (options, within)
        return DATASETS[kind].load(*arguments)

    task = IndexInPlace(
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
    for line in index_in_place(task):
        print(printable(line if url is None else line.replace(str(out), url)))
    return 0


def _print_duplicates(dataset: Path | str) -> int:
    from dali_train.data.dataset.verify import examine_index

    for note in examine_index(dataset).duplicates:
        print(printable(f"note: {note}"))
    return 0


def _index_directory(options: argparse.Namespace, dataset: Path, out: Path, fetch: "Fetch") -> None:
    from dali_train.data.dataset.manifest import IMAGE_KEY, LABEL_KEY
    from dali_train.data.dataset.write_index import Features
    from dali_train.extras.indexing.foreign_shards import build_index, unused_classes

    if dataset.is_dir():
        check_writable(out)
    manifest = build_index(
        dataset,
        out=out,
        label_base=options.label_base,
        num_classes=options.num_classes,
        class_names=options.class_names,
        features=Features(image=options.image_key or IMAGE_KEY, label=options.label_key or LABEL_KEY),
        check_crc=options.check_crc,
        workers=options.workers,
        fetch=fetch,
    )
    for name, split in manifest.splits.items():
        images, shards = plural(split.num_records, "image"), plural(len(split.shards), "shard")
        print(f"{name}: {images} in {shards}, {plural(manifest.num_classes, 'class')}")
    unused = unused_classes(out)
    if unused:
        labels = ", ".join(str(number + manifest.label_base) for number in unused[:10]) + (
            ", ..." if len(unused) > 10 else ""
        )
        print(f"note: no record has the label {labels}: {len(unused)} of {manifest.num_classes} classes are unused")
