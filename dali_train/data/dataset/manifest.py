"""``dataset.json``: what a dataset holds, and how it was made."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dali_train.data.dataset.found import converter_for
from dali_train.data.dataset.remote import fetched_metadata
from dali_train.errors import DatasetError
from dali_train.files import read_limited, write_atomically
from dali_train.runtime.object_store import is_remote

FORMAT_VERSION = 1
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


@dataclass(frozen=True, kw_only=True)
class Shard:
    name: str  # a plain file name: no directory
    num_records: int
    num_bytes: int
    crc32c: str | None  # of the file, eight hex digits; None if it was indexed without reading all of it


@dataclass(frozen=True, kw_only=True)
class SplitManifest:
    num_records: int
    shards: tuple[Shard, ...]
    index_crc32c: str | None = None  # of index/SPLIT.npy, eight hex digits; None in datasets of older versions
    # Of index/SPLIT.crc.npy, which has the CRC32C of every image's bytes; None if it was indexed without reading them.
    image_checksums_crc32c: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of ``dataset.json``."""

    num_classes: int
    class_names: tuple[str, ...]
    label_base: int  # the label of class 0 in the records: 1 in ImageNet's TFRecords
    splits: dict[str, SplitManifest]
    conversion: dict[str, Any] = field(default_factory=dict)  # the converter's options, for people and for resuming
    encoding: Encoding = "image"
    image_key: str = IMAGE_KEY  # the feature of a record that holds its image
    label_key: str = LABEL_KEY
    format_version: int = FORMAT_VERSION

    @classmethod
    def read(cls, root: Path | str) -> "Manifest":
        """Read the manifest of `root`, see `metadata_directory`.

        Nothing in the file is trusted: every value is checked against its type and range, and names are plain file
        names.

        Raises:
            DatasetError: no manifest, not a regular file, not JSON, of another format version, or with a value that
                cannot be.
        """
        root = metadata_directory(root)
        path = root / "dataset.json"
        remedy = f"run `dali-train data index {root}`"
        try:
            fields = _Fields(json.loads(read_limited(path, _MAX_BYTES)), "the file")
            version = fields.get("format_version", int)
            if version != FORMAT_VERSION:
                raise ValueError(f"has format_version {version}, this program reads {FORMAT_VERSION}")
            return _parse(fields)
        except FileNotFoundError:
            if not root.is_dir():
                raise DatasetError(
                    f"{root}: this directory does not exist; data.root names a dataset's directory"
                ) from None
            raise DatasetError(f"{path} is missing: {converter_for(root)}") from None
        except OSError as error:
            raise DatasetError(f"{path}: {error.strerror}: {remedy}") from error
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DatasetError(f"{path} is not valid JSON ({error}): {remedy}") from error
        except ValueError as error:
            raise DatasetError(f"{path} {error}: {remedy}") from error

    def write(self, root: Path) -> None:
        write_atomically(root / "dataset.json", (json.dumps(asdict(self), indent=1) + "\n").encode())


class _Fields:
    """A JSON object, read field by field. Raises ValueError: a value of another type or out of range, by name."""

    def __init__(self, value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"cannot be used: {place} is of type {type(value).__name__}, expected an object")
        self.values: dict[str, Any] = value
        self._place = place

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(name, default)
        if type(value) is not kind:  # true is no number
            found = "is missing" if value is None else f"is of type {type(value).__name__}"
            raise ValueError(f"cannot be used: {name} of {self._place} {found}, expected {kind.__name__}")
        return value

    def count(self, name: str, *, least: int = 1, most: int = 1 << 62) -> int:
        value: int = self.get(name, int)
        if not least <= value <= most:
            raise ValueError(f"cannot be used: {name} of {self._place} is {value}, expected {least} to {most}")
        return value

    def checksum(self, name: str) -> str | None:
        if self.values.get(name) is None:
            return None
        value: str = self.get(name, str)
        if not re.fullmatch("[0-9a-f]{8}", value):
            raise ValueError(f"cannot be used: {name} of {self._place} is {value[:40]!r}, expected eight hex digits")
        return value


def _parse(fields: _Fields) -> Manifest:
    num_classes = fields.count("num_classes", most=MAX_CLASSES)
    names: list[Any] = fields.get("class_names", list)
    if len(names) != num_classes or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"cannot be used: class_names are {len(names)} values for {num_classes} classes, expected a text for each"
        )
    encoding: Encoding = fields.get("encoding", str, "image")
    if encoding not in get_args(Encoding):
        raise ValueError(f"cannot be used: encoding is {encoding[:40]!r}, expected {' or '.join(get_args(Encoding))}")
    splits: dict[str, Any] = fields.get("splits", dict)
    if not splits or not set(splits) <= set(SPLITS):
        raise ValueError(
            f"cannot be used: splits are {', '.join(splits)[:80] or 'none'}, expected {' and/or '.join(SPLITS)}"
        )
    return Manifest(
        num_classes=num_classes,
        class_names=tuple(names),
        label_base=fields.count("label_base", least=-_MAX_LABEL, most=_MAX_LABEL),
        splits={name: _parse_split(_Fields(split, name)) for name, split in splits.items()},
        conversion=fields.get("conversion", dict, {}),
        encoding=encoding,
        image_key=fields.get("image_key", str, IMAGE_KEY),
        label_key=fields.get("label_key", str, LABEL_KEY),
    )


def _parse_split(fields: _Fields) -> SplitManifest:
    shards = tuple(_parse_shard(_Fields(shard, "a shard")) for shard in fields.get("shards", list))
    num_records = fields.count("num_records")
    if sum(shard.num_records for shard in shards) != num_records:
        raise ValueError(
            f"cannot be used: num_records is {num_records}, that of its shards {sum(s.num_records for s in shards)}"
        )
    if len({shard.name for shard in shards}) != len(shards):
        raise ValueError("cannot be used: two shards of one split have the same name")
    return SplitManifest(
        num_records=num_records,
        shards=shards,
        index_crc32c=fields.checksum("index_crc32c"),
        image_checksums_crc32c=fields.checksum("image_checksums_crc32c"),
    )


def _parse_shard(fields: _Fields) -> Shard:
    name: str = fields.get("name", str)
    # Everything is read from, copied and linked to ROOT/SPLIT/NAME: a directory in it would lead out of there.
    if (
        not name
        or name.startswith(".")
        or "/" in name
        or "\0" in name
        or len(name.encode(errors="surrogateescape")) > 255
    ):
        raise ValueError(f"cannot be used: the shard name {name[:80]!r} is not a plain file name")
    return Shard(
        name=name,
        num_records=fields.count("num_records"),
        num_bytes=fields.count("num_bytes"),
        crc32c=fields.checksum("crc32c"),
    )


def index_path(root: Path, split: str) -> Path:
    """Return the path of a split's columnar index."""
    return root / "index" / f"{split}.npy"


def checksums_path(root: Path, split: str) -> Path:
    """Return the path of the CRC32C of each image of a split, (N,) uint32."""
    return root / "index" / f"{split}.crc.npy"


def text_index_path(root: Path, split: str, shard_name: str) -> Path:
    """DALI's index of a shard: a line "offset size" per record, framing included."""
    return root / "idx_files" / split / f"{shard_name}.idx"
