"""Atomic checkpoints: a directory appears under its final name only when it is whole, flushed and checksummed.

The only position in a checkpoint is the step number: order, draws and dropout follow from it (the invariant). Files
are read with torch's restricted unpickler, which refuses anything but tensors and plain containers, so that loading
never runs code from a file.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dali_train.config import ConfigError
from dali_train.data.index import write_atomically

_STATE, _MANIFEST = "state.pt", "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint that is not what was written; the message names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole, verified checkpoint. `state` maps "model", "optimizer", ... to their state dicts, on the CPU."""

    path: Path
    step: int  # optimizer steps that were done
    state: dict[str, Any]


def save(directory: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Write ``directory/step-NNNNNNNN`` and remove all but the newest `keep` checkpoints. One process calls this."""
    final = directory / f"step-{step:08d}"
    partial = directory / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / _STATE).open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    manifest = {"step": step, "files": {_STATE: _sha256(partial / _STATE)}}
    write_atomically(partial / _MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    shutil.rmtree(final, ignore_errors=True)  # of an earlier run through the same step
    partial.rename(final)
    _flush_directory(directory)
    for old in _paths(directory)[:-keep]:
        shutil.rmtree(old)
    return final


def load(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        CheckpointError: a part is missing or damaged, or holds more than tensors and plain values.
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        for name, digest in manifest["files"].items():
            if _sha256(path / name) != digest:
                raise CheckpointError(f"{path / name} is damaged: its SHA-256 is not the one in {_MANIFEST}")
        state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
        return Checkpoint(path, manifest["step"], state)
    except CheckpointError:
        raise
    except Exception as error:  # torch.load raises what the damaged bytes happen to lead to
        raise CheckpointError(f"{path} is not a whole checkpoint ({type(error).__name__}: {error})") from error


def newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, if any, and a warning for each newer one that had to be passed over.

    Raises:
        CheckpointError: there are checkpoints and all of them are damaged.
    """
    faults: list[str] = []
    for path in reversed(_paths(directory)):
        try:
            return load(path), [f"{fault}; going on from {path} instead" for fault in faults]
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError("no checkpoint is whole: " + "; ".join(faults) + ". Remove them to start at step 0")
    return None, []


def find(resume: str, directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that run.resume names (``auto``, ``never`` or a path), and warnings.

    Raises:
        CheckpointError: the named one is missing or damaged.
        ConfigError: ``never``, but the run directory has checkpoints.
    """
    if resume == "auto":
        return newest(directory)
    if resume == "never":
        if existing := _paths(directory):
            raise ConfigError(
                f"run.resume is never, but {directory} has {len(existing)} checkpoints: choose another run.dir, remove them, "
                "or set run.resume auto to go on"
            )
        return None, []
    return load(Path(resume)), []


def _paths(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step-*") if path.is_dir())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
