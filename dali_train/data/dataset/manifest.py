"""``dataset.json``: the content of a dataset, and how it was made.

It is fetched from an object store, with the index.
"""

import errno
import hashlib
import json
import os
import re
import shlex
import tempfile
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from crc32c import crc32c

from dali_train.config.check import Count, Extra, Rule, from_json, require
from dali_train.data.dataset.label_kind import CLASSES, LABEL_KEY, LabelKind
from dali_train.data.dataset.packed_files import not_a_directory
from dali_train.errors import ConfigError, DatasetError, NoDatasetError
from dali_train.files import ForeignFileError, private_directory, read_json, read_lines, write_atomically
from dali_train.runtime.object_store import Bucket, MissingObjectError, ObjectStoreError, is_remote

MAX_CLASSES = 1_000_000  # ImageNet-21k has 21,841; a label that is no class number must not claim memory for its names
IMAGE_KEY = "image/encoded"
SETS_OF_CLASSES = Extra[Callable[[Sequence[tuple[int, ...]]], LabelKind]](
    "dali_train.extras.several_labels.sets_of_classes:SetsOfClasses", "a dataset with several labels an image"
)
_MAX_BYTES = 1 << 28  # of dataset.json: a million class names and 100,000 shards take a tenth of it
_MAX_LABEL = (1 << 31) - 1  # labels are int32

SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
SplitWord = Literal["train", "val", "test"]
# Those that the Hugging Face Hub knows too. Between letters a word begins and ends where small ones meet capitals:
# trainLabels, eyesTest.
_SPLIT_WORD = re.compile(
    r"(?:(?<![a-z])|(?<=(?-i:[a-z]))(?=(?-i:[A-Z])))"
    r"(?:(?P<train>train(?:ing)?)|(?P<val>val(?:id(?:ation)?)?|dev)|(?P<test>test(?:ing)?|eval(?:uation)?))"
    r"(?:(?![a-z])|(?<=(?-i:[a-z]))(?=(?-i:[A-Z])))",
    re.IGNORECASE,
)
ClassOrder = Literal["name", "natural"]
CLASS_NAMES = "class-names"  # recorded instead of such an order: a list of the user's
CLASS_ORDERS: tuple[ClassOrder, ...] = get_args(ClassOrder)
# What an index row points at: an image file (JPEG, PNG, ...), or height * width * 3 bytes of RGB pixels, HWC.
Encoding = Literal["image", "raw"]


def split_word(path: str) -> SplitWord | None:
    """Return the last word in a path that names a split: train or training, val, valid or validation, test or testing,
    in any case."""
    words: list[Any] = [match.lastgroup for match in _SPLIT_WORD.finditer(path)]
    return words[-1] if words else None


def before_split_word(name: str) -> str:
    """Return what stands before the word that `split_word` finds in a name; nothing if there is none."""
    return name[: max((match.start() for match in _SPLIT_WORD.finditer(name)), default=0)]


def without_split_words(name: str) -> str:
    """Return what the names of the same files of two splits have in common."""
    return _SPLIT_WORD.sub("", name)


def split_of_folder(name: str) -> SplitWord | None:
    """Return the split of a folder that is called by nothing but such a word."""
    return split_word(name) if _SPLIT_WORD.fullmatch(name) else None


def split_folders_among(names: Collection[str]) -> dict[str, SplitWord]:
    """Return those of the folders beside each other that are splits and not classes, with their words.

    They are called by nothing but such words, or by these with a common part: ``seg_train``, ``seg_test``; numbers
    around them may differ, as in Kaggle's ``train`` and ``test1``, or ``1_train`` and ``2_val``. There are two splits,
    or train is the only folder: "train" beside "bus" is a class.
    """
    by_rest: dict[str, dict[str, SplitWord]] = {"": {}}
    for name in names:
        word = split_word(name)
        if word is not None:
            rest = without_split_words(name).lower().rstrip("0123456789").rstrip("_-. ")
            rest = rest.lstrip("0123456789").lstrip("_-. ")
            by_rest.setdefault(rest, {})[name] = word
    for rest, folders in by_rest.items():
        words = {*folders.values()}
        is_alone = rest == "" and words == {"train"} and len(names) == 1
        if is_alone or (len(words) > 1 and (rest == "" or "train" in words)):
            return folders
    return {}


def splits_of_words(words: Collection[SplitWord]) -> dict[SplitWord, SplitName]:
    """Return what each word stands for where these are there: test is the validation split if there is no val, else
    it is left out."""
    splits: dict[SplitWord, SplitName] = {"train": "train"}
    splits["val" if "val" in words else "test"] = "validation"
    return {word: split for word, split in splits.items() if word in words}


def metadata_directory(root: Path | str) -> Path:
    """Return the directory of ``dataset.json`` and the index: `root`, where they were fetched to from an object store,
    or what follows another storage's ``SCHEME://``.

    Raises:
        DatasetError: see `fetched_metadata`.
    """
    return fetched_metadata(str(root)) if is_remote(str(root)) else Path(str(root).rpartition("://")[2])


Checksum = Annotated[str, Rule("eight hex digits", pattern="[0-9a-f]{8}")]


@dataclass(frozen=True, kw_only=True)
class Shard:
    # Everything is read from, copied and linked to ROOT/SPLIT/NAME: a directory in it would lead out of there.
    name: Annotated[str, Rule("a plain file name", pattern=r"[^./\0][^/\0]{0,254}")]
    num_records: Count
    num_bytes: Count
    crc32c: Checksum | None = None  # of the file; None if it was indexed without reading all of it


@dataclass(frozen=True, kw_only=True)
class InPlace:
    """The files of an index in place, which has no shards of its own."""

    source: Annotated[str, Rule("a directory or a URL", pattern=r"[^\0]+")]  # a path may be relative to dataset.json's
    num_files: Count  # that were listed; the table goes on with what else is in their directories, and with these
    files_crc32c: Checksum  # of index/files.npy
    # The tables, or ImageNet's development kit, that the labels were read from -> SHA-256. Paths are relative to the
    # source's directory.
    labels_from: Annotated[
        dict[
            Annotated[str, Rule("a path", pattern=r"[^\0]+")],
            Annotated[str, Rule("a SHA-256 in hex digits", pattern="[0-9a-f]{64}")],
        ],
        Rule("an object with a SHA-256 for each path"),
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SplitManifest:
    num_records: Count
    index_crc32c: Checksum  # of index/SPLIT.npy
    shards: tuple[Shard, ...] = ()
    image_bytes: Count | None = None  # of all images together, in an index in place
    # Of index/SPLIT.crc.npy, which has the CRC32C of every image's bytes; None if it was indexed without reading them.
    image_checksums_crc32c: Checksum | None = None

    def __post_init__(self) -> None:
        if self.image_bytes is not None:
            checked = self.image_checksums_crc32c is not None
            require(checked and not self.shards, "image_bytes goes with the checksums of an index, and without shards")
            return
        total = sum(shard.num_records for shard in self.shards)
        require(total == self.num_records, f"num_records is {self.num_records}, that of its shards {total}")
        names = {shard.name for shard in self.shards}
        require(len(names) == len(self.shards), "two shards of one split have the same name")

    @property
    def num_bytes(self) -> int:
        """About how many bytes are read in an epoch."""
        return self.image_bytes or sum(shard.num_bytes for shard in self.shards)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of ``dataset.json``."""

    num_classes: Annotated[int, Rule(f"a whole number from 1 to {MAX_CLASSES:,}", 1, MAX_CLASSES)]
    class_names: Annotated[tuple[str, ...], Rule("a text for each class")]
    # The label of class 0 in the records: 1 in ImageNet's TFRecords.
    label_base: Annotated[int, Rule("a label, which has 32 bits", -_MAX_LABEL, _MAX_LABEL)]
    splits: Annotated[
        dict[Annotated[str, Rule("a split", pattern="|".join(SPLITS))], SplitManifest],
        Rule(f"an object with {' and/or '.join(SPLITS)}"),
    ]
    conversion: dict[str, Any] = field(default_factory=dict)  # the converter's options, for people and for resuming
    encoding: Encoding = "image"
    image_key: str = IMAGE_KEY  # the feature of a record that holds its image
    label_key: str = LABEL_KEY
    in_place: InPlace | None = None
    # With several labels an image, the index's labels number sets of classes: "0 5,3,," has {0, 5}, {3}, and twice the
    # empty set. None: they number classes. Versions before this field refuse such a dataset by its format_version.
    label_sets: (
        Annotated[str, Rule("classes, and commas between sets", pattern="(?:[0-9]{0,8}[ ,])*+[0-9]{0,8}")] | None
    ) = None
    format_version: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        found = len(self.class_names)
        require(found == self.num_classes, f"class_names are {found} values for {self.num_classes} classes")
        require(len(self.splits) > 0, "splits are none")
        in_place = {split.image_bytes is not None for split in self.splits.values()}
        require(in_place == {self.in_place is not None}, "in_place goes with image_bytes of every split")
        version = 1 if self.label_sets is None else 2
        require(self.format_version == version, f"format_version is {self.format_version}, expected {version}")

    @cached_property
    def label_kind(self) -> LabelKind:
        """What the labels of the index stand for.

        Raises:
            ConfigError: they need a part that is not installed.
            DatasetError: they stand for a class that does not exist.
        """
        if self.label_sets is None:
            return CLASSES
        sets = [tuple(map(int, classes.split())) for classes in self.label_sets.split(",")]
        largest = max(max(classes, default=0) for classes in sets)
        if largest >= self.num_classes:
            raise DatasetError(f"label_sets has class {largest} of {self.num_classes} classes")
        return SETS_OF_CLASSES.load()(sets)

    @property
    def num_labels(self) -> int:
        """How many labels images can have."""
        return self.label_kind.num_labels(self.num_classes)

    @property
    def applies_orientation(self) -> bool:
        """Whether photographs were turned upright by their EXIF orientation, and others should be before predicting."""
        options = self.conversion.get("options")
        return isinstance(options, dict) and options.get("apply_orientation") is True

    @classmethod
    def read(cls, root: Path | str) -> "Manifest":
        """Read the manifest of `root`, see `metadata_directory`.

        Nothing in the file is trusted: every value is checked against its type and range.

        Raises:
            DatasetError: no manifest, not a regular file, not JSON, of another format version, or with a value that
                cannot be.
        """
        directory = metadata_directory(root)
        if is_remote(str(root)):
            return _parse(directory / "dataset.json", f"{root}/dataset.json", copy_again(str(root)))
        path = directory / "dataset.json"
        try:
            command = f"dali-train data index {shlex.quote(str(directory))}"
            return _parse(path, str(path), f"restore it, or run `{command}` to make it again")
        except FileNotFoundError:
            if not directory.is_dir():
                raise DatasetError(
                    f"{directory}: {not_a_directory(directory)}: set data.root, or data.eval_sets, to one that has "
                    "dataset.json"
                ) from None
            raise NoDatasetError(f"{path} is missing", directory) from None

    def write(self, root: Path) -> None:
        values = asdict(self)
        if self.label_sets is None:
            del values["label_sets"]
        write_atomically(root / "dataset.json", (json.dumps(values, indent=1) + "\n").encode())


def check_name(name: str) -> None:
    """Raises DatasetError: a path or a part of one cannot be written to ``dataset.json``, which is UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raise DatasetError(f"{shown}: this name is not UTF-8, and dataset.json must hold it: rename it") from None


def _parse(source: Path | bytes, name: str, remedy: str) -> Manifest:
    """Return the manifest in a file, or in bytes; `name` and `remedy` are for messages.

    Raises:
        DatasetError: it is not one.
        FileNotFoundError: there is no such file.
    """
    try:
        return from_json(Manifest, read_json(source, _MAX_BYTES, name=name))
    except ForeignFileError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno != errno.EINVAL:  # its content may be right
            remedy = "check its permissions and its disk"
        raise DatasetError(f"{error}: {remedy}") from error
    except ConfigError as error:
        raise DatasetError(f"{name} cannot be used: {error}; {remedy}") from error


CONTENT = "content "  # before a digest of what a file or dataset has


def dataset_content(manifest: Manifest) -> str:
    """Return the number of training images, and a digest of the checksums of the indexes and of all shards, or of the
    images of an index in place."""
    splits = {name: (part.index_crc32c, _content_of_files(part)) for name, part in manifest.splits.items()}
    content = json.dumps(splits, sort_keys=True) + (manifest.label_sets or "")
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    num_images = manifest.splits["train"].num_records if "train" in manifest.splits else 0
    return f"{num_images} images, {CONTENT}{digest}"


def _content_of_files(split: SplitManifest) -> list[Any]:
    if split.image_bytes is not None:  # whatever the files are called
        return [split.image_checksums_crc32c]
    return [(shard.num_bytes, shard.crc32c) for shard in split.shards]


def copy_again(url: str) -> str:
    """Return the remedy for metadata in an object store that cannot be used."""
    return f"index the dataset again where it lies on a disk, and copy it to {url}"


@contextmanager
def dataset_errors() -> Iterator[None]:
    """Raise the errors of an object store as a DatasetError."""
    try:
        yield
    except ObjectStoreError as error:
        raise DatasetError(str(error)) from error


@lru_cache(maxsize=16)
@dataset_errors()
def fetched_metadata(url: str) -> Path:
    """Return the directory on this machine with ``dataset.json`` and the index of the dataset at `url`.

    Directories are named by the content of ``dataset.json``, so a replaced dataset gets a new one, and nothing is
    fetched twice. A running process keeps the version that it started with.

    Raises:
        DatasetError: there is no dataset at `url`, or the store does not answer, or refuses.
    """
    bucket = Bucket(url)
    try:
        content = bucket.read_all("dataset.json", max_bytes=_MAX_BYTES)
    except MissingObjectError:
        raise DatasetError(
            f"{url} has no dataset.json: name the URL that a converted or indexed dataset's directory was copied to"
        ) from None
    manifest = _parse(content, f"{url}/dataset.json", copy_again(url))
    directory = cache_directory() / "datasets" / hashlib.sha256(content).hexdigest()[:16]
    files: dict[Path, str | None] = {}
    for split, facts in manifest.splits.items():
        files[index_path(Path(), split)] = facts.index_crc32c
        files[checksums_path(Path(), split)] = facts.image_checksums_crc32c
    if manifest.in_place is not None:
        files[files_path(Path())] = manifest.in_place.files_crc32c
    for path, checksum in files.items():
        if checksum is not None:
            _fetch(bucket, str(path), directory, checksum)
    copy = directory / "dataset.json"
    if not copy.exists() or copy.read_bytes() != content:
        write_atomically(copy, content)
    return directory


def _fetch(bucket: Bucket, name: str, directory: Path, checksum: str) -> None:
    """Fetch an object into `directory`, unless it is there. Raises DatasetError: it is missing, or another one."""
    path = directory / name
    if path.is_file() and f"{crc32c(path.read_bytes()):08x}" == checksum:
        return
    try:
        content = bucket.read_all(name)
    except MissingObjectError as error:
        raise DatasetError(f"{error}, dataset.json names it: copy the dataset's directory completely") from None
    if f"{crc32c(content):08x}" != checksum:
        raise DatasetError(f"{bucket.url}/{name} is not the file that dataset.json was written with: copy both again")
    write_atomically(path, content)


def cache_directory() -> Path:
    """Return this user's directory on this machine for files that can be fetched again: in XDG_CACHE_HOME, or in the
    home directory, or, where a container has none that can be written to, in that for temporary files.

    Raises:
        ConfigError: none of them can be written to.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "dali_train"
    with suppress(OSError, RuntimeError):  # RuntimeError: no HOME, and a user id that is in no /etc/passwd
        directory = Path.home() / ".cache" / "dali_train"
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK | os.X_OK):
            return directory
    return private_directory("XDG_CACHE_HOME is not set, and TMPDIR", Path(tempfile.gettempdir()) / "dali_train")


def read_class_names(path: Path, option: str = "--class-names") -> list[str]:
    """Return the lines of a UTF-8 file, the class names in the order of the labels. A byte order mark is no part of it,
    nor are empty lines at its end.

    Raises:
        DatasetError: the file cannot be read, is empty, or has an empty or a duplicate line.
    """
    try:
        names = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(
            f"{option} {path}: cannot be read ({reason}): use a text file in UTF-8, one name per line"
        ) from error
    while names and not names[-1]:
        names.pop()
    first: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if not name or first.setdefault(name, number) != number:
            reason = f"is {name!r} again, as line {first[name]}" if name else "is empty"
            raise DatasetError(f"{option} {path}: line {number} {reason}: use one name per line, each class another")
    if not names:
        raise DatasetError(f"{option} {path}: is empty: use one name per line, each class another")
    return names


def order_classes(folders: Collection[str], order: ClassOrder = "name") -> list[str]:
    """Return the class folders in the order of their labels.

    Args:
        order: name: by code points, as torchvision does. natural: numbers by their value and regardless of case, as
            timm does (timm.utils.natural_key).
    """
    by_name = sorted(folders)
    return sorted(by_name, key=_natural_key) if order == "natural" else by_name


def check_spellings(classes: Collection[str]) -> None:
    """Raises DatasetError: two of the names look alike, as é in one or two letters and as spaces at the end do."""
    spellings: dict[str, str] = {}
    for name in sorted(classes):
        other = spellings.setdefault(unicodedata.normalize("NFC", name).strip(), name)
        if other != name:
            raise DatasetError(
                f"the classes {other!a} and {name!a} look alike, and are not spelt alike: spell them in one way"
            )


def _natural_key(name: str) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", name.lower())
    return [(part.isdecimal(), int(part), "") if part.isdecimal() else (False, 0, part) for part in parts]


def number_classes(folders: Collection[str], names: Sequence[str], path: Path) -> Mapping[str, int]:
    """Return the label of each class folder by the list of class names in the file `path`.

    The folders are called as the classes, or else by their labels, as ImageNet-V2's 0 to 999.

    Raises:
        DatasetError: a folder is neither.
    """
    numbers = {name: label for label, name in enumerate(names)}
    if not any(folder in numbers for folder in folders):
        numbers = {str(label): label for label in range(len(names))}
    unknown = sorted(folder for folder in folders if folder not in numbers)
    if unknown:
        raise DatasetError(
            f"--class-names {path}: the class {unknown[0]!r} is none of its {len(names)} lines and no number of one "
            f"from 0 ({len(unknown)} such classes): name every class in it, or leave those out"
        )
    return numbers


def index_path(root: Path, split: str) -> Path:
    """Return the path of a split's columnar index."""
    return root / "index" / f"{split}.npy"


def checksums_path(root: Path, split: str) -> Path:
    """Return the path of the CRC32C of each image of a split, (N,) uint32."""
    return root / "index" / f"{split}.crc.npy"


def files_path(root: Path) -> Path:
    """Return the path of the table of files of an index in place, see `files_in_place`."""
    return root / "index" / "files.npy"


def text_index_path(root: Path, split: str, shard_name: str) -> Path:
    """DALI's index of a shard: a line "offset size" per record, framing included."""
    return root / "idx_files" / split / f"{shard_name}.idx"
