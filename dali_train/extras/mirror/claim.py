"""The claim on a mirror: ``mirror.json``, which names what is complete there, and the one process that writes.

It is replaced by compare-and-swap on its version, so that exactly one of several contenders gets the mirror, and a
process that lost it while suspended cannot complete anything any more.

A writer sends a heartbeat every `BEAT_S`. An observer that cannot look up the writer's process counts it as dead once
the object has not changed for `STALE_S` by the observer's clock.
"""

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any, NamedTuple

from dali_train.config.check import from_json
from dali_train.errors import ConfigError
from dali_train.files import ForeignFileError, json_field, read_json
from dali_train.runtime.lock import Holder
from dali_train.runtime.object_store import Bucket, ChangedObjectError, MissingObjectError, Version

logger = logging.getLogger("dali_train")

BEAT_S, STALE_S = 10.0, 60.0
FILE = "mirror.json"
FOLDER = re.compile(r"step-(\d{8,18})-[0-9a-f]{16}")
_FORMAT = 1
_MAX_BYTES = 1 << 20


class Evaluation(NamedTuple):
    """What a checkpoint was found to be worth."""

    top1: float  # a fraction
    score: float  # by run.best_by, the best checkpoint has the largest


Checkpoints = dict[str, Evaluation | None]
"""The folders of complete checkpoints, with the evaluations of those that have one."""


class Claim:
    """The right to write to a mirror: held from construction to `release`, or until another process takes it over.

    Args:
        say: called with the reason if construction has to wait.

    Raises:
        ConfigError: another run has it, or the prefix holds something else.
        ObjectStoreError: by any method: the store refuses, or does not answer.
    """

    def __init__(self, bucket: Bucket, say: Callable[[str], None]) -> None:
        self.checkpoints: Checkpoints = {}
        self.unfinished: set[str] = set()  # folders that a run has begun, or no longer needs: only these are removed
        self.is_lost = False
        self._bucket, self._holder = bucket, Holder.this_process()
        self._version: Version | None = None  # of the object, as this process knows it; None: there is none
        self._count = 0
        self._changing = threading.Lock()
        self._take(say)

    def renew(self, checkpoints: Checkpoints | None = None, begun: Collection[str] = ()) -> bool:
        """Send a heartbeat, with the complete `checkpoints` and the folders whose upload has `begun`. Return False if
        another process has taken over."""
        with self._changing:
            complete = self.checkpoints if checkpoints is None else checkpoints
            self.unfinished = (self.unfinished | self.checkpoints.keys() | {*begun}) - complete.keys()
            if not self.is_lost and not self._replace(self._holder, complete):
                self.is_lost = True
                current = self._current()
                if current is None:
                    change = "was deleted"
                else:
                    holder = parse_claim(current[0], self._bucket.url)[0]
                    change = f"was taken over by {holder.describe()}" if holder is not None else "was released"
                logger.warning("run.mirror: %s/%s %s: nothing more is uploaded", self._bucket.url, FILE, change)
            return not self.is_lost

    def removed(self, folders: Collection[str]) -> None:
        """Forget unfinished `folders`, which have been removed."""
        with self._changing:
            self.unfinished -= {*folders}

    def release(self) -> None:
        """Record that no process writes here any more."""
        with self._changing:
            if not self.is_lost:
                self.is_lost = True
                self._replace(None, self.checkpoints)

    def _take(self, say: Callable[[str], None]) -> None:
        began, first = time.monotonic(), None
        while True:
            current = self._current()
            if current is None:
                self._version, holder = None, None
                if names := self._bucket.sizes(""):
                    raise ConfigError(
                        f"run.mirror {self._bucket.url} has no {FILE} but other objects, such as {min(names)}: choose "
                        "another prefix, or remove them"
                    )
            else:
                first = first or current
                self._version = current[1]
                holder, self.checkpoints, self.unfinished = parse_claim(current[0], self._bucket.url)
            gone = holder is None or holder.is_gone(self._holder)
            if holder is not None and (gone is False or current != first):
                raise ConfigError(
                    f"run.mirror {self._bucket.url} is in use: {holder.describe()} writes there. Wait for it, stop it, "
                    "or choose another prefix"
                )
            if holder is None or gone or time.monotonic() - began >= STALE_S:
                if self._replace(self._holder, self.checkpoints):
                    return
                continue
            if current is first:
                say(f"run.mirror was last used by {holder.describe()}: waiting up to {STALE_S:.0f} s for a heartbeat")
            time.sleep(BEAT_S / 3)

    def _current(self) -> tuple[bytes, Version] | None:
        try:
            return self._bucket.read_version(FILE)
        except MissingObjectError:
            return None

    def _replace(self, holder: Holder | None, checkpoints: Checkpoints) -> bool:
        """Replace the object if it is still the version that this process knows; return False if it is not."""
        self._count += 1  # so that no two contents are equal, of which S3's ETags are made
        values = {
            "format": _FORMAT,
            "holder": asdict(holder) if holder is not None else None,
            "count": self._count,
            "checkpoints": {folder: _as_json(found) for folder, found in checkpoints.items()},
            "unfinished": sorted(self.unfinished),
        }
        content = (json.dumps(values, indent=1) + "\n").encode()
        try:
            new = self._version is None
            self._version = self._bucket.write(FILE, content, new=new, replaced=self._version)
        except ChangedObjectError:
            current = self._current()
            if current is None or current[0] != content:  # equal: it was written, but the response was lost
                return False
            self._version = current[1]
        self.checkpoints = checkpoints
        return True


def complete_checkpoints(bucket: Bucket) -> Checkpoints:
    """Return a mirror's complete checkpoints, without claiming it.

    Raises:
        ConfigError: it is not a mirror.
        ObjectStoreError: the store refuses, or does not answer.
    """
    try:
        return parse_claim(bucket.read_version(FILE)[0], bucket.url)[1]
    except MissingObjectError:
        raise ConfigError(f"{bucket.url} is not the mirror of a run: it has no {FILE}; use a run.mirror") from None


def _as_json(evaluation: Evaluation | None) -> float | dict[str, float] | None:
    """Return what ``mirror.json`` has of a checkpoint: its top-1, and its score if that is another number."""
    if evaluation is None or evaluation.score == evaluation.top1:
        return evaluation and evaluation.top1
    return {"top1": evaluation.top1, "score": evaluation.score}


def _from_json(checkpoints: dict[str, Any], folder: str) -> Evaluation | None:
    """Return a checkpoint's entry. Raises ForeignFileError: it is none."""
    value = checkpoints[folder]
    if value is None:
        return None
    values = value if isinstance(value, dict) else {"top1": value, "score": value}
    top1, score = json_field(values, "top1", float), json_field(values, "score", float)
    if not (0 <= top1 <= 1 and math.isfinite(score)):
        raise ForeignFileError(f"{folder} is {value} instead of a fraction and a finite score")
    return Evaluation(top1, score)


def parse_claim(content: bytes, url: str) -> tuple[Holder | None, Checkpoints, set[str]]:
    """Return holder, complete checkpoints and unfinished folders, as the ``mirror.json`` below `url` names them.

    Raises:
        ConfigError: it is not what this version writes.
    """
    try:
        values = read_json(content, _MAX_BYTES, name=f"{url}/{FILE}")
        checkpoints = json_field(values, "checkpoints", dict)
        unfinished = json_field(values, "unfinished", list)
        if json_field(values, "format", int) != _FORMAT:
            raise ForeignFileError(f"its format is not {_FORMAT}")
        if not all(isinstance(name, str) and FOLDER.fullmatch(name) for name in (*checkpoints, *unfinished)):
            raise ForeignFileError("checkpoints or unfinished has names that no run writes")
        complete = {folder: _from_json(checkpoints, folder) for folder in checkpoints}
        holder = from_json(Holder, values["holder"]) if values.get("holder") is not None else None
    except (ForeignFileError, ConfigError) as error:
        raise ConfigError(
            f"{url}/{FILE} is not what this version writes ({error}): choose another prefix as run.mirror"
        ) from None
    return holder, complete, {*unfinished}
