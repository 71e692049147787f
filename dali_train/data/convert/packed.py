"""Images that can only be unpacked together with others: the row groups of Parquet files, compressed shards.

They are asked for in random order, so each block is unpacked once, with its first image, into a temporary file.
"""

import os
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dali_train.data.convert.archive import SourceError
from dali_train.data.dataset.image_file import BadImageError
from dali_train.errors import RunError
from dali_train.files import NO_SPACE


def import_pyarrow() -> Any:
    """Return the module pyarrow, with pyarrow.parquet. Raises SourceError: it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise SourceError(
            "Parquet and compressed MDS are read with pyarrow, which is missing: pip install 'dali-train[parquet]'"
        ) from error
    return pyarrow


class Unpacked:
    """A file for the images of all blocks, made when there are some. It vanishes with the process."""

    def __init__(self, directory: Path) -> None:
        """It lies where TMPDIR says, else in `directory`, which need not exist before there are images."""
        self._directory = Path(os.environ.get("TMPDIR") or directory)
        self._file: IO[bytes] | None = None
        self._size = 0
        self.lock = threading.Lock()  # of who appends: one block at a time is in memory, whatever the number of workers

    def append(self, images: Iterable[bytes]) -> "array[int]":
        """Return the places between which the images lie. Raises RunError: the disk is full."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115  open as long as the source
            self._file.seek(self._size)  # behind the last complete block
            places = array("Q", [self._size])
            for image in images:
                self._file.write(image)
                places.append(places[-1] + len(image))
            self._file.flush()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise RunError(
                f"{self._directory}: the source cannot be unpacked here ({error.strerror}): make as much space as it "
                "takes, or name another directory in TMPDIR, and start the same command again"
            ) from error
        self._size = places[-1]
        return places

    def read(self, begin: int, end: int) -> bytes:
        assert self._file is not None
        return os.pread(self._file.fileno(), end - begin, begin)


class PackedImages:
    """The images of one block of a file."""

    def __init__(
        self,
        path: Path,
        kind: str,
        labels: NDArray[np.int32],
        unpack: Callable[[], Iterable[bytes]],
        unpacked: Unpacked,
        *,
        num_bytes: int,
        first: int = 0,
        position: int = 0,
    ) -> None:
        """`kind` and a number, the `first` image's for the first, are an image's name in the file, in which the block
        begins at byte `position`."""
        self._path, self._kind, self._first, self._position = path, kind, first, position
        self._unpack, self._unpacked = unpack, unpacked
        self._places: array[int] | None = None
        self.labels = labels
        self.num_bytes = num_bytes

    def read(self, image: int) -> bytes:
        """Raises BadImageError: there are no bytes. SourceError: there are fewer images than were listed, or more."""
        places = self._places or self._unpack_all()
        content = self._unpacked.read(places[image], places[image + 1])
        if not content:
            raise BadImageError("is null, or has no bytes")
        return content

    def _unpack_all(self) -> "array[int]":
        with self._unpacked.lock:
            if self._places is None:  # else another thread has done it meanwhile
                places = self._unpacked.append(self._unpack())
                if len(places) != len(self.labels) + 1:
                    found = f"{len(places) - 1} images follow, {len(self.labels)} when the conversion began"
                    raise SourceError(f"{self.locate(0)[0]}: {found}")
                self._places = places
            return self._places

    def name(self, image: int) -> str:
        return f"{self._kind} {self._first + image}"

    def locate(self, image: int) -> tuple[str, int]:
        return f"{self._path}:{self.name(image)}", self._position

    def identity(self) -> dict[str, Any]:
        return {
            "name": self._path.name,
            "first": self._first,
            "position": self._position,
            "num_images": len(self.labels),
            "num_bytes": self.num_bytes,
            "labels_crc32c": f"{crc32c(self.labels.data):08x}",
        }
