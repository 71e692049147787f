"""Reading a dataset on disk: ``dataset.json``, the columnar index and the shards, which are mapped.

One row of the index is one image: which shard, where the encoded image itself begins and ends, its label and its
size in pixels. With it a slice of a memory map is the JPEG, and nothing is parsed while training. `indexing` makes it.
"""

import mmap
import os
import resource
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dali_train.data.manifest import DatasetError, Manifest, Shard, SplitName, index_path

# One row an image. `offset` and `size` are bytes of the encoded image within its shard; `label` counts from 0.
INDEX_DTYPE = np.dtype(
    [("offset", "<u8"), ("size", "<u4"), ("shard", "<u4"), ("label", "<i4"), ("height", "<u2"), ("width", "<u2")]
)


class Split:
    """One split of an indexed dataset, opened for reading.

    `rows` is the memory-mapped index (``INDEX_DTYPE``); ``encoded(i)`` is image i's file content as a read-only
    uint8 view of its mapped shard. Shards are mapped when first touched and stay mapped: rewriting one while it is
    in use kills the process, as with any mapped file.

    Args:
        local: whether the shards lie below `root`. If not, only the index can be read.

    Raises:
        DatasetError: a part is missing, or the index does not fit the shards (other size, or older than a shard).
    """

    def __init__(self, root: Path | str, name: SplitName, *, local: bool = True) -> None:
        self.root = Path(root)
        self.name = name
        self.manifest = Manifest.read(self.root)
        split = self.manifest.splits.get(name)
        if split is None:
            raise DatasetError(f"{self.root} has no {name} split, only {', '.join(self.manifest.splits) or 'none'}")
        index = index_path(self.root, name)
        remedy = f"run `python tools/make_index.py {self.root}` again"
        try:
            self.rows: NDArray[np.void] = np.load(index, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DatasetError(f"{index} cannot be read ({error}): {remedy}") from error
        if self.rows.dtype != INDEX_DTYPE or len(self.rows) != split.num_records:
            raise DatasetError(f"{index} has {len(self.rows)} rows, dataset.json says {split.num_records}: {remedy}")
        self.shards: tuple[Shard, ...] = split.shards
        self.paths = [self.root / name / shard.name for shard in self.shards]
        index_time = index.stat().st_mtime_ns
        for path, shard in zip(self.paths, self.shards, strict=True) if local else ():
            try:
                stat = path.stat()
            except FileNotFoundError:
                raise DatasetError(f"{path} is missing, dataset.json names it: restore the shard, or {remedy}") from None
            if stat.st_size != shard.num_bytes:
                raise DatasetError(f"{path} has {stat.st_size} bytes, the index was made for {shard.num_bytes}: {remedy}")
            if stat.st_mtime_ns > index_time:
                raise DatasetError(
                    f"{index} is older than its shard {path}: {remedy} (to copy a dataset with its times: cp -a, rsync -a)"
                )
        shortage = allow_open_files(len(self.paths) + 256)  # a mapped shard holds a descriptor
        if shortage:
            raise DatasetError(f"{self.root} cannot be mapped: {shortage}; raise that limit, or convert to fewer shards")
        self._maps: list[NDArray[np.uint8] | None] = [None] * len(self.paths)

    @property
    def num_classes(self) -> int:
        return self.manifest.num_classes

    def __len__(self) -> int:
        return len(self.rows)

    def encoded(self, image: int) -> NDArray[np.uint8]:
        row = self.rows[image]
        shard, start = int(row["shard"]), int(row["offset"])
        content = self._maps[shard]
        if content is None:
            content = self._maps[shard] = np.frombuffer(map_file(self.paths[shard]), dtype=np.uint8)
        return content[start : start + int(row["size"])]

    def describe(self, image: int) -> str:
        """Where image number `image` lies, for error messages."""
        row = self.rows[image]
        return f"image {image} ({self.paths[int(row['shard'])]}, {row['size']} bytes at byte {row['offset']})"


def allow_open_files(needed: int) -> str:
    """Raise this process's limit of open files to `needed`; says why where that cannot be, else empty."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        return f"{needed} files would be open, `ulimit -Hn` allows {hard}"
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return ""


def map_file(path: Path) -> mmap.mmap | bytes:
    """The file's content, mapped read-only; an empty file cannot be mapped and is empty bytes."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""
