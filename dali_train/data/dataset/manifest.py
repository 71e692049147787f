"""``dataset.json``: the content of a dataset, and how it was made."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from dali_train.config.check import Count, Rule, from_json, require
from dali_train.data.dataset.found import converter_for
from dali_train.data.dataset.remote import fetched_metadata
from dali_train.errors import ConfigError, DatasetError
from dali_train.files import read_limited, write_atomically
from dali_train.runtime.object_store import is_remote

MAX_CLASSES = 1_000_000  # ImageNet-21k has 21,841; a label that is no class number must not claim memory for its names
IMAGE_KEY, LABEL_KEY = "image/encoded", "image/class/label"
_MAX_BYTES = 1 << 28  # of dataset.json: a million class names and 100,000 shards take a tenth of it
_MAX_LABEL = (1 << 31) - 1  # labels are int32

SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
# What an index row points at: an image file (JPEG, PNG, ...), or height * width * 3 bytes of RGB pixels, HWC.
Encoding = Literal["image", "raw"]


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
class SplitManifest:
    num_records: Count
    shards: tuple[Shard, ...]
    index_crc32c: Checksum | None = None  # of index/SPLIT.npy; None in datasets of older versions
    # Of index/SPLIT.crc.npy, which has the CRC32C of every image's bytes; None if it was indexed without reading them.
    image_checksums_crc32c: Checksum | None = None

    def __post_init__(self) -> None:
        total = sum(shard.num_records for shard in self.shards)
        require(total == self.num_records, f"num_records is {self.num_records}, that of its shards {total}")
        names = {shard.name for shard in self.shards}
        require(len(names) == len(self.shards), "two shards of one split have the same name")


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
    format_version: Literal[1] = 1

    def __post_init__(self) -> None:
        found = len(self.class_names)
        require(found == self.num_classes, f"class_names are {found} values for {self.num_classes} classes")
        require(len(self.splits) > 0, "splits are none")

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
        root = metadata_directory(root)
        path = root / "dataset.json"
        remedy = f"run `dali-train data index {root}`"
        try:
            return from_json(cls, json.loads(read_limited(path, _MAX_BYTES)))
        except FileNotFoundError:
            if not root.is_dir():
                raise DatasetError(
                    f"{root}: this directory does not exist; data.root names a dataset's directory"
                ) from None
            raise DatasetError(f"{path} is missing: {converter_for(root)}") from None
        except OSError as error:
            raise DatasetError(f"{path}: {error.strerror}: {remedy}") from error
        except ConfigError as error:
            raise DatasetError(f"{path} cannot be used: {error}; {remedy}") from error
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{path} is not valid JSON ({error}): {remedy}") from error

    def write(self, root: Path) -> None:
        write_atomically(root / "dataset.json", (json.dumps(asdict(self), indent=1) + "\n").encode())


def read_class_names(path: Path) -> list[str]:
    """Return the lines of a file, the class names in the order of the labels.

    Raises:
        DatasetError: the file cannot be read, is empty, or has an empty or a duplicate line.
    """
    try:
        names = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"--class-names {path}: cannot be read ({error})") from error
    if len({name for name in names if name.strip()}) < max(1, len(names)):
        raise DatasetError(f"--class-names {path}: use one name per line, each class another")
    return names


def index_path(root: Path, split: str) -> Path:
    """Return the path of a split's columnar index."""
    return root / "index" / f"{split}.npy"


def checksums_path(root: Path, split: str) -> Path:
    """Return the path of the CRC32C of each image of a split, (N,) uint32."""
    return root / "index" / f"{split}.crc.npy"


def text_index_path(root: Path, split: str, shard_name: str) -> Path:
    """DALI's index of a shard: a line "offset size" per record, framing included."""
    return root / "idx_files" / split / f"{shard_name}.idx"
