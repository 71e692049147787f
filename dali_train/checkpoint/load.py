"""Reading checkpoints: they are verified by checksum, and no code in them is executed."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dali_train.checkpoint.directory import checkpoint_paths, step_of, wrong_path
from dali_train.checkpoint.storage import (
    CheckpointError,
    CheckpointManifest,
    DamagedError,
    Tensors,
    read_safetensors,
    saved_value,
)
from dali_train.checkpoint.transfer import at_hand
from dali_train.errors import ConfigError
from dali_train.runtime.process_group import first_fault, on_rank_0

# DCP's warning in a single process, where it is used on purpose.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint.

    `state` maps "model" and "optimizer" to tensors by name, complete and on the CPU; `values` is what is not a tensor.
    """

    path: Path
    step: int  # optimizer steps done
    state: dict[str, Tensors]
    values: dict[str, Any]

    def value(self, name: str) -> Any:
        """Return one of the values that every run writes. Raises CheckpointError: it is missing."""
        return saved_value(self.values, name, self.path)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint on the CPU, in this process only.

    Raises:
        ConfigError: the path is not a checkpoint's.
        DamagedError: a file is missing, or has another checksum.
        CheckpointError: it cannot be read for another reason, or holds more than tensors and plain values.
    """
    if problem := wrong_path(path):
        raise ConfigError(problem)
    try:
        manifest = CheckpointManifest.read(path)
        named = step_of(path.resolve())
        if named not in (-1, manifest.step):
            raise DamagedError(f"{path} is the checkpoint of step {manifest.step} under another name")
        manifest.verify(path)
        state: dict[str, Tensors] = {}
        for name, tensor in read_safetensors(path, set(manifest.files)).items():
            section, _, rest = name.partition(".")
            state.setdefault(section, {})[rest] = tensor
        return Checkpoint(path, manifest.step, state, manifest.values)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is DCP's, around errors of any kind
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next((cause for cause, _ in error.failures.values()), error)
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise CheckpointError(
            f"{path} cannot be read ({type(cause).__name__}: {cause}), which does not mean that it is damaged: start "
            "again when that is mended, or move it away to resume from an older one"
        ) from error


def load_newest(directory: Path, group: dist.ProcessGroup | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete checkpoint, if any, and a warning for each newer one that was skipped.

    With a `group` all its ranks call this together and get the same one, which every rank could read.

    Raises:
        ConfigError: the directory cannot be listed.
        CheckpointError: the newest that is not damaged cannot be read, or all are damaged.
    """
    faults: list[str] = []
    for path in reversed(_agreed_paths(directory, group)):
        checkpoint, fault, is_damaged = _try_to_load(path, group)
        if checkpoint is not None:
            return checkpoint, [f"{fault}; resuming from {path} instead" for fault in faults]
        if not is_damaged:
            raise CheckpointError(fault)
        faults.append(fault)
    if faults:
        raise CheckpointError(
            f"no checkpoint in {directory} is complete: {'; '.join(faults)}. Restore one from a copy, or choose "
            "another run.dir to start at step 0"
        )
    return None, []


def find_checkpoint(
    resume: str, directory: Path, group: dist.ProcessGroup | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that run.resume names (``auto``, ``never`` or a path), and warnings, for all of `group`.

    With the path of another run's checkpoint this run starts from it; once it has its own checkpoints it resumes from
    those, so that the same command can start it again.

    Raises:
        CheckpointError: the named one is damaged.
        ConfigError: ``never``, but the run directory has checkpoints; a path that is not a checkpoint's; checkpoints
            that cannot be listed.
    """
    if resume == "auto":
        return load_newest(directory, group)
    existing = _agreed_paths(directory, group)
    if resume == "never":
        if existing:
            raise ConfigError(
                f"run.resume is never, but {directory} has {len(existing)} checkpoints: choose another run.dir, or "
                "set run.resume auto to resume from the newest"
            )
        return None, []
    named = Path(resume)
    if problem := on_rank_0(lambda: wrong_path(named), group):
        remedy = "; set run.resume auto to resume from this run's newest checkpoint" if existing else ""
        raise ConfigError(f"run.resume: {problem}{remedy}")
    if existing and named.resolve().parent != directory.resolve():
        checkpoint, warnings = load_newest(directory, group)
        ignored = f"run.resume {named} is not used, because this run has checkpoints: resuming from its newest one"
        return checkpoint, [f"{ignored}. Choose another run.dir to start from {named} again", *warnings]
    checkpoint, fault, _ = _try_to_load(named, group)
    if checkpoint is None:
        raise CheckpointError(fault)
    return checkpoint, []


def _try_to_load(path: Path, group: dist.ProcessGroup | None) -> tuple[Checkpoint | None, str, bool]:
    """Return the checkpoint if every rank can read it; else None, the error of the first rank that cannot, and whether
    the checkpoint is damaged."""
    checkpoint, fault, is_damaged = None, "", True
    with at_hand(path, group) as directory:
        try:
            checkpoint = replace(load_checkpoint(directory), path=path)
        except (CheckpointError, ConfigError) as error:
            fault, is_damaged = str(error), isinstance(error, DamagedError)
        undecided, rank = first_fault("" if is_damaged else fault, group)
        if undecided:
            fault = undecided
        else:
            fault, rank = first_fault(fault, group)
    if fault and group is not None:
        fault = f"{fault} (seen by rank {rank})"
    return (None if fault else checkpoint), fault, not undecided


def _agreed_paths(directory: Path, group: dist.ProcessGroup | None) -> list[Path]:
    """Return the checkpoints as rank 0 sees them, because other hosts may see changes later."""
    return on_rank_0(lambda: checkpoint_paths(directory), group)
