"""Reading ahead: threads have the storage prefetch the images that a rank will need soon.

Otherwise a decoder that touches a page that is not in memory waits for the disk, 128 kB at a time. Adjacent bytes are
prefetched in requests of 1 MB, several at once: in a block order whole windows, in other orders the next images.

Prefetching bytes that are already in memory is wasted work: it costs a quarter to a third of the speed of raw pixels on
two cores, and nothing measurable if images are decoded. (Testing first, with RWF_NOWAIT, makes the kernel fetch the
tested pages one by one: on a disk with 500 requests per second this was slower than no reading ahead.)

Reading ahead does not influence the order of images. If the storage does not answer, reading ahead stops but the run
continues; if a shard differs from the index, the run ends with an error that names it.
"""

import atexit
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dali_train.data.dataset.index import Split
from dali_train.data.dataset.reading_process import NUM_THREADS
from dali_train.data.dataset.storage import Storage
from dali_train.data.loading.cache import Node
from dali_train.data.sampling.micro_batch import MicroBatch, MicroBatches, Segment
from dali_train.errors import DatasetError

logger = logging.getLogger("dali_train")

_END_S = 5.0


def read_ahead(split: Split, segment: Segment, storage: Storage, node: Node | None = None) -> Iterator[MicroBatch]:
    """Iterate over the segment's micro-batches while their bytes are read ahead, and the cache of `node` is kept within
    its limit."""
    data, batch = segment.config.data, segment.config.batch
    micro_batches = split.micro_batches(segment.config, segment.views)
    chosen = micro_batches.following(segment)
    # Never more than an epoch ahead, which covers every image once.
    images = min(data.read_ahead_mb * 1_000_000 * len(split) // split.num_bytes, split.num_images // segment.dp_size)
    if node is not None and (most := node.most_ahead(split)) < images:
        images = most
        logger.info(
            "data.cache_gb is %s, so %d images are read ahead, less than data.read_ahead_mb", data.cache_gb, most
        )
    num_ahead = max(1, images // batch.micro_batch)
    if node is not None:
        eviction = node.eviction(split, segment.config, start_step=segment.start_step, num_ahead=num_ahead)
        chosen = chosen if eviction is None else eviction.follow(chosen)
    if data.read_ahead_mb == 0:
        return chosen
    # Look the same number of steps ahead if this coordinate has one micro-batch per step less than others.
    num_ahead = max(1, num_ahead * len(segment.numbers) // batch.grad_accum_steps(segment.dp_size))
    return ReadAhead(split, storage, micro_batches, chosen, iter(segment), num_ahead)


class ReadAhead(Iterator[MicroBatch]):
    """Yields the micro-batches `chosen` for one coordinate unchanged, while threads prefetch the next ones.

    Args:
        schedule: (step, k) of the same micro-batches in the same order.
        num_ahead: how many micro-batches to read ahead.

    Raises:
        DatasetError: from the iterator, if a shard differs from the index.
    """

    def __init__(
        self,
        split: Split,
        storage: Storage,
        micro_batches: MicroBatches,
        chosen: Iterator[MicroBatch],
        schedule: Iterator[tuple[int, int]],
        num_ahead: int,
    ) -> None:
        self._chosen = chosen
        self._prefetcher = _Prefetcher(split, storage, micro_batches, schedule, num_ahead)
        weakref.finalize(self, self._prefetcher.stop)
        self._prefetcher.start()

    def __next__(self) -> MicroBatch:
        micro_batch = next(self._chosen)
        self._prefetcher.taken()
        if self._prefetcher.fault is not None:
            raise self._prefetcher.fault
        return micro_batch


class _Prefetcher:
    """Works out what to read when, and has threads that do it.

    It holds no reference to ReadAhead, so that its finalizer can stop these threads.
    """

    _started: "weakref.WeakSet[_Prefetcher]" = weakref.WeakSet()

    def __init__(
        self,
        split: Split,
        storage: Storage,
        micro_batches: MicroBatches,
        schedule: Iterator[tuple[int, int]],
        num_ahead: int,
    ) -> None:
        self._rows = split.rows
        self._storage = storage
        self._micro_batches = micro_batches
        self._num_ahead = num_ahead
        self._turn = threading.Lock()  # its holder works out what to read next, or waits until it is time
        self._portions = self._all_portions(schedule)
        self._moved = threading.Condition()
        self._num_taken = 0
        self._stopped = threading.Event()
        self.fault: DatasetError | None = None
        self._windows: OrderedDict[tuple[int, int], None] = OrderedDict()  # recently read, the latest one last

    def start(self) -> None:
        self._threads = [
            threading.Thread(target=self.work, name=f"read-ahead-{number}", daemon=True)
            for number in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()
        self._started.add(self)

    @classmethod
    def end_all(cls) -> None:
        """Stop all threads and wait. If the interpreter ends while a thread is in NumPy's C++ code (``np.unique``
        without the GIL), the thread cannot unwind and the process ends with SIGABRT."""
        prefetchers = list(cls._started)
        for prefetcher in prefetchers:
            prefetcher.stop()
        end = time.monotonic() + _END_S  # a storage may never answer
        for prefetcher in prefetchers:
            for thread in prefetcher._threads:
                thread.join(max(0.0, end - time.monotonic()))

    def taken(self) -> None:
        with self._moved:
            self._num_taken += 1
            self._moved.notify()

    def stop(self) -> None:
        self._stopped.set()
        with self._moved:
            self._moved.notify()

    def work(self) -> None:
        """Read until stopped."""
        try:
            while True:
                with self._turn:
                    portion = next(self._portions, None)
                if portion is None:
                    return
                self._storage.prefetch(portion)
        except DatasetError as error:
            self.fault = error
            self.stop()
        except Exception as error:  # any error: training continues without reading ahead
            with self._moved:
                if not self._stopped.is_set():
                    logger.warning("reading ahead stops, images are read when they are decoded: %s", error)
                self.stop()

    def _all_portions(self, schedule: Iterator[tuple[int, int]]) -> Iterator[NDArray[np.int64]]:
        """Yield the images to read, ascending, in portions of the storage's `portion_bytes`."""
        for number, (step, k) in enumerate(schedule):
            with self._moved:
                while not self._stopped.is_set() and number >= self._num_taken + self._num_ahead:
                    self._moved.wait()
                too_late = number < self._num_taken
            if too_late:
                continue
            images = np.unique(self._next_images(self._micro_batches.positions(step, k)))
            portions = np.cumsum(self._rows["size"][images], dtype=np.int64) // self._storage.portion_bytes
            for portion in np.split(images, np.flatnonzero(np.diff(portions)) + 1):
                if self._stopped.is_set():
                    return
                if len(portion):
                    yield portion

    def _next_images(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images at `positions`; in a block order all images of their windows not read yet."""
        order = self._micro_batches.order
        windows = order.windows_at(positions) if self._storage.keeps_windows else None
        if windows is None:
            return order.images_at(positions)[0]
        new = [window for window in windows if window not in self._windows]
        for window in windows:
            self._windows[window] = None
            self._windows.move_to_end(window)
        # Each micro-batch of a step is in about as many as this one, in one or two of each dataset.
        while len(self._windows) > 4 * len(windows) * self._micro_batches.num_per_step:
            self._windows.popitem(last=False)
        return np.concatenate([np.empty(0, dtype=np.int64), *(order.images_in(*window) for window in new)])


atexit.register(_Prefetcher.end_all)
