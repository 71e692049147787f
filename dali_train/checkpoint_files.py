"""The files of one checkpoint: DCP's, read and written so that damage shows and nothing in them is ever run.

DCP's metadata is a pickle, and a crafted one runs code in DCP's own reader; nor does DCP see a flipped bit. So the
files' SHA-256 stand in the manifest, the manifest's own in a file beside it, and the metadata is read by an unpickler
that knows the few classes in it and nothing else.
"""

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dali_train.data.manifest import sync_directory, write_atomically
from dali_train.status import RunError

METADATA, MANIFEST, MANIFEST_DIGEST = ".metadata", "manifest.json", "manifest.json.sha256"


class CheckpointError(RunError):
    """A checkpoint that is not what was written; the message names the file."""


class Writer(dcp.FileSystemWriter):
    """DCP's writer, flushing each file to disk and noting its checksum."""

    def __init__(self, path: Path) -> None:
        # Nothing is copied ahead: that would open a context on the first GPU in the thread that saves.
        super().__init__(path, sync_files=True, per_thread_copy_ahead=0)
        self.digests: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        if not plan.items:  # nothing to write for this rank: no empty file either
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        self.digests = {name: sha256(Path(self.path) / name) for name in names}
        return written

    def storage_meta(self) -> StorageMeta | None:
        return None  # it would only name the partial directory


class Reader(dcp.FileSystemReader):
    """DCP's reader, which trusts neither the metadata's pickle nor the files it names."""

    def __init__(self, path: Path, files: frozenset[str]) -> None:
        super().__init__(path)
        self._files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{self.path}/{METADATA} holds no metadata but {type(metadata).__name__}")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # DCP would unpickle it without any restriction
                raise CheckpointError(f"{self.path}: {name} is no tensor, and nothing else is read from DCP's files")
        for place in metadata.storage_data.values():
            if place.relative_path not in self._files:
                raise CheckpointError(f"{self.path}/{METADATA} names {place.relative_path}, which {MANIFEST} does not")
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata; none of them does anything but hold values."""

    _KNOWN = {
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
            "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    } | {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(f"{METADATA} asks for {module}.{name}, which has no place in a checkpoint: refused, nothing was run")


def read_manifest(path: Path) -> dict[str, Any]:
    content = (path / MANIFEST).read_bytes()
    if (path / MANIFEST_DIGEST).read_bytes() != _digest_line(content):
        raise CheckpointError(f"{path / MANIFEST} is damaged: its SHA-256 is not the one in {MANIFEST_DIGEST}")
    manifest: dict[str, Any] = json.loads(content)
    return manifest


def write_manifest(path: Path, manifest: dict[str, Any], digests: dict[str, str]) -> None:
    """Write the manifest of the directory `path`, whose files have these `digests`, and flush the directory."""
    files = {METADATA: sha256(path / METADATA), **digests}
    content = (json.dumps({**manifest, "files": files}, indent=1) + "\n").encode()
    write_atomically(path / MANIFEST, content)
    write_atomically(path / MANIFEST_DIGEST, _digest_line(content))
    sync_directory(path)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_line(manifest: bytes) -> bytes:
    """As sha256sum -c reads it."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()
