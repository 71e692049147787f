"""``mirror.json``, which names the process that writes to a mirror and its complete checkpoints, so that only one run
writes there at a time.

The object is replaced by compare-and-swap on its version. So one of several contenders gets it, and a process that was
suspended and lost it can complete nothing more. A writer sends a heartbeat every `BEAT_S`. If its process cannot be
looked up, it counts as dead when the object has not changed for `STALE_S` by the observer's clock.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict

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


class Claim:
    """Held from construction to `release`, or until another process takes it over.

    Args:
        say: called with the reason if construction has to wait.

    Raises:
        ConfigError: another run has it, or the prefix holds something else.
        ObjectStoreError: by any method: the store refuses, or does not answer.
    """

    def __init__(self, bucket: Bucket, say: Callable[[str], None]) -> None:
        self.checkpoints: dict[str, float | None] = {}  # folders of complete ones, with their top-1 as a fraction
        self.unfinished: set[str] = set()  # folders that a run has begun, or no longer needs: only these are removed
        self.is_lost = False
        self._bucket, self._holder = bucket, Holder.this_process()
        self._version: Version | None = None  # of the object, as this process knows it; None: there is none
        self._count = 0
        self._changing = threading.Lock()
        self._take(say)

    def renew(self, checkpoints: dict[str, float | None] | None = None, begun: Collection[str] = ()) -> bool:
        """Send a heartbeat, with the complete `checkpoints` and the folders whose upload has `begun`. Return False if
        another process has taken over."""
        with self._changing:
            complete = self.checkpoints if checkpoints is None else checkpoints
            self.unfinished = (self.unfinished | self.checkpoints.keys() | {*begun}) - complete.keys()
            if not self.is_lost and not self._replace(self._holder, complete):
                self.is_lost = True
                current = self._find()
                if current is None:
                    successor = "gone"
                else:
                    holder = parse_claim(current[0], self._bucket.url)[0]
                    successor = f"that of {holder.describe() if holder is not None else 'nobody'}"
                logger.warning(
                    "run.mirror: %s/%s is now %s: nothing more is uploaded", self._bucket.url, FILE, successor
                )
            return not self.is_lost

    def removed(self, folders: Collection[str]) -> None:
        """Forget unfinished `folders` that have been removed."""
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
            found = self._find()
            if found is None:
                self._version, holder = None, None
                if names := self._bucket.sizes(""):
                    raise ConfigError(
                        f"run.mirror {self._bucket.url} has no {FILE} but other objects, such as {min(names)}: choose "
                        "another prefix, or remove them"
                    )
            else:
                first = first or found
                self._version = found[1]
                holder, self.checkpoints, self.unfinished = parse_claim(found[0], self._bucket.url)
            gone = holder is None or holder.is_gone(self._holder)
            if holder is not None and (gone is False or found != first):
                raise ConfigError(
                    f"run.mirror {self._bucket.url} is in use: {holder.describe()} writes there. Wait for it, end it, "
                    "or choose another prefix"
                )
            if holder is None or gone or time.monotonic() - began >= STALE_S:
                if self._replace(self._holder, self.checkpoints):
                    return
                continue
            if found is first:
                who = holder.describe()
                say(f"run.mirror was last used by {who}: waiting up to {STALE_S:.0f} s for a heartbeat")
            time.sleep(BEAT_S / 3)

    def _find(self) -> tuple[bytes, Version] | None:
        try:
            return self._bucket.read_version(FILE)
        except MissingObjectError:
            return None

    def _replace(self, holder: Holder | None, checkpoints: dict[str, float | None]) -> bool:
        """Replace the object if it is still the version that this process knows; return False if it is not."""
        self._count += 1  # so that no two contents are equal, of which S3's ETags are made
        values = {
            "format": _FORMAT,
            "holder": asdict(holder) if holder is not None else None,
            "count": self._count,
            "checkpoints": checkpoints,
            "unfinished": sorted(self.unfinished),
        }
        content = (json.dumps(values, indent=1) + "\n").encode()
        try:
            new = self._version is None
            self._version = self._bucket.write(FILE, content, new=new, replaced=self._version)
        except ChangedObjectError:
            found = self._find()
            if found is None or found[0] != content:  # equal: it was done, and the answer did not come through
                return False
            self._version = found[1]
        self.checkpoints = checkpoints
        return True


def complete_checkpoints(bucket: Bucket) -> dict[str, float | None]:
    """Return the folders of a mirror's complete checkpoints, with their top-1 as a fraction, without claiming it.

    Raises:
        ConfigError: it is not a mirror.
        ObjectStoreError: the store refuses, or does not answer.
    """
    try:
        return parse_claim(bucket.read_version(FILE)[0], bucket.url)[1]
    except MissingObjectError:
        raise ConfigError(f"{bucket.url} is not the mirror of a run: it has no {FILE}; use a run.mirror") from None


def parse_claim(content: bytes, url: str) -> tuple[Holder | None, dict[str, float | None], set[str]]:
    """Return holder, complete checkpoints and unfinished folders, as the ``mirror.json`` below `url` names them.

    Raises:
        ConfigError: it is not what this version writes.
    """
    try:
        values = read_json(content, _MAX_BYTES, name=f"{url}/{FILE}")
        checkpoints = json_field(values, "checkpoints", dict)
        unfinished = json_field({"unfinished": []} | values, "unfinished", list)  # older versions had none
        if json_field(values, "format", int) != _FORMAT:
            raise ForeignFileError(f"its format is not {_FORMAT}")
        if not all(isinstance(name, str) and FOLDER.fullmatch(name) for name in (*checkpoints, *unfinished)):
            raise ForeignFileError("checkpoints or unfinished has names that no run gives")
        for name, top1 in checkpoints.items():
            if top1 is not None and not 0 <= json_field(checkpoints, name, float) <= 1:
                raise ForeignFileError(f"{name} is {top1} instead of a fraction")
        holder = from_json(Holder, values["holder"]) if values.get("holder") is not None else None
    except (ForeignFileError, ConfigError) as error:
        raise ConfigError(
            f"{url}/{FILE} is not what this version writes ({error}): choose another prefix as run.mirror"
        ) from None
    return holder, checkpoints, {*unfinished}
