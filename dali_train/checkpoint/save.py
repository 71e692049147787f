"""Writing checkpoints: by all ranks in the background, atomically, with checksums, safe to read.

``step-NNNNNNNN/`` holds tensors as safetensors, under their names in the model, so that a run with another layout of
ranks can read them; everything else is in ``manifest.json``. The directory gets its final name only when all of it is
on disk, so a directory without ``.partial`` is complete. The only position is the step number: order, draws and dropout
follow from it (the invariant).
"""

import itertools
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from dali_train.checkpoint.fingerprint import WeightDigests, weights_digest
from dali_train.checkpoint.format import (
    CheckpointError,
    CheckpointManifest,
    RunValues,
    Tensors,
    Writer,
    collect,
    ranks_without_shared_disk,
    read_safetensors,
)
from dali_train.checkpoint.run_directory import (
    best_first,
    checkpoint_paths,
    foreign_files,
    is_unfinished,
    point_link,
    record_top1,
    set_aside,
    step_of,
)
from dali_train.files import NO_SPACE, remove_tree, rename_to_free, sync_directory
from dali_train.parallel.mesh import in_blocks, local
from dali_train.runtime.process_group import on_rank_0
from dali_train.text import plural
from dali_train.training.build import RunPlan

logger = logging.getLogger("dali_train")

# More writers do not make a file system faster, and each holds its share in host memory.
_MAX_WRITERS = 8


class CheckpointWriter:
    """Saves in the background; every rank has one and calls it at the same steps.

    Args:
        group: all ranks, for host memory, not used for anything else; None for a single process.
        keep: how many of the newest checkpoints to keep, besides the `keep_best` best ones.
        num_stages: stages of the pipeline, with equally many adjacent ranks; the ranks of a stage have tensors of the
            same names.
        weights: the digests of the weights in earlier checkpoints of the run, also of those that are gone. Every
            checkpoint has them, with its own, which is added to them on rank 0.
    """

    def __init__(
        self,
        directory: Path,
        group: dist.ProcessGroup | None,
        *,
        keep: int,
        keep_best: int = 1,
        num_stages: int = 1,
        weights: WeightDigests | None = None,
    ) -> None:
        self._directory = directory
        self._group = group
        self._rank, self._world_size = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
        self._num_stages = num_stages
        self._apart: list[int] = []
        self.held: set[str] = set()  # names of checkpoints that are being read and must not be removed
        self._keep, self._keep_best = keep, keep_best
        self._weights = weights if weights is not None else {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._host: Tensors = {}
        self._num_bytes = 0

    @classmethod
    def of(cls, plan: RunPlan, group: dist.ProcessGroup | None, weights: WeightDigests) -> "CheckpointWriter":
        return cls(
            plan.directory / "checkpoints",
            group,
            keep=plan.config.run.keep_checkpoints,
            keep_best=plan.config.run.keep_best,
            num_stages=plan.layout.pipeline,
            weights=weights,
        )

    def prepare(self, start_step: int) -> None:
        """Prepare the directory, on all ranks.

        This removes incomplete checkpoints of a killed run, and sets aside those after `start_step`, which are damaged,
        or were abandoned by resuming from an earlier step.

        Raises:
            CheckpointError: the directory is not writable.
        """
        try:
            on_rank_0(lambda: self._tidy(start_step), self._group)
            self._apart = ranks_without_shared_disk(self._directory, self._group)
        except OSError as error:
            raise CheckpointError(f"cannot keep checkpoints in {self._directory}: {error}") from error
        if self._apart:
            logger.info(
                "run.dir is not on a disk that all hosts share: %s of %d send their part of each checkpoint to rank 0. "
                "With run.mirror the run also survives the loss of its host",
                *(plural(len(self._apart), "rank"), self._world_size),
            )

    def save(self, step: int, state: Mapping[str, Mapping[str, torch.Tensor]], values: RunValues) -> None:
        """Copy this rank's share of `state` to host memory, then write it in the background.

        A replicated tensor is written by one rank, a sharded one (DTensor) by all ranks that hold a shard. Waits for
        the previous save, if it is still running.

        Raises:
            CheckpointError: the previous save failed.
        """
        self.wait()
        flat = {
            f"{section}.{name}": in_blocks(tensor)
            for section, tensors in state.items()
            for name, tensor in tensors.items()
        }
        self._num_bytes = self._num_stages * sum(tensor.numel() * tensor.element_size() for tensor in flat.values())
        self._copy_to_host({name: flat[name] for name in self._share(flat)})
        # Not a daemon: a save is completed even if the main thread ends with an error.
        self._thread = threading.Thread(target=self._write, args=(step, values), name="checkpoint")
        self._thread.start()

    def record_top1(self, step: int, top1: float, score: float | None = None) -> None:
        """Record the accuracy of a checkpoint that was saved before it was evaluated. Waits for that save.

        Args:
            score: the number that ranks it, if that is not the accuracy; the best one's is the largest.

        Raises:
            CheckpointError: the save failed.
        """
        self.wait()
        path = self._directory / f"step-{step:08d}"
        if self._rank == 0 and path.is_dir():
            record_top1(path, top1, score)
            self._retire()

    def wait(self) -> None:
        """Wait until the last save is complete on disk. Raises CheckpointError: it failed; the message says why."""
        self.join()
        self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None
            raise CheckpointError(
                f"could not save a checkpoint in {self._directory}: {self._explain(error)}"
            ) from error

    def join(self) -> None:
        """Wait for the end of the last save, ignoring its errors, when the run has failed anyway."""
        if self._thread is not None:
            self._thread.join()

    def _share(self, flat: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names that this rank writes: similar sizes for some ranks of each stage, spread over all nodes."""
        sharded = [name for name, tensor in flat.items() if isinstance(tensor, DTensor)]
        ranks = self._world_size // self._num_stages
        writers = min(ranks, max(1, _MAX_WRITERS // self._num_stages))
        writer, off = divmod(self._rank % ranks, ranks // writers)
        if off or writer >= writers:
            return sharded
        by_size = sorted(flat.keys() - set(sharded), key=lambda name: (-flat[name].numel(), name))
        return sharded + by_size[writer::writers]

    def _copy_to_host(self, tensors: Tensors) -> None:
        for name in self._host.keys() - tensors.keys():
            del self._host[name]
        for name, tensor in tensors.items():
            part = local(tensor).detach()
            if name not in self._host:
                host = torch.empty_like(
                    part, device="cpu", pin_memory=part.is_cuda, memory_format=torch.contiguous_format
                )
                self._host[name] = (
                    DTensor(host, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else host
                )
            local(self._host[name]).copy_(part, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()

    def _write(self, step: int, values: RunValues) -> None:
        final = self._directory / f"step-{step:08d}"
        partial = self._directory / f".{final.name}.partial"
        try:
            writer = Writer(partial)
            dcp.save(dict(self._host), storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            digests = [writer.digests]
            if self._group is not None:
                digests = [{} for _ in range(self._world_size)]
                dist.all_gather_object(digests, writer.digests, group=self._group)
            collect(partial, digests, self._apart, self._group)
            files = {name: digest for part in digests for name, digest in part.items()}
            on_rank_0(lambda: self._commit(partial, final, step, values, files), self._group)
        except BaseException as fault:  # raised in the main thread, by wait()
            self._error = fault
        if self._error is not None and self._rank == 0:  # to free its space
            shutil.rmtree(partial, ignore_errors=True)

    def _commit(self, partial: Path, final: Path, step: int, values: RunValues, files: dict[str, str]) -> None:
        self._weights[str(step)] = {
            section: weights_digest({name.removeprefix(f"{section}."): tensor for name, tensor in tensors.items()})
            for section in ("model", "ema")
            if (tensors := read_safetensors(partial, set(files), section))
        }
        values = replace(values, weights=self._weights)
        CheckpointManifest(step=step, values=values, files=files).write(partial)
        if os.path.lexists(final):
            set_aside(final)
        partial.rename(final)
        sync_directory(self._directory)
        self._retire()

    def _retire(self) -> None:
        """Remove all checkpoints but the few best and newest, oldest first."""
        paths = checkpoint_paths(self._directory)
        point_link(self._directory / "newest", paths[-1])
        try:
            best = self._point_to_best(paths)
        except OSError as error:
            logger.warning("no checkpoint is removed, since the best one is not known: %s", error)
            return
        for path in paths[: -self._keep]:
            if path not in best[: self._keep_best] and path.name not in self.held:
                _remove(path)

    def _point_to_best(self, paths: list[Path]) -> list[Path]:
        """Return those of `paths` that have a score, best first. Raises OSError: a score cannot be read."""
        best = best_first(paths)
        if best:
            point_link(self._directory / "best", best[0])
        return best

    def _tidy(self, start_step: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for parent in self._directory.parents[:2]:  # which have the names of this directory and of the run's
            with suppress(PermissionError):
                sync_directory(parent)
        for rest in filter(is_unfinished, [*self._directory.iterdir()]):
            if rest.is_dir() and not rest.is_symlink():
                remove_tree(rest)
            else:
                set_aside(rest)
        paths = checkpoint_paths(self._directory)
        for path in paths:
            if step_of(path) > start_step:
                set_aside(path)
        if kept := [path for path in paths if step_of(path) <= start_step]:  # a killed run may not have come to it
            point_link(self._directory / "newest", kept[-1])
            self._point_to_best(kept)

    def _explain(self, error: BaseException) -> str:
        """Describe the root cause on each rank that has one, with the remedy if the disk is full."""
        failures = (
            {rank: cause for rank, (cause, _) in error.failures.items()}
            if isinstance(error, CheckpointException)
            else {}
        )
        causes = list(failures.values()) or [error]
        text = "; ".join(f"{cause} (rank {rank})" for rank, cause in failures.items()) or str(error)
        if any(isinstance(cause, OSError) and cause.errno in NO_SPACE for cause in causes):
            free = shutil.disk_usage(self._directory).free
            text += (
                f". A checkpoint needs {self._num_bytes / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free (a quota "
                "may allow less): free some space and start the same command again"
            )
        return text


def _remove(path: Path) -> None:
    """Remove a checkpoint; one with files that no run writes is set aside."""
    if foreign := foreign_files(path):
        set_aside(path)
        logger.warning("%s has %s, which no run wrote: it is kept under another name", path, foreign[0])
        return
    # Renamed first: a run killed here leaves no partial checkpoint. One of this step may not be gone yet.
    remove_tree(rename_to_free(path, (f".{path.name}.removed{number or ''}" for number in itertools.count())))
