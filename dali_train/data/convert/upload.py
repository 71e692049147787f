"""Converting into an object store: each finished file is uploaded and deleted locally, dataset.json last."""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dali_train.data.dataset.manifest import cache_directory
from dali_train.errors import DatasetError
from dali_train.files import ForeignFileError, read_json
from dali_train.runtime.object_store import Bucket, MissingObjectError

MAX_OPTIONS_BYTES = 1 << 28  # of a file with a conversion's options: dataset.json may have a million class names
_CLAIM = ".conversion.json"  # what is being converted there


class Upload:
    """Where a conversion's files go. `directory`, on this machine, has what is not uploaded yet.

    Raises:
        ObjectStoreError: by any method: the store refuses, or does not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.directory = cache_directory() / "conversions" / hashlib.sha256(url.encode()).hexdigest()[:16]
        self._bucket = Bucket(url)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """What an earlier start has uploaded."""
        return self._bucket.sizes("")

    def find(self) -> tuple[str, Mapping[str, Any]] | None:
        """Return the options of the conversion that is complete or under way there, and the file that has them."""
        for name, keys in (("dataset.json", ("conversion", "options")), (_CLAIM, ())):
            try:
                options: Any = read_json(self._bucket.read_all(name), MAX_OPTIONS_BYTES, name=f"{self.url}/{name}")
                for key in keys:
                    options = options[key]
            except MissingObjectError:
                continue
            except (ForeignFileError, TypeError, KeyError):  # another program's, or indexed from another's records
                options = {}
            return f"{self.url}/{name}", options if isinstance(options, dict) else {}
        return None

    @property
    def is_complete(self) -> bool:
        return "dataset.json" in self._sizes

    def foreign(self) -> list[str]:
        """Return the names of objects that are not from a conversion."""
        return [] if _CLAIM in self._sizes else sorted(self._sizes)

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Record the conversion there. Raises ChangedObjectError: another process has just done so."""
        if _CLAIM not in self._sizes:
            self._bucket.write(_CLAIM, (json.dumps(identity, indent=1) + "\n").encode(), new=True)

    def has(self, path: Path, num_bytes: int) -> bool:
        """Return whether an earlier start has uploaded a shard."""
        return self._sizes.get(f"{path.parent.name}/{path.name}") == num_bytes

    def send(self, path: Path) -> None:
        """Upload a file of `directory`. It may be removed then."""
        self._bucket.upload(str(path.relative_to(self.directory)), path)

    def complete(self) -> None:
        """Upload the index and the like, and dataset.json last. Raises ChangedObjectError: there is one already."""
        for pattern in ("index/*", "idx_files/*/*", "quarantine.jsonl"):
            for path in sorted(self.directory.glob(pattern)):
                self.send(path)
        self._bucket.write("dataset.json", (self.directory / "dataset.json").read_bytes(), new=True)
        self._bucket.delete(_CLAIM)


def destination(out: Path | str, phase: str = "all") -> tuple[Path, Upload | None]:
    """Return the directory in which a dataset for `out` is made, and where it goes from there if that is a URL.

    Raises:
        DatasetError: a server that is only read, or a phase of many machines.
    """
    if isinstance(out, Path):
        return out, None
    if out.startswith("http"):
        raise DatasetError(f"--out {out}: a server of this kind is only read; use s3://, gs:// or az://")
    if phase != "all":
        raise DatasetError(f"--out {out}: --plan, --part and --finish need a directory that all machines share")
    upload = Upload(out)
    return upload.directory, upload
