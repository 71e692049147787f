"""Checkpoints: written by all ranks in the background, whole or not there, verified by checksum, safe to read.

``step-NNNNNNNN/`` holds tensors in the format of ``torch.distributed.checkpoint`` (DCP), under their names in the
model, so that a run with another layout of ranks can read them; everything else is in ``manifest.json``. The
directory gets its final name only when all of it is on disk, so a name without ``.partial`` is a promise. The only
position is the step number: order, draws and dropout follow from it (the invariant).
"""

import itertools
import shutil
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dali_train.checkpoint_files import (
    MANIFEST,
    CheckpointError,
    Reader,
    Writer,
    read_manifest,
    sha256,
    write_manifest,
)
from dali_train.config import ConfigError
from dali_train.data.manifest import sync_directory

Tensors = dict[str, torch.Tensor]

# More writers than this do not make a file system faster, and each has to hold its share in host memory.
_MAX_WRITERS = 8
# What a single process means; it is meant here.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


@dataclass(frozen=True)
class Checkpoint:
    """A whole, verified checkpoint.

    `state` maps "model", "optimizer", ... to tensors by name, on the CPU; `values` is what is no tensor.
    """

    path: Path
    step: int  # optimizer steps that were done
    state: dict[str, Tensors]
    values: dict[str, Any]


class CheckpointWriter:
    """Saves in the background; every rank has one and calls it at the same steps.

    Args:
        group: of all ranks, for host memory and used by nobody else; None for a single process.
        keep: newest checkpoints that are kept.
        keep_best: checkpoints with the best top-1 that are kept besides.
    """

    def __init__(self, directory: Path, group: dist.ProcessGroup | None, *, keep: int, keep_best: int) -> None:
        self._directory = directory
        self._group = group
        self._rank, self._world_size = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
        self._keep, self._keep_best = keep, keep_best
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._host: Tensors = {}

    def prepare(self, start_step: int) -> float:
        """Before the first save, on all ranks; gives the best accuracy of a kept checkpoint, -1 without one.

        Removes what a killed run left half done, and sets aside what lies beyond `start_step`: it is damaged, or of a
        future that going back to an earlier step has abandoned.
        """
        best = [-1.0]
        if self._rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            for rest in (*self._directory.glob(".step-*.partial"), *self._directory.glob(".step-*.removed")):
                shutil.rmtree(rest)
            for path in _paths(self._directory):
                if _step(path) > start_step:
                    names = (path.with_name(f"set-aside-{number}-{path.name}") for number in itertools.count(1))
                    path.rename(next(name for name in names if not name.exists()))
            best = [max((top1 for path in _paths(self._directory) if (top1 := _top1(path)) is not None), default=-1.0)]
        if self._group is not None:
            dist.broadcast_object_list(best, src=0, group=self._group)
        return best[0]

    def save(self, step: int, state: Mapping[str, Tensors], values: dict[str, Any], top1: float | None) -> None:
        """Copy this rank's share of `state` to host memory, then write it in the background.

        Tensors are replicated on all ranks, so each is written by one of them. Waits for the save before, if it
        still runs. `top1` is the accuracy at this step, if it was measured.

        Raises:
            CheckpointError: the save before this one failed.
        """
        self.wait()
        flat = {f"{section}.{name}": tensor for section, tensors in state.items() for name, tensor in tensors.items()}
        self._copy_to_host({name: flat[name] for name in self._share(flat)})
        manifest = {"step": step, "top1": top1, "values": values}
        # Not a daemon: what was begun is finished, also when the main thread ends with an error of its own.
        self._thread = threading.Thread(target=self._write, args=(step, manifest), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until the last save is whole on disk.

        Raises:
            CheckpointError: it is not; the message says why.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            failures = error.failures if isinstance(error, CheckpointException) else {}
            causes = "; ".join(f"{cause} (rank {rank})" for rank, (cause, _) in failures.items()) or str(error)
            raise CheckpointError(f"could not save a checkpoint in {self._directory}: {causes}") from error

    def join(self) -> None:
        """Let the last save end, well or not: for when the run fails anyway."""
        if self._thread is not None:
            self._thread.join()

    def _share(self, flat: Mapping[str, torch.Tensor]) -> list[str]:
        """The names that this rank writes: of similar size for some ranks, which are spread over the nodes."""
        writers = min(self._world_size, _MAX_WRITERS)
        writer, off = divmod(self._rank, self._world_size // writers)
        if off or writer >= writers:
            return []
        by_size = sorted(flat, key=lambda name: (-flat[name].numel(), name))
        return by_size[writer::writers]

    def _copy_to_host(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name not in self._host:
                self._host[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
            self._host[name].copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()

    def _write(self, step: int, manifest: dict[str, Any]) -> None:
        try:
            final = self._directory / f"step-{step:08d}"
            partial = self._directory / f".{final.name}.partial"
            writer = Writer(partial)
            dcp.save(dict(self._host), storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            digests = [writer.digests]
            if self._group is not None:
                digests = [{} for _ in range(self._world_size)] if self._rank == 0 else []
                dist.gather_object(writer.digests, digests or None, dst=0, group=self._group)
            if self._rank == 0:
                write_manifest(partial, manifest, {name: digest for part in digests for name, digest in part.items()})
                partial.rename(final)
                sync_directory(self._directory)
                self._retire()
        except BaseException as error:  # raised in the main thread, by wait()
            self._error = error

    def _retire(self) -> None:
        """Point to the newest and the best checkpoint, and remove those that are neither among the newest nor the best."""
        paths = _paths(self._directory)
        scores = {path: top1 for path in paths if (top1 := _top1(path)) is not None}
        best = sorted(scores, key=lambda path: (scores[path], path), reverse=True)
        _point(self._directory / "newest", paths[-1])
        if best:
            _point(self._directory / "best", best[0])
        for path in set(paths[: -self._keep]) - set(best[: self._keep_best]):
            doomed = path.with_name(f".{path.name}.removed")
            path.rename(doomed)  # at once, so that a kill leaves no half checkpoint
            shutil.rmtree(doomed)


def load(path: Path) -> Checkpoint:
    """Read one checkpoint on the CPU, in this process alone.

    Raises:
        CheckpointError: a part is missing or damaged, or holds more than tensors and plain values.
    """
    try:
        manifest = read_manifest(path)
        for name, digest in manifest["files"].items():
            if sha256(path / name) != digest:
                raise CheckpointError(f"{path / name} is damaged: its SHA-256 is not the one in {MANIFEST}")
        reader = Reader(path, frozenset(manifest["files"]))
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)  # all are, the reader saw to it
        }
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        state: dict[str, Tensors] = {}
        for name, tensor in tensors.items():
            section, _, rest = name.partition(".")
            state.setdefault(section, {})[rest] = tensor
        return Checkpoint(path, manifest["step"], state, manifest["values"])
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # whatever damaged bytes happen to lead to
        raise CheckpointError(f"{path} is not a whole checkpoint ({type(error).__name__}: {error})") from error


def newest(directory: Path, group: dist.ProcessGroup | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, if any, and a warning for each newer one that had to be passed over.

    With a `group` all its ranks call this together and get the same one: whole means that every rank could read it.

    Raises:
        CheckpointError: there are checkpoints and all of them are damaged.
    """
    candidates = _agree(list(reversed(_paths(directory))), group)
    faults: list[str] = []
    for path in candidates:
        checkpoint, fault = _try_to_load(path, group)
        if checkpoint is not None:
            return checkpoint, [f"{fault}; going on from {path} instead" for fault in faults]
        faults.append(fault)
    if faults:
        raise CheckpointError("no checkpoint is whole: " + "; ".join(faults) + f". Remove {directory} to start at step 0")
    return None, []


def find(resume: str, directory: Path, group: dist.ProcessGroup | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that run.resume names (``auto``, ``never`` or a path), and warnings. With a `group`, for all its ranks.

    A path to another run's checkpoint is where this run begins. Once it has checkpoints of its own it goes on from
    those, so that the same command serves to start it again.

    Raises:
        CheckpointError: the named one is missing or damaged.
        ConfigError: ``never``, but the run directory has checkpoints.
    """
    existing = _agree(_paths(directory), group)
    if resume == "auto":
        return newest(directory, group)
    if resume == "never":
        if existing:
            raise ConfigError(
                f"run.resume is never, but {directory} has {len(existing)} checkpoints: choose another run.dir, remove them, "
                "or set run.resume auto to go on"
            )
        return None, []
    named = Path(resume)
    if existing and named.resolve().parent != directory.resolve():
        return newest(directory, group)
    checkpoint, fault = _try_to_load(named, group)
    if checkpoint is None:
        raise CheckpointError(fault)
    return checkpoint, []


def _try_to_load(path: Path, group: dist.ProcessGroup | None) -> tuple[Checkpoint | None, str]:
    """The checkpoint if every rank can read it; else None and what the first rank that cannot says."""
    checkpoint, fault = None, ""
    try:
        checkpoint = load(path)
    except CheckpointError as error:
        fault = str(error)
    if group is not None:
        faults: list[str] = [""] * dist.get_world_size(group)
        dist.all_gather_object(faults, fault, group=group)
        fault = next((f"{fault} (seen by rank {rank})" for rank, fault in enumerate(faults) if fault), "")
    return (None if fault else checkpoint), fault


def _agree(paths: list[Path], group: dist.ProcessGroup | None) -> list[Path]:
    """Rank 0's list: file systems may show a change to some hosts later."""
    if group is None:
        return paths
    agreed = [[str(path) for path in paths]]
    dist.broadcast_object_list(agreed, src=0, group=group)
    return [Path(path) for path in agreed[0]]


def _top1(path: Path) -> float | None:
    try:
        top1: float | None = read_manifest(path)["top1"]
    except (OSError, CheckpointError):  # damaged: load() says so where it matters
        return None
    return top1


def _paths(directory: Path) -> list[Path]:
    """Checkpoints by step, oldest first."""
    return sorted((path for path in directory.glob("step-*") if path.is_dir()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _point(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to its sibling `target`, in one move."""
    fresh = link.with_name(f".{link.name}.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.name)
    fresh.replace(link)
