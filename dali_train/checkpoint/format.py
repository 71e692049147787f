"""Checkpoints on disk: tensors as safetensors, everything else in a JSON manifest, neither of which holds code.

Ranks write and read through DCP (``torch.distributed.checkpoint``): each writes its shards, and any other layout of
ranks can read them. DCP does not detect flipped bits, so each file's SHA-256 is in the manifest, and the manifest's own
is in a file next to it. All are verified before anything is read.

Hosts that do not share the run directory send their files, so that rank 0's disk has all of them, and get a copy to
read from (`collect`, `local_copy_of`). All ranks of a group call these functions together. If all of them see rank 0's
disk, nothing is sent.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
import uuid
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dali_train.checkpoint.fingerprint import EvaluationDigests, WeightDigests
from dali_train.checkpoint.run_directory import (
    MANIFEST,
    MANIFEST_DIGEST,
    checkpoint_paths,
    step_of,
    without_link,
    wrong_path,
)
from dali_train.config.check import Rule, from_json
from dali_train.errors import ConfigError, RunError
from dali_train.files import (
    ForeignFileError,
    json_field,
    read_json,
    read_limited,
    sha256,
    sync_directory,
    write_atomically,
)
from dali_train.runtime.process_group import first_fault, on_rank_0
from dali_train.text import shortened

# DCP's warning in a single process, where it is used on purpose.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)

FORMAT = 1  # of manifest and files; the next one gets the next number
MAX_MANIFEST_BYTES = 64 << 20  # a million class names are half of it

Tensors = dict[str, torch.Tensor]
Probabilities = Literal["softmax", "sigmoid"]


class CheckpointError(RunError):
    """A checkpoint that cannot be used; the message names the file."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, or is not what was written: an older checkpoint is used instead. Another
    failure to read it, such as a disk error, is no evidence of damage."""


@dataclass(frozen=True, kw_only=True)
class OptimizerValues:
    """The state of an optimizer that is not tensors."""

    kind: str  # the name of its class, "class" in the manifest
    groups: tuple[dict[str, float | bool], ...] = ()  # what each group keeps besides settings, such as counts of steps
    numbers: dict[str, float | bool] = field(default_factory=dict)  # state.PARAMETER.KEY -> number


@dataclass(frozen=True, kw_only=True)
class RunValues:
    """What a checkpoint holds besides tensors: all that a run knows of its past, by the names in the manifest.

    A value that the version which wrote a manifest did not know has its default.
    """

    recipe: dict[str, Any] = field(default_factory=dict)  # see recipe.py
    class_names: tuple[str, ...] = ()
    applies_orientation: bool = False  # of the images, see `Manifest.applies_orientation`
    several_labels: bool = False  # whether an image may have several
    epoch_accuracies: tuple[float, ...] = ()  # top-1 of the evaluations before this step, fractions
    record: Annotated[str, Rule("a record", pattern="(?:[0-9a-f]{64})?")] = ""  # the fingerprint, see there
    weights: WeightDigests = field(default_factory=dict)
    evaluations: EvaluationDigests = field(default_factory=dict)  # before this step
    dropout: Literal["block", "micro-batch"] | None = None  # see invariant.py
    optimizer: OptimizerValues | None = None
    scaler: dict[str, float] = field(default_factory=dict)  # of the loss, torch's

    @property
    def probabilities(self) -> Probabilities:
        """The function that turns logits into probabilities."""
        return "sigmoid" if self.several_labels else "softmax"


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The content of a checkpoint besides the tensors."""

    step: int  # optimizer steps done
    values: RunValues
    files: dict[str, str]  # SHA-256 in hexadecimal by plain file name
    format: int = FORMAT

    @classmethod
    def read(cls, directory: Path) -> "CheckpointManifest":
        """Read and check the manifest of the checkpoint in `directory`.

        Raises:
            OSError: it cannot be read.
            DamagedError: a file is missing, or damaged.
            CheckpointError: the manifest has another format, or a value that no run writes.
        """
        path = directory / MANIFEST
        with missing_is_damage():
            content = read_limited(path, MAX_MANIFEST_BYTES)
            digest = read_limited(directory / MANIFEST_DIGEST, 1000)
        if digest != _digest_line(content):
            raise DamagedError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST_DIGEST}")
        return parse_manifest(content, str(path))

    def write(self, directory: Path) -> None:
        """Write and flush the manifest and the directory entry."""
        fields = asdict(self)
        optimizer = fields["values"]["optimizer"]
        if optimizer is not None:
            optimizer["class"] = optimizer.pop("kind")
        content = (json.dumps(fields, indent=1) + "\n").encode()
        write_atomically(directory / MANIFEST, content)
        write_atomically(directory / MANIFEST_DIGEST, _digest_line(content))
        sync_directory(directory)

    def verify(self, directory: Path) -> None:
        """Compare all files with their checksums.

        Raises:
            OSError: a file cannot be read.
            DamagedError: a file is missing or damaged.
        """
        for name, digest in self.files.items():
            with missing_is_damage():
                actual = sha256(directory / name)
            if actual != digest:
                raise DamagedError(f"{directory / name} is damaged: its SHA-256 is not the one in {MANIFEST}")


def parse_manifest(content: bytes, name: str) -> CheckpointManifest:
    """Return the manifest that `content` is, with checked types.

    Raises:
        CheckpointError: it has another format, or a value that no run writes; the message has the file's `name`.
    """
    try:
        fields = read_json(content, MAX_MANIFEST_BYTES, name="it", non_finite=True)
        if fields.get("format") != FORMAT:
            other = shortened(repr(fields.get("format")), 100)
            raise ForeignFileError(
                f"its format is {other} and this version reads {FORMAT}, so resume with the version that wrote it, or "
                "choose another run.dir to start at step 0"
            )
        step = json_field(fields, "step", int)
        values = json_field(fields, "values", dict)
        files = json_field(fields, "files", dict)
        if not 0 <= step < 10**15:
            raise ForeignFileError(f"step is {step} instead of a number of steps")
        optimizer = values.get("optimizer")
        if isinstance(optimizer, dict) and "class" in optimizer:
            optimizer["kind"] = optimizer.pop("class")
        try:
            run_values = from_json(RunValues, values)
        except ConfigError as error:
            raise ForeignFileError(f"values: {error}") from None
        _check_digests(run_values)
        if not 0 < len(files) < 10**6:
            raise ForeignFileError(f"files has {len(files)} names")
        for file in files:
            if re.fullmatch(r"[\w-][\w.-]*", file) is None:
                raise ForeignFileError(f"files: {shortened(repr(file), 100)} is not a plain file name")
            if not _is_sha256(json_field(files, file, str)):
                raise ForeignFileError(f"files.{file} is not a SHA-256")
    except ForeignFileError as error:
        raise CheckpointError(f"{name} cannot be read as the manifest of a checkpoint: {error}") from None
    return CheckpointManifest(step=step, values=run_values, files=files)


def _check_digests(values: RunValues) -> None:
    """Raises ForeignFileError: the digest of weights or of an evaluation is missing, or is none."""
    for step, digests in values.weights.items():
        if not step.isdecimal() or "model" not in digests or not all(map(_is_sha256, digests.values())):
            raise ForeignFileError(f"values.weights has no digest of the weights of step {shortened(step, 100)}")
    for step, digest in values.evaluations.items():
        if not step.isdecimal() or not _is_sha256(digest):
            raise ForeignFileError(f"values.evaluations has no digest of step {shortened(step, 100)}")


def _is_sha256(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", text) is not None


@contextmanager
def missing_is_damage() -> Iterator[None]:
    """Turn an OSError into DamagedError if the file is missing, or if its name belongs to something else."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL):
            raise DamagedError(f"{error.filename} is missing or damaged: {error.strerror}") from None
        raise


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


def read_safetensors(directory: Path, names: set[str], section: str = "") -> Tensors:
    """Return all tensors in the safetensors files of these `names`, or those of one `section`, complete and on the CPU.

    Any layout of ranks may have written them.

    Raises:
        DamagedError: there are safetensors files of other names.
        CheckpointError: a tensor lacks a part.
    """
    if foreign := {path.name for path in directory.glob("*.safetensors")} - names:
        raise DamagedError(
            f"{directory / min(foreign)} does not belong to this checkpoint: {MANIFEST} does not name it"
        )
    reader = dcp.HuggingFaceStorageReader(str(directory))
    tensors: Tensors = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if not name.startswith(section and f"{section}."):
            continue
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


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint.

    `state` maps "model" and "optimizer" to tensors by name, complete and on the CPU; `values` is what is not a tensor.
    """

    path: Path
    step: int  # optimizer steps done
    state: dict[str, Tensors]
    values: RunValues


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint on the CPU, in this process only.

    Raises:
        ConfigError: the path is not a checkpoint's.
        DamagedError: a file is missing, or has another checksum.
        CheckpointError: it cannot be read for another reason, or holds more than tensors and plain values.
    """
    path = without_link(path)
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
            f"{path} cannot be read ({type(cause).__name__}: {cause}), which does not mean that it is damaged: fix "
            "the cause and start again, or move it away to resume from an older one"
        ) from error


def load_chosen(path: Path) -> Checkpoint:
    """Load the checkpoint named on the command line; unlike `load_newest`, never fall back to another."""
    try:
        return load_checkpoint(path)
    except DamagedError as error:
        raise CheckpointError(f"{error}: choose another one with --checkpoint, or restore it from a copy") from error


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
    named = without_link(Path(resume))
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
    checkpoint = None
    fault = ""
    is_damaged = True
    with local_copy_of(path, group) as directory:
        try:
            checkpoint = replace(load_checkpoint(directory), path=path)
        except (CheckpointError, ConfigError) as error:
            fault = str(error)
            is_damaged = isinstance(error, DamagedError)
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


_VISIBILITY_TIMEOUT_S = 5.0  # a network file system may show a new file to other hosts later
_CHUNK = 64 << 20  # bytes


def ranks_without_shared_disk(directory: Path, group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks that do not see what rank 0 writes into `directory`."""
    if group is None:
        return []
    probe = directory / f".probe-{on_rank_0(lambda: uuid.uuid4().hex, group)}"
    on_rank_0(probe.touch, group)
    end = time.monotonic() + _VISIBILITY_TIMEOUT_S
    while not probe.exists() and time.monotonic() < end:
        time.sleep(0.1)
    seen = [False] * dist.get_world_size(group)
    dist.all_gather_object(seen, probe.exists(), group=group)
    on_rank_0(probe.unlink, group)
    return [rank for rank, sees in enumerate(seen) if not sees]


def collect(
    directory: Path, names: Sequence[Collection[str]], apart: Sequence[int], group: dist.ProcessGroup | None
) -> None:
    """Move the files `names` (by rank) of the ranks `apart` from their `directory` to rank 0's."""
    for rank in apart:
        for name in sorted(names[rank]):
            _send(directory / name, source=rank, target=0, group=group)
        if dist.get_rank(group) == rank:
            for name in names[rank]:
                (directory / name).unlink()
            with suppress(OSError):  # another rank of this host still has files there
                directory.rmdir()


@contextmanager
def local_copy_of(path: Path, group: dist.ProcessGroup | None) -> Iterator[Path]:
    """Yield the directory of the checkpoint `path`, or of a temporary copy on hosts that do not see rank 0's."""
    if group is None:
        yield path
        return
    rank = dist.get_rank(group)
    views = [("", "")] * dist.get_world_size(group)  # where a rank looks, and the digest of what it sees there
    dist.all_gather_object(views, (f"{socket.gethostname()} {path.absolute()}", _digest(path)), group=group)
    wanted = views[0][1]
    fetching: dict[str, int] = {}  # one rank for each host
    for other, (directory, digest) in enumerate(views):
        if digest != wanted != "":
            fetching.setdefault(directory, other)
    if not fetching:
        yield path
        return
    copy = path.with_name(f".{path.name}.copy")
    names = on_rank_0(lambda: sorted(child.name for child in path.iterdir() if child.is_file()), group)
    fetches = rank in fetching.values()
    if fetches:
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True, exist_ok=True)
    try:
        for target in fetching.values():
            for name in names:
                _send(path / name, source=0, target=target, group=group, received=copy / name)
        dist.barrier(group)
        yield path if views[rank][1] == wanted else copy
    finally:
        if fetches:
            shutil.rmtree(copy, ignore_errors=True)


def _digest(path: Path) -> str:
    try:
        return sha256(path / MANIFEST)
    except OSError:
        return ""


def _send(
    path: Path, *, source: int, target: int, group: dist.ProcessGroup | None, received: Path | None = None
) -> None:
    """Send a file from rank `source` to `target`, where it is stored as `received`, by default under the same path.

    Other ranks do nothing."""
    rank = dist.get_rank(group)
    if rank == source:
        dist.send(torch.tensor([path.stat().st_size]), target, group=group)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                dist.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), target, group=group)
    elif rank == target:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=group)
        with (received or path).open("wb") as file:
            while left := int(size) - file.tell():
                part = torch.empty(min(left, _CHUNK), dtype=torch.uint8)
                dist.recv(part, source, group=group)
                file.write(part.numpy().data)
            file.flush()
            os.fsync(file.fileno())
