"""Reading ahead changes nothing but when bytes are read: and it does read them."""

import gc
import itertools
import json
import subprocess
import sys
import threading
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dali_train.config import Config
from dali_train.data.dataset.index import INDEX_DTYPE, Split
from dali_train.data.dataset.storage import GAP_BYTES, RUN_BYTES, MappedFiles, adjacent
from dali_train.data.loading.read_ahead import ReadAhead, read_ahead
from dali_train.data.sampling.micro_batch import MicroBatches, Segment
from tests.config.test_config import PLAIN
from tests.conftest import REPOSITORY
from tests.dataset.test_reading_process import bytes_read
from tests.helpers import wait_until, words


def config_of(dataset: Path, shuffle: str, read_ahead_mb: int) -> Config:
    order = {"shuffle": shuffle, "block_images": 4, "window_blocks": 2}
    return PLAIN.replace(
        {"batch.global_batch": 16, "batch.micro_batch": 4, "mixup.alpha": 0.2},
        data={"root": str(dataset), "read_ahead_mb": read_ahead_mb, **order},
    )


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
def test_same_micro_batches_and_their_bytes_are_read(dataset: Path, shuffle: str) -> None:
    split = Split(dataset, "train")
    files = MappedFiles(split)
    files.reading.read_into_page_cache({})  # its process has begun
    before = bytes_read(files.reading)
    without, ahead = (
        read_ahead(split, Segment(config=config_of(dataset, shuffle, mb), start_step=3, dp_rank=1, dp_size=2), files)
        for mb in (0, 256)
    )
    plain = list(itertools.islice(without, 60))
    # This rank's share of an epoch is read before anything is asked for.
    first = np.concatenate([batch.images for batch in plain[:6]])
    expected = int(split.rows["size"][np.unique(first)].sum())
    wait_until(lambda: bytes_read(files.reading) - before >= expected)
    for a, b in zip(plain, itertools.islice(ahead, 60), strict=True):
        assert (a.step, a.k, a.dropout_seed) == (b.step, b.k, b.dropout_seed)
        for name in ("images", "labels", "boxes", "flips", "partners", "lambdas"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert threads()
    del ahead
    gc.collect()
    wait_until(lambda: not threads())


class Recorded(MappedFiles):
    """Files, and which images were prefetched."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self.prefetched: list[int] = []

    def prefetch(self, images: NDArray[np.int64]) -> None:
        super().prefetch(images)
        self.prefetched += images.tolist()


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_what_is_ahead_is_read_once(dataset: Path, shuffle: str) -> None:
    """The images of the next two micro-batches, or of their windows. A thread that waits for its turn ends, too."""
    split, config = Split(dataset, "train"), config_of(dataset, shuffle, 256)
    files, micro_batches = Recorded(split), MicroBatches(split.rows, config)
    order, places = micro_batches.order, list(itertools.product(range(3), range(4)))
    wanted: list[list[int]] = []
    read_windows: set[tuple[int, int]] = set()
    for place in places:
        positions = micro_batches.positions(*place)
        new = [window for window in order.windows_at(positions) or () if window not in read_windows]
        read_windows |= {*new}
        parts = [order.images_in(*window) for window in new] if shuffle == "block" else [order.images_at(positions)[0]]
        wanted.append([image for part in parts for image in part.tolist()])
    chosen, schedule = itertools.starmap(micro_batches, places), itertools.cycle(places)
    ahead = ReadAhead(split, files, micro_batches, chosen, schedule, num_ahead=2)
    for taken in range(len(places) - 1):
        expected = sorted(itertools.chain(*wanted[: taken + 2]))
        wait_until(lambda count: len(files.prefetched) >= count, len(expected))
        assert sorted(files.prefetched) == expected, taken
        if taken < len(places) - 2:
            next(ahead)
    del ahead
    gc.collect()
    wait_until(lambda: not threads())


def test_no_thread_meets_the_end_of_the_interpreter(tiny_config: Path) -> None:
    """Which would end the process with SIGABRT, now and then."""
    script = f"""
import atexit, threading
# the first to register is called last
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
from dali_train.config import load_config
from dali_train.data.dataset.index import Split
from dali_train.data.loading.read_ahead import read_ahead
from dali_train.data.sampling.micro_batch import Segment
from dali_train.data.loading.read_ahead import ReadAhead
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.data.dataset.storage import MappedFiles
config = load_config({str(tiny_config)!r})
split = Split(config.data.root, "train")
ahead = read_ahead(split, Segment(config=config, start_step=0, dp_rank=0, dp_size=1), MappedFiles(split))
next(ahead)
assert threading.active_count() == 1 + 4
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr


class Failing(MappedFiles):
    """Files whose first `left` requests to prefetch fail."""

    left = itertools.repeat(True)

    def prefetch(self, images: NDArray[np.int64]) -> None:
        if next(self.left, False):
            raise OSError("the disk does not answer")


@pytest.mark.parametrize("times", [1, 1000])
def test_fault_is_told_once_and_changes_nothing(
    dataset: Path, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Failing, "left", itertools.repeat(True, times))
    split = Split(dataset, "train")
    plain, ahead = (
        read_ahead(
            split, Segment(config=config_of(dataset, "full", mb), start_step=0, dp_rank=0, dp_size=1), Failing(split)
        )
        for mb in (0, 256)
    )
    wait_until(lambda: not threads())
    assert caplog.messages == ["reading ahead stops, images are read when they are decoded: the disk does not answer"]
    for a, b in itertools.islice(zip(plain, ahead, strict=True), 20):
        np.testing.assert_array_equal(a.images, b.images)


def test_runs_have_the_images_in_long_reads() -> None:
    generator = np.random.default_rng(0)
    rows = np.zeros(400, dtype=INDEX_DTYPE)
    rows["shard"], rows["size"] = np.arange(400) // 150, generator.integers(1, 300_000, 400)
    gaps = np.where(np.arange(400) % 7 == 0, GAP_BYTES + 1, 50)
    for shard in range(3):
        here = rows["shard"] == shard
        ends = np.cumsum(rows["size"][here] + gaps[here])
        rows["offset"][here] = ends - rows["size"][here]
    starts = rows["offset"].astype(np.int64)
    ends = starts + rows["size"]
    for images in (np.arange(400), np.sort(generator.permutation(400)[:50]), np.array([5]), np.array([], np.int64)):
        runs = adjacent(rows, images)
        assert [image for run in runs for image in run] == images.tolist()
        for run in runs:
            assert len(set(rows["shard"][run])) == 1
            assert (starts[run[1:]] - ends[run[:-1]] <= GAP_BYTES).all()
            assert len(run) == 1 or ends[run[-1]] - starts[run[0]] <= RUN_BYTES
        for one, other in itertools.pairwise(runs):
            apart = rows["shard"][one[-1]] != rows["shard"][other[0]] or starts[other[0]] - ends[one[-1]] > GAP_BYTES
            assert apart or ends[other[0]] - starts[one[0]] > RUN_BYTES, "no longer run was possible"


def test_measuring_it(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.bench import read

    sizes = words("--micro-batch 4 --global-batch 8 --block-images 4 --window-blocks 2 --threads 1 --rounds 1")
    lines = tmp_path / "measured.jsonl"
    forkserver.ensure_running()  # with what tests/ranks.py has it import; the tool's list is for a server of its own
    monkeypatch.setattr(sys, "argv", ["read.py", str(dataset), *sizes, "--json", str(lines)])
    read.main()
    measured = [json.loads(line) for line in lines.read_text().splitlines()]
    cases = {(case["shuffle"], case["read_ahead_mb"], case["cold"]) for case in measured}
    assert cases == set(itertools.product(("full", "block"), (0, 256), (True, False)))
    assert all(case["images_per_second"] > 0 for case in measured)
