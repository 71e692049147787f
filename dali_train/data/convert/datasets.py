"""The datasets that can be converted: one row each in `DATASETS`. The `convert` parser, its help and the
advice for unconverted directories are all generated from it.

To add one, write a function and its row, here or in a file of your own before it calls `dali_train.cli.main`::

    DATASETS["letters"] = Converter(help="Handwritten letters.", load=letters, arguments=SOURCE)

The modules that read a source are imported when it is converted: building the parser need not wait for them.
"""

import os
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dali_train.config.check import Extra
from dali_train.data.dataset.manifest import CLASS_ORDERS, split_word
from dali_train.data.dataset.packed_files import how_packed
from dali_train.errors import DatasetError

if TYPE_CHECKING:
    from dali_train.data.convert.sources import Sources

_MOST_ENTRIES = 2000  # of a directory that are looked at
_MOST_OPENED = 100  # of these
_HEADER_BYTES = 1 << 16  # of an image, in which its size is
_TFRECORD = re.compile(r"tfrec|-\d+-of-\d+$", re.IGNORECASE)

STATE_DIRECTORY = ".conversion"
"""In a dataset that is being converted."""

TABLE_ENDINGS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".ndjson", "metadata.parquet")
"""Of the names of files that may be tables of image files and labels; the last is the Hugging Face Hub's."""

SPREADSHEETS = (".xls", ".xlsx", ".ods")
"""Of files that are taken for tables, and refused as such."""

KAGGLES_IMAGENET = "ILSVRC/Data/CLS-LOC"
"""Where ImageNet's images are in the directory into which Kaggle's archive is unpacked."""

DOWNLOAD = Extra[Callable[..., None]]("dali_train.extras.formats.download:download", "--download")

Arguments = Mapping[str, Mapping[str, Any]]  # option -> arguments of argparse's `add_argument`
SOURCE: Arguments = {"--source": {"type": Path, "metavar": "PATH", "help": "the published files"}}
GROUP_BY: Mapping[str, Any] = {
    "metavar": "REGEX",
    "help": "keep images together for which this finds the same in their paths, or the same as its first group: frames "
    "of one film, pictures of one patient (with --validation-fraction)",
}
_HELD_OUT: Arguments = {
    "--validation-fraction": {
        "type": float,
        "metavar": "F",
        "help": "without a validation split: hold out this fraction of each class",
    },
    "--group-by": GROUP_BY,
}
CLASS_ORDER: Mapping[str, Any] = {
    "choices": CLASS_ORDERS,
    "default": "name",
    "help": "how the class folders are numbered: by name, as torchvision does, or in natural order (2 before 10, "
    "regardless of case), as timm does (default: name)",
}
LABEL_SEPARATOR: Mapping[str, Any] = {
    "metavar": "TEXT",
    "help": "of a table whose images have several labels: what stands between those in one cell, such as ';'; an image "
    "may also have several rows, or no label",
}
MULTI_HOT: Mapping[str, Any] = {
    "action": "store_true",
    "help": "of a table: every column but the files' and the splits' is a class, with 1 for the images that have it, "
    "and 0 or -1 for the others",
}
SEVERAL_LABELS: Mapping[str, Any] = {
    "action": "store_true",
    "help": "of class folders: files with the same bytes, or links to one, are one image with the classes of all their "
    "folders",
}
_SHARDS: Arguments = {
    "--source": {
        "type": Path,
        "required": True,
        "metavar": "PATH",
        "help": "one file, or a directory: the word train, val or test in a file's path below it names the split",
    },
    **_HELD_OUT,
    "--class-names": {
        "type": Path,
        "metavar": "FILE",
        "help": "one name per line in the order of the labels, which count from 0 (default: the names in the files, or "
        "the numbers)",
    },
}


def _label_key(text: str) -> Arguments:
    return {"--label-key": {"metavar": "NAME", "help": text}}


def _columns(image: str, label: str) -> Arguments:
    image_key = {"metavar": "NAME", "help": f"the column of the images (default: {image})"}
    return {**_SHARDS, "--image-key": image_key, **_label_key(f"the column of the labels (default: {label})")}


@dataclass(frozen=True, kw_only=True)
class Download:
    """Files below one address."""

    address: str
    sha256: Mapping[str, str]  # file name -> checksum of its content


@dataclass(frozen=True, kw_only=True)
class Converter:
    """How one published dataset is read."""

    help: str
    load: Callable[..., "Sources"]
    """From the parsed `arguments` to the splits and the class names in the order of the labels.

    Raises SourceError, with file and remedy: a source that is missing or is not what it should be.
    """
    arguments: Arguments = field(default_factory=dict)
    """With a `download`, ``options.source`` is where the files are, downloaded or not."""
    download: Download | None = None
    files: str | None = None
    """A regular expression for the beginning of the published files' names, by which a directory is recognised."""
    applies_orientation: bool = False
    """Whether photographs are turned upright by their EXIF orientation where the user does not say: right for one's
    own, while published results were trained on the bytes as published."""
    command: str = "--source ROOT"
    """The options that convert the directory ROOT that holds such `files`."""


def load_sources(options: Namespace) -> "Sources":
    """Call the function of the converter that `options` name, after a download if there is one.

    Raises:
        DatasetError: no files were named.
        SourceError: the function's, or an entry that it looked up is not there.
    """
    from dali_train.data.convert.conversion import DOWNLOAD_DIRECTORY
    from dali_train.data.convert.sources import SourceError

    converter = DATASETS[options.source_kind]
    if converter.download is not None:
        if options.download:
            options.source = options.source or options.out / DOWNLOAD_DIRECTORY
            DOWNLOAD.load()(converter.download, options.source, mirror=options.mirror)
        if options.source is None:
            raise DatasetError("name the published files with --source, or let --download fetch them")
    try:
        return converter.load(options)
    except LookupError as error:
        raise SourceError(f"{error!r}: what the source should hold is not there, or the converter is faulty") from error


def _in_extras(name: str, *arguments: Any, **options: Any) -> "Sources":
    """Call a function of extras/formats, which is imported then."""
    return Extra[Callable[..., "Sources"]](name, "data convert").load()(*arguments, **options)


_folders = partial(_in_extras, "dali_train.extras.formats.trees:folders")
_of_several_folders = partial(_in_extras, "dali_train.extras.formats.shared_files:folders_of_several")


# SHA-256 sums of the official files as several public repositories quote them.
DATASETS: dict[str, Converter] = {
    "imagenet": Converter(
        help="ImageNet (ILSVRC 2012) from the official archives, without unpacking them.",
        load=lambda o: _in_extras(
            "dali_train.extras.formats.imagenet:imagenet",
            o.train_archive,
            o.validation_archive,
            o.devkit,
            kept_in=o.out / STATE_DIRECTORY,
        ),
        arguments={
            "--train-archive": {"type": Path, "metavar": "FILE", "help": "ILSVRC2012_img_train.tar"},
            "--validation-archive": {"type": Path, "metavar": "FILE", "help": "ILSVRC2012_img_val.tar; needs --devkit"},
            "--devkit": {
                "type": Path,
                "metavar": "FILE",
                "help": "ILSVRC2012_devkit_t12.tar.gz: the validation labels",
            },
        },
        files="ILSVRC2012_img_",
        command="--train-archive ROOT/ILSVRC2012_img_train.tar --validation-archive ROOT/ILSVRC2012_img_val.tar "
        "--devkit ROOT/ILSVRC2012_devkit_t12.tar.gz",
    ),
    "imagenet21k": Converter(
        help="ImageNet-21k (winter 2021): a tar per synset, in a directory or in one tar, read in place.",
        load=lambda o: _in_extras(
            "dali_train.extras.formats.imagenet:imagenet21k",
            o.source,
            validation_fraction=o.validation_fraction,
            seed=o.seed,
            group_by=o.group_by,
            kept_in=o.out / STATE_DIRECTORY,
        ),
        arguments={
            "--source": {**_SHARDS["--source"], "help": "a directory with n*.tar, or a tar of them"},
            **_HELD_OUT,
        },
        files=r"n\d{8}\.tar",
    ),
    "folder": Converter(
        help="Image files in one folder per class, in directories or tar archives.",
        load=lambda o: (_of_several_folders if o.several_labels else _folders)(
            o.train,
            o.validation,
            validation_fraction=o.validation_fraction,
            seed=o.seed,
            group_by=o.group_by,
            class_order=o.class_order,
            class_names=o.class_names,
        ),
        arguments={
            "--train": {
                "type": Path,
                "metavar": "DIR",
                "help": "holds CLASS/name.jpg, the sorted names are the labels; or train/ and val/ or test/",
            },
            "--validation": {"type": Path, "metavar": "DIR", "help": "the same classes"},
            **_HELD_OUT,
            "--class-order": CLASS_ORDER,
            "--class-names": {
                "type": Path,
                "metavar": "FILE",
                "help": "the class folders in the order of their labels, one name per line; or, where the folders are "
                "numbers from 0, the names of these",
            },
            "--several-labels": SEVERAL_LABELS,
        },
        applies_orientation=True,
    ),
    "webdataset": Converter(
        help="WebDataset: tars of KEY.jpg (or png, webp, ...) and KEY.cls, which are read in place.",
        load=partial(_in_extras, "dali_train.extras.formats.containers:webdataset"),
        arguments={**_SHARDS, **_label_key("the field of KEY.json that has the label (default: KEY.cls has it)")},
    ),
    "parquet": Converter(
        help="Parquet files of images as on the Hugging Face hub; row groups are unpacked into TMPDIR, or DATASET, "
        "meanwhile. Needs dali-train[parquet].",
        load=partial(_in_extras, "dali_train.extras.formats.containers:parquet"),
        arguments=_columns("image", "label"),
        files=r"(.*[-_./])?(train|test|val|validation)[-_.].*parquet$",
    ),
    "mds": Converter(
        help="MosaicML Streaming's MDS: directories with index.json and shards, which are read in place; compressed "
        "ones are unpacked into TMPDIR, or DATASET, meanwhile, and need dali-train[parquet].",
        load=partial(_in_extras, "dali_train.extras.formats.containers:mds"),
        arguments=_columns("x or image", "y or label"),
        files=r"shard\.\d+\.mds",
    ),
    "tfrecord": Converter(
        help="TFRecords that have names for labels, or are to be divided; `data index` takes those that have numbers, "
        "without a copy.",
        load=partial(_in_extras, "dali_train.extras.indexing.named_records:named_records"),
        arguments=_columns("image/encoded", "image/class/text"),
    ),
    "table": Converter(
        help="A table of image files below its directory and labels, such as CSV with the heading file,label (also "
        ".tsv, .txt, .jsonl, or .json as COCO has it); a column split, is_valid or is_train divides it, or val.csv "
        "beside train.csv.",
        load=partial(_in_extras, "dali_train.extras.formats.tables:table"),
        arguments={
            "--source": {"type": Path, "required": True, "metavar": "FILE", "help": "the table"},
            **_HELD_OUT,
            "--class-names": {
                "type": Path,
                "metavar": "FILE",
                "help": "the labels in their order, one per line, or the names of labels that are numbers from 0",
            },
            "--image-key": {"metavar": "NAME", "help": "the column of the files (default: file, path, image, ...)"},
            **_label_key("the column of the labels (default: label, class, category, ...)"),
            "--label-separator": LABEL_SEPARATOR,
            "--multi-hot": MULTI_HOT,
        },
        applies_orientation=True,
    ),
    "cifar10": Converter(
        help="CIFAR-10: the binary version (archive or directory), or a tree train/CLASS, test/CLASS of images.",
        load=lambda o: _in_extras("dali_train.extras.formats.small:cifar10", o.source),
        arguments=SOURCE,
        download=Download(
            address="https://www.cs.toronto.edu/~kriz/",
            sha256={"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
        ),
        files="cifar-10-binary|data_batch_",
    ),
    "mnist": Converter(
        help="MNIST: the directory of the official idx files, gzipped or not.",
        load=lambda o: _in_extras("dali_train.extras.formats.small:mnist", o.source),
        arguments=SOURCE,
        download=Download(
            address="https://storage.googleapis.com/cvdf-datasets/mnist/",
            sha256={
                "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            },
        ),
        files="(train|t10k)-images[-.]idx3",
    ),
    "fashion-mnist": Converter(
        help="Fashion-MNIST: the directory of the official idx files, gzipped or not; they are called as MNIST's are.",
        load=lambda o: _in_extras("dali_train.extras.formats.small:fashion_mnist", o.source),
        arguments=SOURCE,
        download=Download(
            address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            sha256={
                "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            },
        ),
    ),
    "digits": Converter(
        help="scikit-learn's 1,797 handwritten digits, enlarged to 32 x 32 pixels. The last fifth of the file, which "
        "is ordered by writer, is the validation split: digits of writers that training never sees, a harder test than "
        "a random split.",
        load=lambda _: _in_extras("dali_train.extras.formats.small:digits"),
    ),
}


def advice(root: Path, datasets: Mapping[str, Converter], *, indexing: bool = False) -> str:
    """Return a sentence with the command that makes a dataset of the files in `root`, judged only by their names.

    Args:
        indexing: True when called by `data index`, so that the advice does not suggest `data index` again.
    """
    if (root / STATE_DIRECTORY / "options.json").exists():
        return "it holds a conversion that is not finished: start the same `dali-train data convert` again"
    names, below = _look(root)
    quoted = shlex.quote(str(root))
    if _has_tfrecords(names, below):
        return (
            "move its TFRecords there" if indexing else f"run `dali-train data index {quoted}` to index its TFRecords"
        )
    files = _some_files(root, names, below)
    for dataset, row in datasets.items():
        if row.files and any(re.match(row.files, name) for name in [*names, *files]):
            options = row.command.replace("ROOT", quoted)
            return f"it holds files of {dataset}: run `dali-train data convert {dataset} {options} --out DATASET`"
    archives = [name for name in names if name.lower().endswith(".tar")]
    if archives:
        archive = shlex.quote(f"{root}/{archives[0]}")
        return (
            f"it holds tar archives: run `dali-train data convert folder --train {archive} --out DATASET` if they "
            f"hold CLASS/name.jpg, `dali-train data convert webdataset --source {quoted} --out DATASET` if they hold "
            "KEY.jpg and KEY.cls"
        )
    if in_place(root) == "folder":
        return (
            f"it holds folders of images: run `dali-train data convert folder --train {quoted} --out DATASET`, or "
            f"`dali-train data index {quoted} --out INDEX` to leave them where they are"
        )
    for name in files:
        if _TFRECORD.search(name):
            return f"its TFRecords are in {(root / name).parent}: name that directory instead"
        if packed := how_packed(root / name):
            folder = f"dali-train data convert folder --train {shlex.quote(f'{root}/{name}')}"
            as_it_is = f"; if it holds CLASS/name.jpg, `{folder}` reads it"
            return f"{name} {packed}{as_it_is if name.lower().endswith(('.tar.gz', '.tgz')) else ''}"
        if _is_nameless_image(root / name):
            return f"{name} is an image, and its name does not say so: add .jpg, or what it is, to all such names"
    suffixes = sorted({suffix for name in files if (suffix := Path(name).suffix.lower())})
    there = f", with files {', '.join(suffixes[:5])}," if suffixes else ""
    listed = "`dali-train data convert --help` lists what can be converted"
    remedy = f"nothing in the directory{there} looks like a dataset: {listed}"
    return (
        remedy
        if indexing
        else (f"{remedy}, `dali-train data index {quoted}` takes TFRecords in {root}/train and {root}/validation")
    )


InPlace = Literal["imagenet", "folder", "webdataset", "mds", "table"]
"""A converter whose listing can be indexed in place."""


def in_place(root: Path) -> InPlace | None:
    """Return how what lies at `root` can be indexed in place, judged only by the names of files."""
    if root.is_file():
        is_table = root.name.lower().endswith((*TABLE_ENDINGS, *SPREADSHEETS))
        return "table" if is_table else in_place_by_names([root.name])
    root = images_root(root)
    names, below = _look(root)
    if _has_tfrecords(names, below):
        return None
    inner = [_names(root / folder / name) for folder in below if split_word(folder) for name in below[folder][:5]]
    kind = in_place_by_names([*names, *(name for inside in (*below.values(), *inner) for name in inside)])
    return "folder" if kind is None and _holds_images(root, levels=7) else kind


def _holds_images(directory: Path, *, levels: int) -> bool:
    """Return whether there are images in a directory, or so many levels below it in the first folders of each."""
    names = _names(directory)
    if in_place_by_names(names) == "folder":
        return True
    folders = [name for name in names[:50] if (directory / name).is_dir()][: 5 if levels > 4 else 2]
    return levels > 0 and any(_holds_images(directory / name, levels=levels - 1) for name in folders)


def images_root(root: Path) -> Path:
    """Return the directory with a dataset's images: `root` itself but for Kaggle's ImageNet."""
    return root / KAGGLES_IMAGENET if (root / KAGGLES_IMAGENET).is_dir() else root


def in_place_by_names(names: Sequence[str]) -> InPlace | None:
    """Do the same for the names of files or objects; TFRecords among them are not looked for."""
    from dali_train.data.dataset.image_file import IMAGE_SUFFIXES

    if any(re.match(r"ILSVRC2012_img_\w+\.tar$", name) for name in names):
        return "imagenet"
    if any(re.search(r"\bshard\.\d+\.mds(\..*)?$", name) for name in names):
        return "mds"
    if any(name.lower().endswith(".tar") for name in names):
        return "webdataset"
    return "folder" if any(Path(name).suffix.lower() in IMAGE_SUFFIXES for name in names) else None


def _look(root: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names in a directory, and those in the directories there."""
    names = _names(root)
    return names, {name: _names(root / name) for name in names[:50] if (root / name).is_dir()}


def _some_files(root: Path, names: Sequence[str], below: Mapping[str, Sequence[str]]) -> list[str]:
    """Return files of `_look` and one level below it, `_MOST_OPENED` at most."""
    inner = [f"{folder}/{name}" for folder in below for name in below[folder][:5]]
    innermost = [f"{folder}/{name}" for folder in inner for name in _names(root / folder)[:5]]
    return [*names, *inner, *innermost][:_MOST_OPENED]


def _is_nameless_image(path: Path) -> bool:
    """Return whether a file without a suffix begins as an image does."""
    from dali_train.data.dataset.image_file import BadImageError, image_size

    if path.suffix or not path.is_file():
        return False
    with suppress(BadImageError, OSError), path.open("rb") as file:
        return bool(image_size(file.read(_HEADER_BYTES)))
    return False


def _has_tfrecords(names: Sequence[str], below: Mapping[str, Sequence[str]]) -> bool:
    within = [name for folder in below if split_word(folder) for name in below[folder]]
    # The latter as an indexing that was killed leaves it.
    return any(_TFRECORD.search(name) for name in (*names, *within)) or "idx_files" in names


def _names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in islice(entries, _MOST_ENTRIES) if not entry.name.startswith("."))
    except OSError:
        return []
