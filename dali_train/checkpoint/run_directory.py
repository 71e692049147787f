"""A run directory: its files, parsed, and its checkpoints by name. This needs no torch.

Checkpoints are real directories named ``step-NNNNNNNN`` in ``checkpoints``. Anything else there, such as copies, links
and files, is foreign: it is not read and never removed, at most renamed if it is in the way. Files may be torn or
foreign and are checked before use.
"""

import errno
import itertools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dali_train.config import Config
from dali_train.config.check import Extra
from dali_train.config.config import config_from_json
from dali_train.errors import ConfigError
from dali_train.files import (
    NO_SYMLINKS,
    ForeignFileError,
    is_still_open,
    json_field,
    read_json,
    read_limited,
    rename_to_free,
    write_atomically,
)
from dali_train.runtime.object_store import is_remote
from dali_train.runtime.status import METRICS, Event, read_events

LIBRARIES = ("torch", "timm", "DALI", "nvImageCodec", "Pillow", "NumPy")
"""Whose versions decide pixels or numbers of a run: environment.json has them, in lower case. See docs/exactness.md."""

MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.json.sha256"
SCORE = "evaluation.json"
MIRRORED_RUN = Extra[Callable[[str, str | None], AbstractContextManager[Path]]](
    "dali_train.extras.mirror.mirror:downloaded", "the URL of a run"
)
ALL_CHECKPOINTS = "all"
_NAME = re.compile(r"step-(\d{8,18})")
_OWN_FILES = re.compile(r"manifest\.json(\.sha256)?|evaluation\.json|[\w.-]+\.safetensors|\..*\.partial")
_LARGEST_FILE = 10_000_000
_COUNTS = {"draws", "host_cores", "compute_threads", "decoding_threads", "ranks_on_host", "world_size"}


@contextmanager
def local_run(run: Path | str, checkpoint: str | None = None) -> Iterator[Path]:
    """Yield the directory of `run`: for the URL of a mirror, a temporary copy of its small files and of one checkpoint.

    Args:
        checkpoint: as for `resolve_checkpoint`: ``best``, ``newest`` or ``step-NNNNNNNN``; or `ALL_CHECKPOINTS`: those
            that the mirror has, the newest and the best ones.

    Raises:
        ConfigError: the URL is not a run's mirror, or it has no such checkpoint.
        CheckpointError: the checkpoint is damaged, or all are.
        ObjectStoreError: the store refuses, or does not answer.
    """
    if not is_remote(str(run)):
        yield Path(run)
        return
    with MIRRORED_RUN.load()(str(run), checkpoint) as directory:
        yield directory


@dataclass(frozen=True, eq=False)
class RunDirectory:
    """The files of a run, parsed, each read on first use.

    Raises:
        ConfigError: there is no such run, or a file is not what a run writes; the message names the file and a remedy.
    """

    directory: Path

    def __post_init__(self) -> None:
        if not (self.directory / "config.json").exists():
            reason = "it has no config.json" if self.directory.is_dir() else "no such directory"
            raise ConfigError(f"{self.directory} is not a run directory: {reason}; use the run.dir of a run")

    @cached_property
    def config(self) -> Config:
        """The run's settings, without user hooks, which are not needed any more."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*hooks.user")
            config = config_from_json(self._read("config.json"), str(self.directory / "config.json"))
        root = self._root_from_here(config)
        return config if root is None else config.replace({"data.root": str(root)})

    def _root_from_here(self, config: Config) -> Path | None:
        """Return where the dataset is if data.root is relative to the directory that the run was started in, and this
        process works in another one: run.dir is relative to the same directory. None: data.root is right as it is."""
        own, root = Path(config.run.dir), Path(config.data.root)
        if is_remote(config.data.root) or own.is_absolute() or root.is_absolute() or root.exists():
            return None
        here = self.directory.resolve()
        if here.parts[-len(own.parts) :] != own.parts:
            return None
        there = Path(*here.parts[: -len(own.parts)], root)
        return there if there.exists() else None

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The content of environment.json, with checked types; empty if there is no such file."""
        path = self.directory / "environment.json"
        try:
            facts = read_json(path, _LARGEST_FILE)
            for name in _COUNTS & facts.keys():
                json_field(facts, name, int)
        except FileNotFoundError:
            return {}
        except ForeignFileError as error:
            raise ConfigError(f"{path} is not what a run writes ({error}): move it away") from None
        return facts

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events of metrics.jsonl, without foreign lines; empty if there is no such file."""
        try:
            return tuple(read_events(self.directory / METRICS, self.foreign_lines))
        except OSError as error:
            raise ConfigError(f"{self.directory / 'metrics.jsonl'} cannot be read: {error.strerror}") from None

    @cached_property
    def foreign_lines(self) -> list[str]:
        """A sentence on each line of metrics.jsonl that is damaged, once `events` are read."""
        return []

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config's values by full name, see `Config.flat`."""
        return self.config.flat()

    def _read(self, name: str) -> bytes:
        path = self.directory / name
        try:
            return read_limited(path, _LARGEST_FILE)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; put the run's own file there") from None


def checkpoint_paths(directory: Path) -> list[Path]:
    """Return the checkpoints by step, oldest first; none if the directory does not exist yet.

    Raises:
        ConfigError: the directory cannot be listed.
    """
    try:
        with os.scandir(directory) as entries:
            names = [
                entry.name for entry in entries if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        for link in (directory, *directory.parents):
            if link.is_symlink() and not link.exists():
                raise ConfigError(
                    f"{link} is a link to {link.readlink()}, which does not exist: make it available (is a disk not "
                    "mounted?), so that the run's checkpoints are not taken for lost, or choose another run.dir"
                ) from None
        return []
    except OSError as error:
        raise ConfigError(
            f"the checkpoints in {directory} cannot be listed ({error.strerror}): make it a readable directory, or "
            "choose another run.dir"
        ) from None
    return sorted((directory / name for name in names), key=step_of)


def is_unfinished(path: Path) -> bool:
    """Return whether a name is that of a checkpoint that is being written, fetched or removed, or that a killed run
    left in this state."""
    return re.fullmatch(r"\.step-\d{8,18}\.(partial|removed\d*|copy)", path.name) is not None


def foreign_files(path: Path) -> list[str]:
    """Return the names in a checkpoint's directory that no run writes there."""
    names = [child.name for child in path.iterdir() if not _OWN_FILES.fullmatch(child.name) or child.is_dir()]
    return sorted(name for name in names if not is_still_open(name))


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name, -1 if it has another name."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else -1


def saved_top1(path: Path) -> float | None:
    """Return the accuracy of a checkpoint, a fraction, if it was evaluated.

    It is in a file beside the manifest, since it comes later. A file with anything else counts as no accuracy.

    Raises:
        OSError: the file cannot be read, so the accuracy is unknown.
    """
    return _saved(path, "top1")


def saved_score(path: Path) -> float | None:
    """Return the number by which checkpoints are ranked, the best one's is the largest: by default the accuracy.

    Raises:
        OSError: see `saved_top1`.
    """
    score = _saved(path, "score")
    return saved_top1(path) if score is None else score


def _saved(path: Path, name: str) -> float | None:
    try:
        return json_field(read_json(path / SCORE, 1000), name, float)
    except FileNotFoundError:
        return None
    except ForeignFileError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno != errno.EINVAL:
            raise error.__cause__ from None
        return None


def record_top1(path: Path, top1: float, score: float | None = None) -> None:
    """Write the accuracy of a checkpoint, a fraction, beside it, and its `score`, if that is another number."""
    values = {"top1": top1} if score in (None, top1) else {"top1": top1, "score": score}
    write_atomically(path / SCORE, (json.dumps(values) + "\n").encode())


def wrong_path(path: Path) -> str:
    """Return why `path` cannot be a checkpoint, with the remedy; empty if it may be one."""
    try:
        for inner in ("newest", "checkpoints/newest"):
            if not (path / MANIFEST).exists() and (path / inner).exists():
                return f"{path} is not a checkpoint: did you mean {path / inner}?"
        if path.is_dir():
            return ""
        if path.exists():
            return f"{path} is not a directory: name that of a checkpoint, such as RUN/checkpoints/newest"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}): use a readable path"
    return (
        f"{path}: no such directory; a checkpoint is named like RUN/checkpoints/newest or RUN/checkpoints/step-00001000"
    )


_MARKS = ("best", "newest")


def _marked(directory: Path, which: str) -> Path | None:
    """Return the checkpoint in `directory` that the link ``best`` or ``newest`` there points to, or would point to on a
    file system that has links; None if there is none."""
    if (directory / which).is_dir():
        return (directory / which).resolve()
    paths = checkpoint_paths(directory)
    try:
        marked = best_first(paths)[:1] if which == "best" else paths[-1:]
    except OSError:  # a score that cannot be read
        return None
    return marked[0].resolve() if marked else None


def without_link(path: Path) -> Path:
    """Return the checkpoint that ``CHECKPOINTS/newest`` and ``CHECKPOINTS/best`` mean on a file system that has no
    links; every other path as it is."""
    if path.name not in _MARKS or os.path.lexists(path):
        return path
    return _marked(path.parent, path.name) or path


def best_first(paths: list[Path]) -> list[Path]:
    """Return those of the checkpoints that have a score, best first. Raises OSError: a score cannot be read."""
    scores = {path: score for path in paths if (score := saved_score(path)) is not None}
    return sorted(scores, key=lambda path: (scores[path], path), reverse=True)


def resolve_checkpoint(run_dir: Path, which: str | None = None) -> Path:
    """Return the path of a run's checkpoint: ``best``, ``newest``, a name in its checkpoints directory, or any path.

    None: the best one, or the newest if none was evaluated.

    Raises:
        ConfigError: the checkpoint does not exist.
    """
    directory = run_dir / "checkpoints"
    if which is None:
        which = "best" if _marked(directory, "best") is not None else "newest"
    if which in _MARKS:
        marked = _marked(directory, which)
        if marked is None:
            if not run_dir.is_dir():
                raise ConfigError(f"{run_dir}: no such directory; name that of a run")
            reason = "no evaluation was saved" if _marked(directory, "newest") is not None else "it has no checkpoints"
            raise ConfigError(f"{run_dir} has no {which} checkpoint: {reason}")
        return marked
    inside = directory / which
    path = inside if not Path(which).exists() and inside.is_dir() else Path(which)
    path = without_link(path)
    if problem := wrong_path(path):
        raise ConfigError(problem)
    return path.resolve()


def named_checkpoint(path: Path, field: str) -> Path:
    """Return the checkpoint of a directory: itself, or for a run its best one, or the newest.

    Raises:
        ConfigError: it is neither a checkpoint nor a run that has one; the message names the setting `field`.
    """
    try:
        path = without_link(path)
        return path.resolve() if (path / MANIFEST).exists() else resolve_checkpoint(path)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None


def set_aside(path: Path) -> None:
    """Rename whatever is at `path`, without following links."""
    rename_to_free(path, (f"set-aside-{number}-{path.name}" for number in itertools.count(1)))


def point_link(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to its sibling `target`, atomically. File systems without links do without:
    `resolve_checkpoint` finds the same checkpoint by its name and score."""
    fresh = link.with_name(f".{link.name}.partial")
    for path in (link, fresh):
        if os.path.lexists(path) and not path.is_symlink():  # such as what a copy that follows links has made of it
            set_aside(path)
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target.name)
    except OSError as error:
        if error.errno in NO_SYMLINKS:
            return
        raise
    fresh.replace(link)
