"""``dataset.json``: what a dataset holds, and how it was made."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

FORMAT_VERSION = 1
SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
# What an index row points at: a whole image file (JPEG, PNG, ...), or height * width * 3 bytes of RGB pixels, HWC.
Encoding = Literal["image", "raw"]


class DatasetError(ValueError):
    """A dataset that cannot be used as it is; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    name: str
    num_records: int
    num_bytes: int
    crc32c: str | None  # of the whole file, eight hex digits; None if it was indexed without reading it all


@dataclass(frozen=True, kw_only=True)
class SplitManifest:
    num_records: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of ``dataset.json``."""

    num_classes: int
    class_names: tuple[str, ...]
    label_base: int  # the label of class 0 in the records: 1 in ImageNet's TFRecords
    splits: dict[str, SplitManifest]
    conversion: dict[str, Any] = field(default_factory=dict)  # the converter's options, for people and for resuming
    encoding: Encoding = "image"
    format_version: int = FORMAT_VERSION

    @classmethod
    def read(cls, root: Path) -> "Manifest":
        """Raises DatasetError: no manifest, not JSON, or of another format version."""
        path = root / "dataset.json"
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError:
            if not root.is_dir():
                raise DatasetError(f"{root}: there is no such directory; data.root names a dataset's directory") from None
            raise DatasetError(f"{path} is missing: run `python tools/make_index.py {root}` to index its TFRecords") from None
        except json.JSONDecodeError as error:
            raise DatasetError(f"{path} is not valid JSON ({error}): run `python tools/make_index.py {root}`") from error
        if fields.get("format_version") != FORMAT_VERSION:
            raise DatasetError(
                f"{path} has format_version {fields.get('format_version')!r}, this program reads {FORMAT_VERSION}: "
                f"run `python tools/make_index.py {root}`"
            )
        splits = {
            name: SplitManifest(num_records=split["num_records"], shards=tuple(Shard(**shard) for shard in split["shards"]))
            for name, split in fields.pop("splits").items()
        }
        return cls(splits=splits, class_names=tuple(fields.pop("class_names")), **fields)

    def write(self, root: Path) -> None:
        write_atomically(root / "dataset.json", (json.dumps(asdict(self), indent=1) + "\n").encode())


def index_path(root: Path, split: str) -> Path:
    """The columnar index of a split."""
    return root / "index" / f"{split}.npy"


def text_index_path(root: Path, split: str, shard_name: str) -> Path:
    """DALI's index of a shard: a line "offset size" a record, framing included."""
    return root / "idx_files" / split / f"{shard_name}.idx"


def write_atomically(path: Path, content: bytes) -> None:
    """Put a file in place whole and flushed, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make the renames in `directory` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
