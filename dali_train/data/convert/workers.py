"""Many threads write shards; a few others wait for the disk.

Threads, not processes: decoding, checksums, reading and writing all release the interpreter, and a thread costs no
memory of its own. What remains under the interpreter's lock is about 60 us per image.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from dali_train.data.convert.shards import ShardWriter, StoppedError, WrittenShard, publish

_M_MMAP_THRESHOLD = -3  # from malloc.h
_FLUSHERS = 4
_MOST_UNFLUSHED = 8  # shards, besides the one that each worker writes


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
    queue: SimpleQueue[tuple[Path, NDArray[np.uint32]]] = SimpleQueue()
    for job in jobs:
        queue.put(job)
    stop = threading.Event()
    unflushed = threading.BoundedSemaphore(workers + _MOST_UNFLUSHED)
    flushes: list[Future[None]] = []

    def write() -> None:
        writer = make_writer(stop)
        try:
            while not stop.is_set():
                path, images = queue.get_nowait()
                unflushed.acquire()
                shard = writer.write(path, images)
                flushes.append(flushers.submit(flush, path, shard))
        except Empty:
            return
        except BaseException:
            stop.set()
            raise

    def flush(path: Path, shard: WrittenShard) -> None:
        try:
            publish(path)
            finished(path, shard)
        except BaseException:
            stop.set()
            raise
        finally:
            unflushed.release()

    workers = min(workers, len(jobs))
    with ThreadPoolExecutor(_FLUSHERS) as flushers, ThreadPoolExecutor(workers) as pool:
        writers = [pool.submit(write) for _ in range(workers)]
        try:
            wait(writers)
            wait(flushes)
        except BaseException:  # Ctrl-C
            stop.set()
            raise
    errors = [future.exception() for future in (*writers, *flushes)]
    for error in errors:
        if error is not None and not isinstance(error, StoppedError):
            raise error
