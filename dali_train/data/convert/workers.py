"""Many threads write shards; a few others wait for the disk.

Threads, not processes: decoding, checksums, reading and writing all release the interpreter, and a thread costs no
memory of its own. What remains under the interpreter's lock is about 60 us per image.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dali_train.data.convert.shards import ShardWriter, WrittenShard, publish

_M_MMAP_THRESHOLD = -3  # from malloc.h
_FLUSHERS = 4


def return_large_blocks() -> None:
    """Have the C library give every block of over 1 MB back to the system when it is freed.

    By itself glibc learns to keep blocks of up to 32 MB, for each thread apart: 32 threads that shrank photographs of
    48 megapixels held 3.1 GB of free memory.
    """
    with suppress(AttributeError):  # another C library, without that habit
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def write_shards(
    jobs: Sequence[tuple[Path, NDArray[np.uint32]]],
    *,
    make_writer: Callable[[threading.Event], ShardWriter],
    finished: Callable[[Path, WrittenShard], None],
    workers: int,
) -> None:
    """Write each job's images to its path.

    Args:
        make_writer: called once per worker, with the event that makes the writer stop.
        finished: called when a shard lies flushed under its final name, from any thread.

    Raises:
        The first error of any thread; all others have ended by then.
    """
    stop, local = threading.Event(), threading.local()

    def write(path: Path, images: NDArray[np.uint32]) -> Future[None]:
        if not hasattr(local, "writer"):
            local.writer = make_writer(stop)
        return flushers.submit(flush, path, local.writer.write(path, images))

    def flush(path: Path, shard: WrittenShard) -> None:
        publish(path)
        finished(path, shard)

    with ThreadPoolExecutor(_FLUSHERS) as flushers, ThreadPoolExecutor(workers) as pool:
        pending: set[Future[Any]] = {pool.submit(write, *job) for job in jobs}
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                pending |= {flushing for future in done if (flushing := future.result()) is not None}
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
