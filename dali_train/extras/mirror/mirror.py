"""The copy of a run in an object store: rank 0 uploads complete checkpoints, metrics and the like in the background.

A checkpoint's files are in a folder named after its step and its manifest's SHA-256, which covers all of them. The
checkpoint is complete once ``mirror.json`` names it. That file also lists the folders that the run has begun to upload,
or has removed from its directory: only files in these are deleted.

Only the process that ``mirror.json`` names writes there, see `Claim`. Small files are replaced by compare-and-swap on
their versions, so a process that lost the mirror while suspended cannot replace what its successor has written. Large
files have no compare-and-swap, but no two contents: they are in the folder of a checkpoint, which determines them, and
so is ``model.safetensors``.
"""

import hashlib
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from dali_train.checkpoint.format import (
    MAX_MANIFEST_BYTES,
    CheckpointError,
    CheckpointManifest,
    DamagedError,
    parse_manifest,
)
from dali_train.checkpoint.recipe import check_recipe, recipe, saved_recipe
from dali_train.checkpoint.run_directory import (
    ALL_CHECKPOINTS,
    MANIFEST,
    MANIFEST_DIGEST,
    checkpoint_paths,
    local_run,
    point_link,
    record_top1,
    saved_score,
    saved_top1,
    set_aside,
    step_of,
)
from dali_train.config import Config
from dali_train.config.sections import RunConfig
from dali_train.data.dataset.index import read_manifest
from dali_train.data.progress import LINE_INTERVAL_S, Progress
from dali_train.errors import ConfigError, RunError
from dali_train.extras.mirror import claim
from dali_train.extras.mirror.claim import FOLDER, Checkpoints, Claim, Evaluation, complete_checkpoints
from dali_train.files import (
    ForeignFileError,
    json_field,
    open_regular,
    read_json,
    remove_tree,
    sha256,
    sync_directory,
    temporary_directory,
)
from dali_train.runtime.launch import Launch
from dali_train.runtime.object_store import (
    Bucket,
    ChangedObjectError,
    MissingObjectError,
    ObjectStoreError,
    Version,
    is_remote,
)
from dali_train.runtime.process_group import host_group, on_rank_0
from dali_train.runtime.status import METRICS
from dali_train.runtime.stop import StopReason, StopRequests
from dali_train.text import plural, shortened

logger = logging.getLogger("dali_train")

_SMALL_FILES = (
    *("config.json", "environment.json", METRICS, "status.json"),
    *("epoch_accuracies.json", "report/index.html"),
)
_LEDGER = "ledger"  # of hooks.ledger: a file for each epoch, which grows no more once the epoch has ended
_MODEL = "model.safetensors"
_CHECKPOINTS = "checkpoints"
_OWN_NAMES = re.compile(r"manifest\.json(\.sha256)?|[\w.-]+\.safetensors")  # what `_upload_checkpoint` writes
_NUM_VERSIONS = 5  # of a small file that are tried to be downloaded while a run replaces it
_LOOK_S = 5.0  # between two checks for new checkpoints
_IMPATIENT_S = 5.0  # in the background: failed uploads are retried at the next check
_FIRST_WARNING_S, _LONGEST_WARNING_S = 30.0, 600.0  # pauses between warnings about an unreachable store
_FAILED_S, _STALLED_S = 15.0, 60.0  # how long a run that failed waits for an upload; a finished one, without progress
_NO_LIMIT = timedelta(days=30)  # ranks wait for rank 0's transfers as long as those take
_MAX_HEADER_BYTES = 1 << 27  # of a file of weights; safetensors reads no more than 100 MB


class Mirror:
    """The mirror of one run.

    Raises:
        ConfigError: another run writes there.
        ObjectStoreError: the store refuses, or does not answer.
    """

    def __init__(self, run: RunConfig) -> None:
        assert run.mirror is not None
        self.grace_s: float | None = _FAILED_S
        """Seconds that `finish` may take, before the few of `close`; None: as long as there is progress."""
        self._directory, self._keep_best = Path(run.dir), run.keep_best
        self._bucket = Bucket(run.mirror)
        self._claim = Claim(self._bucket, say=partial(print, file=sys.stderr, flush=True))
        self._held: set[str] = set()
        self._sent: dict[str, tuple[int, int]] = {}  # object -> size and time of change of the file that it is
        self._versions: dict[str, Version | None] = {}  # of the small files, as this process knows them
        self._num_sent = self._num_completed = 0  # bytes, each once however many attempts sent it; objects
        self._furthest: tuple[str, int] = "", 0  # the object of the last attempts, and the bytes that any of them sent
        self._fault = ""  # of the last failed attempt
        self._next_warning, self._pause = 0.0, _FIRST_WARNING_S
        self._finishing, self._closing = threading.Event(), threading.Event()
        self._tasks: list[Future[None]] = [self._bucket.submit(self._renew_always)]

    def start(self, held: set[str]) -> None:
        """Start uploading. `held`: a set for the names of checkpoints that must not be removed during their upload."""
        self._held = held
        self._bucket.retry_s = _IMPATIENT_S
        self._tasks.append(self._bucket.submit(self._upload_always))

    def finish(self, asked: Callable[[], StopReason] = lambda: StopReason.NONE) -> str:
        """Upload all new files, and wait until they are uploaded. Return what is not, and why; empty if all are.

        Bytes sent again after a failed attempt do not count as progress.

        Args:
            asked: why to stop now, since the run was saved.
        """
        self._finishing.set()
        began = progressed = said = time.monotonic()
        progress = 0, 0
        while wait(self._tasks[1:], timeout=0.1).not_done:
            now = time.monotonic()
            if (self._num_sent, self._num_completed) != progress:
                progress, progressed = (self._num_sent, self._num_completed), now
            reason = asked()
            grace_s = min((s for s in (self.grace_s, reason.grace_s) if s is not None), default=None)
            if reason == StopReason.INTERRUPT:
                return self._missing("Ctrl-C ended the upload")
            if grace_s is None and now - progressed > _STALLED_S:
                return self._missing(f"no progress for {_STALLED_S:.0f} s")
            if grace_s is not None and now - began > grace_s:
                return self._missing(f"the upload took longer than {grace_s:.0f} s")
            if now - said > LINE_INTERVAL_S:
                said = now
                print(f"uploading to {self._bucket.url}: {self._num_sent / 1e6:,.0f} MB so far", file=sys.stderr)
        return ""

    def _missing(self, cause: str) -> str:
        try:
            local = self._local()
            folders = local.wanted - self._claim.checkpoints.keys()
            names = [f"checkpoint step-{_step(folder):08d}" for folder in sorted(folders)]
            files = self._files(local.paths)
            names += [path.name for name, path in files.items() if self._sent.get(name) != _version(path)]
        except (OSError, ConfigError) as error:
            names = [f"({error})"]
        fault = f" ({shortened(self._fault, 300)})" if self._fault else ""
        return (
            f"run.mirror: {self._bucket.url} lacks {plural(len(names), 'part')} of {self._directory}: "
            f"{', '.join(names) or 'its last record'}; {cause}{fault}. The run itself is saved: start the same command "
            "again to complete the mirror, nothing is trained twice"
        )

    def close(self) -> None:
        """End the uploads, and release the mirror. This never raises, so that it does not hide why the run ended."""
        self._finishing.set()
        self._closing.set()
        releasing = self._bucket.submit(self._claim.release)
        wait([*self._tasks, releasing], timeout=_IMPATIENT_S)
        if not releasing.done() or releasing.exception() is not None:
            logger.warning(
                "run.mirror: %s could not be released: the next start on another host waits %.0f s for it",
                *(self._bucket.url, claim.STALE_S),
            )

    # Download

    def restore(self, run: RunConfig, current: Callable[[], dict[str, Any]]) -> None:
        """Download the newest complete checkpoint, the best ones and the metrics, if the mirror is ahead of run.dir.

        Args:
            current: returns the recipe of this run, which is compared before anything is downloaded.

        Raises:
            ConfigError: run.resume is never, or the mirror has a run of another recipe.
            CheckpointError: there are checkpoints, but all of them are damaged.
        """
        folders = sorted(self._claim.checkpoints, key=_step, reverse=True)
        local = checkpoint_paths(self._directory / _CHECKPOINTS)
        if not folders:
            return
        if run.resume == "never":
            raise ConfigError(
                f"run.resume is never, but run.mirror {self._bucket.url} has checkpoints: choose another prefix, or "
                "set run.resume auto"
            )
        saved = next(filter(None, map(self._saved_recipe, folders)), None)
        if saved is not None:  # else all are damaged
            check_recipe(
                saved,
                current(),
                source=f"run.mirror {self._bucket.url}",
                remedy="choose another prefix as run.mirror",
                accept=run.accept_changed_recipe,
            )
        newest = step_of(local[-1]) if local else -1
        ahead = [folder for folder in folders if _step(folder) > newest]
        if not ahead or (local and run.resume != "auto"):
            return
        if local:
            logger.warning(
                "run.mirror: %s is at step %d and %s at step %d: resuming from the mirror's checkpoint",
                *(self._bucket.url, _step(ahead[0]), self._directory, newest),
            )
        # The newest comes last: with it the directory is not behind any more, and a start that was killed before has
        # the next one repeat this.
        wanted = _best(self._claim.checkpoints, self._keep_best)
        best = [one for one in wanted if one == ahead[0] or self._path(one).exists() or self._fetch(one)]
        self._fetch_metrics()
        _fetch_ledger(self._bucket, self._directory)
        fetched = next((one for one in ahead if self._path(one).exists() or self._fetch(one)), None)
        if fetched is None and not local:
            raise CheckpointError(
                f"no checkpoint in {self._bucket.url} is complete: choose another prefix as run.mirror to start at "
                "step 0"
            )
        if fetched is None:
            return
        point_link(self._directory / _CHECKPOINTS / "newest", self._path(fetched))
        if best and best[0] == wanted[0] and self._path(best[0]).exists():
            point_link(self._directory / _CHECKPOINTS / "best", self._path(best[0]))

    def _fetch_metrics(self) -> None:
        path, partial = self._directory / METRICS, self._directory / f".{METRICS}.partial"
        self._directory.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        if _fetch_file(self._bucket, METRICS, partial):
            if path.exists():
                set_aside(path)
            partial.replace(path)

    def _saved_recipe(self, folder: str) -> dict[str, Any] | None:
        """Return the recipe in a checkpoint's manifest; None if that is missing or damaged, which `_fetch` reports."""
        name = f"{_CHECKPOINTS}/{folder}/{MANIFEST}"
        try:
            if self._bucket.size(name) > MAX_MANIFEST_BYTES:
                return None
            content = self._bucket.read_all(name)
        except MissingObjectError:
            return None
        if _folder_of(content, _step(folder)) != folder:
            return None
        url = f"{self._bucket.url}/{name}"
        return saved_recipe(parse_manifest(content, url).values, url)

    def _fetch(self, folder: str) -> bool:
        """Download a checkpoint; False, with a warning, if it is not what was uploaded."""
        return _fetch(self._bucket, folder, self._claim.checkpoints[folder], self._path(folder))

    def _path(self, folder: str) -> Path:
        return self._directory / _CHECKPOINTS / f"step-{_step(folder):08d}"

    # Upload

    def _renew_always(self) -> None:
        while not self._closing.wait(claim.BEAT_S) and not self._claim.is_lost:
            try:
                self._claim.renew()
            except Exception as error:
                self._warn(error)

    def _upload_always(self) -> None:
        while not self._finishing.wait(_LOOK_S):
            self._attempt(last=False)
        while not self._attempt(last=True) and not self._closing.wait(1.0):
            pass

    def _attempt(self, *, last: bool) -> bool:
        """Upload all new files; return False if that failed and should be retried."""
        try:
            self._upload_new(last)
            self._pause, self._fault = _FIRST_WARNING_S, ""
            return True
        except (FileNotFoundError, ChangedObjectError):
            return False  # a checkpoint that the run has removed, or a version that another attempt has to ask for
        except Exception as error:
            self._fault = str(error)
            if not self._claim.is_lost:
                self._warn(error)
            return self._claim.is_lost

    def _warn(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._next_warning and not self._closing.is_set():
            self._next_warning, self._pause = now + self._pause, min(2 * self._pause, _LONGEST_WARNING_S)
            logger.warning("run.mirror: %s; the run continues, and the upload is retried", error)

    def _upload_new(self, last: bool) -> None:
        """Upload the newest checkpoint and the best ones, then the small files, and only then record them as complete;
        remove checkpoints that are no longer in the run directory.

        For example: the mirror has steps 4 and 6, and 4 is the best. The run has saved 8 and removed 6. Then 8 is
        uploaded, 4 and 8 are recorded as complete, and the files of 6 are deleted.
        """
        local = self._local()
        recorded = self._claim.checkpoints
        for folder in sorted(local.wanted - recorded.keys(), reverse=True):
            if not self._claim.renew(begun=[folder]):
                return
            self._upload_checkpoint(folder, local.paths[folder])
        complete = self._complete(local)
        if complete == recorded and self._sent and not last:  # no news
            return
        if not self._upload_small_files(local):
            return
        if self._claim.renew(complete):
            self._remove_unfinished()

    def _complete(self, local: "_Local") -> Checkpoints:
        """Return the checkpoints to record as complete: those of the run directory that the mirror has now."""
        recorded = self._claim.checkpoints
        complete = {
            folder: found for folder, found in local.evaluations.items() if folder in local.wanted or folder in recorded
        }
        return complete or recorded  # a run directory that lost its checkpoints costs the mirror none

    def _upload_small_files(self, local: "_Local") -> bool:
        """Return whether they were uploaded: False if another holder has the mirror."""
        files = self._files(local.paths)
        for name in files:
            if _is_replaced(name) and name not in self._versions:
                self._versions[name] = self._bucket.version(name)
        if not self._claim.renew():  # from here on none of these versions is another holder's
            return False
        for name, path in files.items():
            self._upload(name, path)
        return True

    def _local(self) -> "_Local":
        """Look through the run directory. Raises FileNotFoundError: a checkpoint was removed meanwhile."""
        paths = {}
        for path in checkpoint_paths(self._directory / _CHECKPOINTS):
            try:
                paths[_folder(path, step_of(path))] = path
            except FileNotFoundError:
                if not path.exists():
                    raise  # removed since it was listed, for a newer one, which this list may lack
        evaluations = {folder: _evaluation(path) for folder, path in paths.items()}
        return _Local(paths, evaluations, {*list(paths)[-1:], *_best(evaluations, self._keep_best)})

    def _files(self, checkpoints: Mapping[str, Path]) -> dict[str, Path]:
        """Return the files of the run directory beside its `checkpoints`, by the names of their objects.

        The final weights are in the folder of the checkpoint that they were made of: two processes that have trained to
        other weights do not write to one object.
        """
        names = [f"{_LEDGER}/{path.name}" for path in sorted((self._directory / _LEDGER).glob("*.npy"))]
        files = {name: self._directory / name for name in (*_SMALL_FILES, *filter(_is_of_ledger, names))}
        model = self._directory / _MODEL
        step = _step_of_model(model) if model.is_file() else None
        for folder, path in checkpoints.items():
            if step_of(path) == step:
                files[f"{_CHECKPOINTS}/{folder}/{_MODEL}"] = model
        return {name: path for name, path in files.items() if path.is_file()}

    def _upload_checkpoint(self, folder: str, path: Path) -> None:
        self._held.add(path.name)
        try:
            for name in (*CheckpointManifest.read(path).files, MANIFEST, MANIFEST_DIGEST):
                self._upload(f"{_CHECKPOINTS}/{folder}/{name}", path / name)
        finally:
            self._held.discard(path.name)

    def _upload(self, name: str, path: Path) -> None:
        """Upload a file, unless it is unchanged since its last upload. Raises FileNotFoundError: it is gone."""
        version = _version(path)
        if self._sent.get(name) == version:
            return
        if _is_replaced(name):  # a process that has lost the mirror meanwhile knows an older version
            self._note_position(name, 0)
            known = self._versions.pop(name)
            self._versions[name] = self._bucket.write(name, path.read_bytes(), new=known is None, replaced=known)
        else:
            self._bucket.upload(name, path, partial(self._note_position, name))
        self._note_position(name, version[0])
        self._num_completed += 1
        self._furthest = "", 0
        self._sent[name] = version

    def _note_position(self, name: str, position: int) -> None:
        if self._closing.is_set() or self._claim.is_lost:
            raise ObjectStoreError(f"{self._bucket.url}: the upload was aborted")
        furthest = self._furthest[1] if self._furthest[0] == name else 0
        if position >= furthest:
            self._num_sent += position - furthest
            self._furthest = name, position

    def _remove_unfinished(self) -> None:
        """Delete what this run uploaded to folders that it does not need; a file of anybody else there stays."""
        unfinished = {*self._claim.unfinished}
        if not unfinished:
            return
        doomed = []
        for name in self._bucket.sizes(f"{_CHECKPOINTS}/"):
            folder, _, file = name.removeprefix(f"{_CHECKPOINTS}/").partition("/")
            if folder in unfinished and _OWN_NAMES.fullmatch(file):
                doomed.append(name)
        if doomed:
            self._bucket.delete(doomed)
        for name in doomed:
            self._sent.pop(name, None)
        self._claim.removed(unfinished)


@dataclass(frozen=True)
class _Local:
    """The checkpoints in the run directory by the names of their folders in the mirror, oldest first."""

    paths: dict[str, Path]
    evaluations: Checkpoints
    wanted: set[str]  # the newest and the best, which a mirror needs


def _best(checkpoints: Mapping[str, Evaluation | None], count: int) -> list[str]:
    """Return the folders of the `count` best checkpoints, the best first, the later one of two that are equal."""
    scores = {folder: found.score for folder, found in checkpoints.items() if found is not None}
    return sorted(scores, key=lambda folder: (scores[folder], _step(folder)), reverse=True)[:count]


def _evaluation(path: Path) -> Evaluation | None:
    """Return what a checkpoint in the run directory was found to be worth. Raises OSError: it cannot be read."""
    top1, score = saved_top1(path), saved_score(path)
    return None if top1 is None or score is None else Evaluation(top1, score)


def _step_of_model(path: Path) -> int | None:
    """Return the step of the checkpoint that a file of final weights was made of; None: it is none of ours."""
    with open_regular(path) as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        header = file.read(min(num_bytes, _MAX_HEADER_BYTES))
    try:
        step = json_field(json_field(read_json(header, _MAX_HEADER_BYTES), "__metadata__", dict), "step", str)
    except ForeignFileError:
        return None
    return int(step) if step.isdecimal() else None


def _fetch(bucket: Bucket, folder: str, evaluation: Evaluation | None, path: Path) -> bool:
    """Download a checkpoint to `path`; False, with a warning, if it is not what was uploaded."""
    partial = path.with_name(f".{path.name}.partial")  # which the next start removes
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    try:
        prefix = f"{_CHECKPOINTS}/{folder}"
        sizes = bucket.sizes(f"{prefix}/")
        sizes.pop(f"{prefix}/{_MODEL}", None)
        with Progress(f"downloading {bucket.url}/{prefix}", total=sum(sizes.values()), unit="B") as progress:

            def download(name: str) -> None:
                size = sizes.get(f"{prefix}/{name}")  # in some stores a list is older than what it lists
                size = bucket.size(f"{prefix}/{name}") if size is None else size
                bucket.download(f"{prefix}/{name}", partial / name, size, progress.update)

            download(MANIFEST)
            download(MANIFEST_DIGEST)
            manifest = CheckpointManifest.read(partial)
            for name in manifest.files:
                download(name)
        manifest.verify(partial)
        if _folder(partial, _step(folder)) != folder:
            raise DamagedError(f"{MANIFEST} is another checkpoint's")
    except (DamagedError, MissingObjectError, ChangedObjectError) as error:
        logger.warning("run.mirror: %s/%s is damaged and skipped: %s", bucket.url, folder, error)
        remove_tree(partial)
        return False
    if evaluation is not None:
        record_top1(partial, *evaluation)
    if os.path.lexists(path):
        set_aside(path)
    partial.rename(path)
    sync_directory(path.parent)
    return True


def _fetch_file(bucket: Bucket, name: str, path: Path) -> bool:
    """Download an object that its run may replace meanwhile. Return False if there is none."""
    for attempt in range(_NUM_VERSIONS):
        try:
            bucket.download(name, path, bucket.size(name))
            return True
        except MissingObjectError:
            return False
        except ChangedObjectError:
            path.unlink()
            if attempt == _NUM_VERSIONS - 1:
                raise
    raise AssertionError


@contextmanager
def downloaded(url: str, checkpoint: str | None = None) -> Iterator[Path]:
    """Yield a temporary copy of the small files and of one checkpoint of the run whose mirror is at `url`.

    Args:
        checkpoint: as for `local_run`.

    Raises:
        ConfigError: the URL is not a run's mirror, or it has no such checkpoint.
        CheckpointError: the checkpoint is damaged, or all are.
        ObjectStoreError: the store refuses, or does not answer.
    """
    bucket = Bucket(url)
    complete = complete_checkpoints(bucket)
    best = next(iter(_best(complete, 1)), None)
    newest = max(complete, key=_step, default=None)
    named = next((f for f in complete if checkpoint is not None and f.rpartition("-")[0] == checkpoint), None)
    folder = {None: best or newest, "best": best, "newest": newest}.get(checkpoint, named)
    if folder is None and checkpoint != ALL_CHECKPOINTS:
        names = ", ".join(sorted(f.rpartition("-")[0] for f in complete)) or "none"
        raise ConfigError(f"{bucket.url} has no {checkpoint or 'newest'} checkpoint; it has: {names}")
    with temporary_directory() as directory:
        _download(bucket, directory, complete if folder is None else {folder: complete[folder]})
        yield directory


@contextmanager
def with_ledger(run: Path | str, checkpoint: str | None) -> Iterator[Path]:
    """Yield the directory of `run` as `local_run` does, of a mirror with the ledger."""
    with local_run(run, checkpoint) as directory:
        if is_remote(str(run)):
            _fetch_ledger(Bucket(str(run)), directory)
        yield directory


def _download(bucket: Bucket, directory: Path, checkpoints: Checkpoints) -> None:
    """Download a run's small files and these of its checkpoints. Raises CheckpointError: all of them are damaged."""
    for name in ("config.json", "environment.json", METRICS, "epoch_accuracies.json"):
        _fetch_file(bucket, name, directory / name)
    paths = {folder: directory / _CHECKPOINTS / f"step-{_step(folder):08d}" for folder in checkpoints}
    fetched = {folder: one for folder, one in checkpoints.items() if _fetch(bucket, folder, one, paths[folder])}
    if checkpoints and not fetched:
        names = ", ".join(sorted(checkpoints))
        raise CheckpointError(f"{bucket.url}/{_CHECKPOINTS}: {names} is damaged: name another with --checkpoint")
    for link, folders in (("newest", sorted(fetched, key=_step)[-1:]), ("best", _best(fetched, 1))):
        for folder in folders:
            point_link(directory / _CHECKPOINTS / link, paths[folder])


def _fetch_ledger(bucket: Bucket, directory: Path) -> None:
    """Download the epochs of a run's ledger, if it has one. They may have steps behind the last checkpoint."""
    for name in bucket.sizes(f"{_LEDGER}/"):
        path = directory / name
        if _is_of_ledger(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            partial.unlink(missing_ok=True)
            if _fetch_file(bucket, name, partial):
                partial.replace(path)


def _is_replaced(name: str) -> bool:
    """Return whether an object is replaced while the run goes on, unlike those in the folder of a checkpoint."""
    return name in _SMALL_FILES or _is_of_ledger(name)


def _is_of_ledger(name: str) -> bool:
    return re.fullmatch(rf"{_LEDGER}/epoch-\d{{5,}}\.npy", name) is not None


def _version(path: Path) -> tuple[int, int]:
    """Return what changes with a file: its size, and its time of change in nanoseconds."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _folder(path: Path, step: int) -> str:
    """Return the name of a checkpoint's folder. Raises OSError: it cannot be read."""
    return f"step-{step:08d}-{sha256(path / MANIFEST)[:16]}"


def _folder_of(manifest: bytes, step: int) -> str:
    return f"step-{step:08d}-{hashlib.sha256(manifest).hexdigest()[:16]}"


def _step(folder: str) -> int:
    name = FOLDER.fullmatch(folder)
    assert name is not None  # as `Claim` has checked
    return int(name[1])


@contextmanager
def mirrored(config: Config, launch: Launch, stop: StopRequests | None = None) -> Iterator[Mirror | None]:
    """Open run.mirror on rank 0 for the duration of the context, after downloading its checkpoint if it is ahead.

    All ranks call this together, and wait for rank 0's download and for its last upload.

    Args:
        stop: requests to stop, which end the last upload too.

    Raises:
        ConfigError: on all ranks, if the mirror cannot be used.
        CheckpointError: on all ranks, if all its checkpoints are damaged.
        RunError: on all ranks, if a finished run's last upload failed.
    """
    group, mirrors = host_group(launch, timeout=_NO_LIMIT), list[Mirror]()

    def begin() -> None:
        try:
            mirrors.append(Mirror(config.run))
            mirrors[0].restore(config.run, lambda: recipe(config, read_manifest(config.data)))
        except ObjectStoreError as error:
            raise ConfigError(f"run.mirror: {error}") from error

    def complete() -> None:
        missing = mirrors[0].finish(stop.reason) if stop is not None else mirrors[0].finish()
        if missing and mirrors[0].grace_s is None:
            raise RunError(missing)
        if missing:
            logger.warning(missing)

    try:
        on_rank_0(begin, group)
        yield mirrors[0] if mirrors else None
    except Exception:
        for mirror in mirrors:
            if missing := mirror.finish():
                logger.warning(missing)
        raise
    else:
        if stop is not None:
            stop.saved()
        on_rank_0(complete, group)
    finally:
        for mirror in mirrors:
            mirror.close()
