"""The files of one checkpoint: tensors as safetensors, everything else in a JSON manifest, neither of which holds code.

Ranks write and read through DCP (``torch.distributed.checkpoint``): each writes its shards, and any other layout of
ranks can read them. DCP does not detect flipped bits, so each file's SHA-256 is in the manifest, and the manifest's own
is in a file next to it.
"""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dali_train.errors import RunError
from dali_train.files import read_limited, sha256, sync_directory, write_atomically

FORMAT = 1  # of manifest and files; the next one gets the next number
MANIFEST, MANIFEST_DIGEST = "manifest.json", "manifest.json.sha256"
_MAX_MANIFEST_BYTES = 256 * 2**20

Tensors = dict[str, torch.Tensor]


class CheckpointError(RunError):
    """A checkpoint that is damaged or incomplete; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The content of a checkpoint besides the tensors, with checked types."""

    step: int  # optimizer steps done
    values: dict[str, Any]  # the state that is not tensors
    files: dict[str, str]  # SHA-256 in hexadecimal by plain file name
    format: int = FORMAT

    def __post_init__(self) -> None:
        def require(fulfilled: bool, name: str, kind: str) -> None:
            if not fulfilled:
                raise CheckpointError(f"{name} is not {kind}")

        require(type(self.step) is int and 0 <= self.step < 10**18, "step", "a number of steps")
        require(isinstance(self.values, dict), "values", "an object")
        for name, fits in _KINDS.items():
            require(
                name not in self.values or fits(self.values[name]), f"values.{name}", "what a checkpoint holds there"
            )
        require(isinstance(self.files, dict) and 0 < len(self.files) < 10**6, "files", "an object with names of files")
        for name, digest in self.files.items():
            require(
                re.fullmatch(r"[\w.-]+", name) is not None and name not in (".", ".."),
                f"files: {name!r}",
                "a plain file name",
            )
            require(
                isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None,
                f"files.{name}",
                "a SHA-256",
            )

    @classmethod
    def read(cls, directory: Path) -> "CheckpointManifest":
        """Read and check the manifest of the checkpoint in `directory`.

        Raises:
            OSError: it cannot be read.
            CheckpointError: the manifest is damaged, has another format, or a value of the wrong type.
        """
        path = directory / MANIFEST
        content = read_limited(path, _MAX_MANIFEST_BYTES)
        if read_limited(directory / MANIFEST_DIGEST, 1000) != _digest_line(content):
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST_DIGEST}")
        try:
            fields = json.loads(content)
            if isinstance(fields, dict) and fields.get("format") != FORMAT:
                raise CheckpointError(
                    f"its format is {fields.get('format')!r} and this version reads {FORMAT}, so resume with the "
                    "version that wrote it, or choose another run.dir to start at step 0"
                )
            return cls(**fields)
        except (ValueError, TypeError, RecursionError, CheckpointError) as error:
            raise CheckpointError(f"{path} is not the manifest of a checkpoint that can be read: {error}") from None

    def write(self, directory: Path) -> None:
        """Write and flush the manifest and the directory entry."""
        content = (json.dumps(asdict(self), indent=1) + "\n").encode()
        write_atomically(directory / MANIFEST, content)
        write_atomically(directory / MANIFEST_DIGEST, _digest_line(content))
        sync_directory(directory)

    def verify(self, directory: Path) -> None:
        """Compare all files with their checksums.

        Raises:
            OSError: a file cannot be read.
            CheckpointError: a file is damaged.
        """
        for name, digest in self.files.items():
            if sha256(directory / name) != digest:
                raise CheckpointError(f"{directory / name} is damaged: its SHA-256 is not the one in {MANIFEST}")


class Writer(dcp.HuggingFaceStorageWriter):
    """DCP's writer of safetensors, which also flushes each file to disk and records its checksum."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), save_distributed=True)
        # No copying ahead, which would create a context on the first GPU in the saving thread.
        self.per_thread_copy_ahead = 0
        self.digests: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        self.digests = {name: sha256(Path(self.path) / name) for name in names}
        return written


def read_safetensors(directory: Path, names: set[str]) -> Tensors:
    """Return all tensors in the safetensors files of these `names`, complete and on the CPU.

    Any layout of ranks may have written them.

    Raises:
        CheckpointError: a tensor lacks a part, or there are safetensors files of other names.
    """
    if foreign := {path.name for path in directory.glob("*.safetensors")} - names:
        raise CheckpointError(
            f"{directory / min(foreign)} does not belong to this checkpoint: {MANIFEST} does not name it"
        )
    reader = dcp.HuggingFaceStorageReader(str(directory))
    tensors: Tensors = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):  # DCP would unpickle it
            raise CheckpointError(f"{directory}: {name} is not a tensor")
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise CheckpointError(f"{directory}: parts of {name} are missing")
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _digest_line(manifest: bytes) -> bytes:
    """Return the line that ``sha256sum -c`` reads."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _are_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(_is_number(number) for number in value.values())


def _is_optimizer(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"class", "groups", "numbers"}
        and isinstance(value["class"], str)
        and isinstance(value["groups"], list)
        and all(_are_numbers(group) for group in value["groups"])
        and _are_numbers(value["numbers"])
    )


_KINDS = {
    "optimizer": _is_optimizer,
    "scaler": _are_numbers,
    "recipe": lambda value: isinstance(value, dict),
    "epoch_accuracies": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "dropout": lambda value: value in ("block", "micro-batch"),
}
