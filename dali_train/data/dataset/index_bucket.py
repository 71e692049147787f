"""Indexing TFRecords in an object store: each shard is fetched, read and discarded."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from dali_train.data.dataset.manifest import SPLITS
from dali_train.errors import DatasetError, RunError
from dali_train.runtime.object_store import Bucket

Fetch = Callable[[Path], AbstractContextManager[Path]]


@contextmanager
def bucket_as_directory(url: str) -> Iterator[tuple[Path, Fetch]]:
    """Yield a directory that looks like the dataset at `url`: shards have their names and sizes, and their content only
    while they are fetched. At the end the index written there is uploaded to `url`, dataset.json last.

    Raises:
        DatasetError, RunError: also those that are raised within, with the URL in place of the directory.
    """
    if url.startswith("http"):
        raise DatasetError(f"{url}: a server of this kind is only read; index the dataset where it can be written")
    bucket = Bucket(url)
    with TemporaryDirectory(prefix="dali-train-") as place:
        directory = Path(place)

        @contextmanager
        def fetch(path: Path) -> Iterator[Path]:
            size = path.stat().st_size
            path.unlink()
            bucket.download(str(path.relative_to(directory)), path, size)
            yield path
            path.unlink()  # not made shorter: it may still be mapped
            _stand_in(path, size)

        try:
            sizes = {name: size for split in SPLITS for name, size in bucket.sizes(f"{split}/").items()}
            if not sizes:
                raise DatasetError(f"{url} has no objects in train/ or validation/, where a dataset has its shards")
            for name, size in sizes.items():
                _stand_in(directory / name, size)
            yield directory, fetch
            for path in (*directory.glob("index/*"), *directory.glob("idx_files/*/*"), directory / "dataset.json"):
                bucket.upload(str(path.relative_to(directory)), path)
        except (DatasetError, RunError) as error:
            kind = DatasetError if isinstance(error, DatasetError) else RunError
            raise kind(str(error).replace(place, url)) from error


def _stand_in(path: Path, size: int) -> None:
    """Make a sparse file of this size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)
