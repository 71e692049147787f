"""A dataset in an object store gives the images and the run that it gives on a disk, whatever the store does."""

import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dali_train.config import load_config
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import fetched_metadata
from dali_train.data.dataset.storage import MappedFiles, RangedImages, stored_image
from dali_train.data.loading import cache as cache_module
from dali_train.data.loading.cache import Eviction, ImageCache, NextUse, Node
from dali_train.data.loading.loader import EvalLoader
from dali_train.data.loading.loader_arguments import Place
from dali_train.data.loading.read_ahead import ReadAhead, read_ahead
from dali_train.data.sampling.micro_batch import MicroBatches, Segment
from dali_train.data.sampling.order import SampleOrder
from dali_train.errors import ConfigError, DatasetError
from dali_train.files import try_lock
from dali_train.runtime import object_store
from dali_train.runtime.object_store import Bucket, ObjectStoreError
from tests.conftest import Train
from tests.helpers import OFTEN, read_in_rounds, samples, state_difference
from tests.object_server import ObjectServer
from tests.ranks import FORK, patience
from tools.bench.cache import simulate_cache

FOUR_STEPS = ("--run.max_steps", "4")


@pytest.fixture(autouse=True)
def metadata_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("metadata")))
    monkeypatch.setattr(object_store, "_FIRST_WAIT_S", 0.01)
    fetched_metadata.cache_clear()


@pytest.fixture
def server(dataset: Path, tmp_path: Path) -> Iterator[ObjectServer]:
    shutil.copytree(dataset, tmp_path / "served")
    with ObjectServer(tmp_path / "served") as server:
        yield server


def open_images(server: ObjectServer, cache: Path | None = None) -> RangedImages:
    split = Split(server.url, "train")
    return RangedImages(split, None if cache is None else ImageCache(cache, split), staged_bytes=10_000_000)


def assert_all_images(images: RangedImages, dataset: Path) -> None:
    expected = MappedFiles(Split(dataset, "train"))
    numbers = np.random.default_rng(0).permutation(50)
    for got, image in zip(images.read(numbers), numbers, strict=True):
        assert got.tobytes() == stored_image(expected, image).tobytes()


def test_images_are_those_on_the_disk(server: ObjectServer, dataset: Path) -> None:
    images = open_images(server)
    assert_all_images(images, dataset)
    assert images.ranges.num_requests == 3, "neighbours are fetched together"
    images.prefetch(np.arange(20))
    images.prefetch(np.arange(10, 30))  # 10 to 19 are wanted twice
    before = images.ranges.num_requests
    images.read(np.arange(10, 20))
    images.read(np.arange(30))
    assert images.ranges.num_requests == before and images._num_staged_bytes == 0
    # What nobody reads does not stay in memory.
    small = RangedImages(Split(server.url, "train"), None, staged_bytes=1000)
    small.prefetch(np.arange(50))
    assert small._num_staged_bytes <= 2000
    assert_all_images(small, dataset)


@pytest.mark.parametrize("root_is_remote", [False, True])
def test_a_set_is_read_from_where_it_lies(
    server: ObjectServer, dataset: Path, tiny_config: Path, root_is_remote: bool
) -> None:
    """One of data.eval_sets, which may be in a bucket while data.root is on a disk, or the other way round."""
    root, other = (server.url, str(dataset)) if root_is_remote else (str(dataset), server.url)
    config = load_config(tiny_config).replace({"data.root": root})
    place = Place.find(0, 1, None, "cpu", 1)
    own, its = (list(EvalLoader.of_split(Split(each, "validation"), config, place)) for each in (root, other))
    for (images, labels), (its_images, its_labels) in zip(own, its, strict=True):
        assert torch.equal(images, its_images) and torch.equal(labels, its_labels)


def cut_short(handler: Any, path: str, content: bytes) -> bool:
    handler.send_response(206)
    handler.send_header("Content-Length", str(len(content)))
    handler.send_header("Content-Range", f"bytes 0-{len(content) - 1}/{len(content)}")
    handler.end_headers()
    handler.wfile.write(content[: len(content) // 2])
    handler.close_connection = True
    return True


def stalled(handler: Any, path: str, content: bytes) -> bool:
    time.sleep(1.5)
    return False


def unavailable(handler: Any, path: str, content: bytes) -> bool:
    handler.reply(503, b"slow down", {"Retry-After": "0"})
    return True


def refused(handler: Any, path: str, content: bytes) -> bool:
    handler.reply(403, b"expired")
    return True


def flipped(handler: Any, path: str, content: bytes) -> bool:
    """One bit of what is sent is wrong, and nothing says so."""
    handler.reply(206, bytes([content[0] ^ 1]) + content[1:], handler.right_headers)
    return True


def some_times(fault: Callable[[Any, str, bytes], bool], count: int, name: str = "train-") -> Any:
    """`fault` at the first `count` requests of objects whose path has `name` in it."""
    left, changing = [count], threading.Lock()

    def once(handler: Any, path: str, content: bytes) -> bool:
        with changing:
            left[0] -= name in path
            now = name in path and left[0] >= 0
        return fault(handler, path, content) if now else False

    return once


@pytest.mark.parametrize(
    ("fault", "times"),
    [(cut_short, 4), (stalled, 4), (unavailable, 4), (flipped, 2)],
    ids=["cut", "stalled", "503", "flipped"],
)
def test_what_passes_is_waited_for(
    server: ObjectServer, dataset: Path, fault: Any, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_REQUEST_S", 1)
    images = open_images(server)
    server.fault = some_times(fault, times)
    assert_all_images(images, dataset)


def test_credentials_may_expire_and_be_renewed(server: ObjectServer, dataset: Path) -> None:
    images = open_images(server)
    server.fault = refused
    with pytest.raises(DatasetError, match=f"{server.url}/train/train-.* is refused"):
        images.read(np.array([0]))
    server.fault = None
    assert_all_images(images, dataset)
    server.fault = some_times(refused, 3)
    assert_all_images(images, dataset)


def test_a_server_that_is_gone_for_a_while_ends_nothing(server: ObjectServer, dataset: Path) -> None:
    images = open_images(server)
    port, directory = server.server_port, server.directory
    server.server_close()
    later: list[ObjectServer] = []
    timer = threading.Timer(1.5, lambda: later.append(ObjectServer(directory, port=port)))
    timer.start()
    assert_all_images(images, dataset)
    later[0].server_close()


def test_wrong_bytes_are_named(server: ObjectServer, dataset: Path) -> None:
    images = open_images(server)
    content = (server.directory / "train" / "train-00001-of-00003").read_bytes()
    shard = server.directory / "train" / "train-00001-of-00003"
    row = images._rows[20]
    assert row["shard"] == 1
    wrong = bytearray(content)
    wrong[int(row["offset"]) + 3] ^= 1
    shard.write_bytes(wrong)
    with pytest.raises(
        DatasetError,
        match=rf"image 20 \({server.url}/train/train-00001-of-00003, .*\) came 3 times with CRC32C [0-9a-f]",
    ):
        images.read(np.array([20]))
    # Now the shard is pinned: another version of it is not mixed with this one.
    shard.write_bytes(content)
    os.utime(shard, (1, 1))
    with pytest.raises(DatasetError, match="train-00001-of-00003 has been replaced while it was in use: start again"):
        images.read(np.array([20]))
    assert len(open_images(server).read(np.array([20]))) == 1
    shard.write_bytes(content + b"more")
    with pytest.raises(DatasetError, match=rf"has {len(content) + 4} bytes, the index was made for {len(content)}"):
        open_images(server).read(np.array([20]))
    shard.unlink()
    with pytest.raises(DatasetError, match=r"train-00001-of-00003 does not exist, dataset.json names it"):
        open_images(server).read(np.array([20]))


def test_a_prefix_without_a_dataset_is_named(server: ObjectServer) -> None:
    with pytest.raises(DatasetError, match=rf"{server.url}/elsewhere has no dataset.json: name the URL"):
        Split(f"{server.url}/elsewhere", "train")
    (server.directory / "index" / "train.crc.npy").write_bytes(b"other")
    with pytest.raises(DatasetError, match=r"index/train.crc.npy is not the file that dataset.json was written with"):
        Split(server.url, "train")


def test_a_store_that_never_answers_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_FIRST_ANSWER_S", 0.1)
    with pytest.raises(ObjectStoreError, match=r"localhost:1/x/y: .*no answer in 0 s, check the URL, the endpoint"):
        Bucket("http://localhost:1/x").size("y")


def test_no_secret_of_a_url_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"^https://\*\*\*@host/x\?\*\*\* is a URL with .*: leave them out, credentials"
    ):
        Bucket("https://me:SECRET@host/x?sig=SECRET")
    monkeypatch.setattr(object_store, "_FIRST_ANSWER_S", 0.1)
    for name, value in {"ENDPOINT_URL": "http://me:SECRET@127.0.0.1:1/?k=SECRET", "SKIP_SIGNATURE": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(ObjectStoreError, match="no answer in 0 s") as error:
        Bucket("s3://bucket/x").size("y")
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize("endpoint", ["localhost:9000", "", "http://[bad", "http://host:99999", "ftp://me:SECRET@host"])
def test_an_endpoint_that_is_no_address_is_named(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ObjectStoreError, match=r"^AWS_ENDPOINT_URL is '.*' in the environment: use .* http") as error:
        Bucket("s3://bucket/x").size("y")
    assert "SECRET" not in str(error.value)


def test_a_server_without_byte_ranges_is_not_asked_again(server: ObjectServer) -> None:
    images = open_images(server)

    def whole(handler: Any, path: str, content: bytes) -> bool:
        handler.reply(200, (server.directory / path.lstrip("/")).read_bytes(), handler.right_headers)
        return True

    server.fault = whole
    with pytest.raises(
        DatasetError, match=r"Range request not supported .*: the server must support byte ranges; copy"
    ):
        images.read(np.array([0]))
    assert server.num_requests < 20


def test_metadata_that_cannot_be_used_are_named_by_their_url(server: ObjectServer) -> None:
    file = server.directory / "dataset.json"
    content, remedy = file.read_bytes(), rf"[:;] index the dataset again .* copy it to {server.url}$"
    for bad, message in (
        (b"[" * 10_000, "is not valid JSON: .* deep"),
        (b'{"splits": 3}', "cannot be used: .*"),
        (b"[]", "is not valid JSON: an array instead of an object"),
    ):
        file.write_bytes(bad)
        with pytest.raises(DatasetError, match=f"^{server.url}/dataset.json {message}{remedy}"):
            Split(server.url, "train")
    file.write_bytes(content)
    copy = fetched_metadata(server.url) / "dataset.json"
    copy.write_bytes(content.replace(b"train-0", b"train-9"))
    fetched_metadata.cache_clear()
    assert Split(server.url, "train").shards[0].name == "train-00000-of-00003" and copy.read_bytes() == content


def test_metadata_are_fetched_once(server: ObjectServer) -> None:
    Split(server.url, "train")
    fetched_metadata.cache_clear()
    before = server.num_bytes
    Split(server.url, "train")
    assert server.num_bytes - before == (server.directory / "dataset.json").stat().st_size


def use_after_fork(url: str) -> None:
    Bucket(url).size("dataset.json")
    child = os.fork()
    if child == 0:
        try:
            Bucket(url).size("dataset.json")
        except ObjectStoreError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_fork_is_refused_and_does_not_hang(server: ObjectServer) -> None:
    process = FORK.Process(target=use_after_fork, args=(server.url,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


READ_TO_THE_END = """
import sys, threading, time
import numpy as np
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import RangedImages

images = RangedImages(Split(sys.argv[1], "train"), None, staged_bytes=10_000_000)
threading.Thread(target=images.prefetch, args=(np.arange(50),), daemon=True).start()
while images.ranges._bucket._warned == 0:
    time.sleep(0.1)
"""


@pytest.mark.thorough
def test_a_program_ends_though_its_store_is_gone(server: ObjectServer) -> None:
    server.fault = some_times(unavailable, 10**6)
    subprocess.run([sys.executable, "-c", READ_TO_THE_END, server.url], timeout=patience(60), check=True)


# The cache


def test_cached_images_are_checked_and_fetched_again(server: ObjectServer, dataset: Path, tmp_path: Path) -> None:
    assert_all_images(open_images(server, tmp_path / "cache"), dataset)
    again = open_images(server, tmp_path / "cache")
    assert_all_images(again, dataset)
    assert again._cache is not None and (again._cache.num_hits, again.ranges.num_requests) == (50, 0)
    for number, spoil in enumerate((lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"x" * 900))):
        spoil(again._cache.path(number))
    half = again._cache.path(2)
    half.write_bytes(half.read_bytes()[:100])
    damaged = open_images(server, tmp_path / "cache")
    assert_all_images(damaged, dataset)
    assert damaged._cache is not None and (damaged._cache.num_hits, damaged._cache.num_damaged) == (47, 3)
    whole = open_images(server, tmp_path / "cache")
    assert_all_images(whole, dataset)
    assert whole._cache is not None and whole._cache.num_hits == 50


def read_with_full_disk(url: str, dataset: Path, cache: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(cache / "metadata")
    split = Split(url, "train")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    images = RangedImages(split, ImageCache(cache, split), staged_bytes=10_000_000)
    assert_all_images(images, dataset)


def test_a_full_disk_is_a_smaller_cache(server: ObjectServer, dataset: Path, tmp_path: Path) -> None:
    process = FORK.Process(target=read_with_full_disk, args=(server.url, dataset, tmp_path / "cache"))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert max(path.stat().st_size for path in (tmp_path / "cache").glob("train-*/*/*") if path.is_file()) <= 1000


def test_a_cache_that_fails_ends_nothing(
    server: ObjectServer, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache" / "user"
    images = open_images(server, directory)
    cache = images._cache
    assert cache is not None
    folder = cache.path(0).parent

    def num_hits() -> int:
        assert cache is not None
        before = cache.num_hits
        assert_all_images(images, dataset)
        return cache.num_hits - before

    assert (num_hits(), num_hits()) == (0, 50)
    shutil.rmtree(tmp_path / "cache")
    assert (num_hits(), num_hits()) == (0, 50) and not caplog.records
    # As on a disk that has become read-only: removals and new files fail, what is there is read.
    folder.rename(tmp_path / "images")
    folder.symlink_to(folder)
    assert (num_hits(), num_hits()) == (0, 0)
    folder.unlink()
    (tmp_path / "images").rename(folder)
    cache.remove(0)
    assert (num_hits(), num_hits()) == (49, 49)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no directory")
    assert (num_hits(), num_hits()) == (0, 0)
    assert [text.replace(str(directory), "CACHE") for text in caplog.messages] == [
        "data.cache CACHE cannot be written (Too many levels of symbolic links): training continues without it, and "
        "fetches these images again; repair that disk, or use another directory at the next start"
    ]
    assert (num_hits(), open_images(server, directory)._cache is not None) == (0, True)


def test_only_files_of_its_own_are_in_a_cache(server: ObjectServer, dataset: Path, tmp_path: Path) -> None:
    """A FIFO without a writer, a link to a device that never ends and a directory where images would be."""
    images = open_images(server, tmp_path / "cache")
    cache = images._cache
    assert cache is not None
    cache.path(0).parent.mkdir()
    os.mkfifo(cache.path(0))
    cache.path(1).symlink_to("/dev/zero")
    cache.path(2).mkdir()
    for _ in range(2):
        assert_all_images(images, dataset)
    assert cache.num_hits == 47 and cache.path(1).is_symlink() and cache.path(0).is_fifo()
    assert cache.present().sum() == 47
    (cache.directory / "7").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=f"{cache.directory}/7 is a link, but data.cache .*: remove the link, or use"):
        open_images(server, tmp_path / "cache")


@pytest.mark.parametrize("shuffle", ["full", "block", "balanced"])
def test_next_use_is_that_of_the_order(tiny_config: Path, dataset: Path, shuffle: str) -> None:
    config = load_config(tiny_config).replace(
        {"data.shuffle": shuffle, "data.block_images": 4, "data.window_blocks": 2, "run.epochs": 6}
    )
    labels = Split(dataset, "train").rows["label"]
    next_use = NextUse(
        config, SampleOrder.of(config, labels), dp_size=3, coordinates=frozenset({0, 2}), start_step=0
    )  # of 3, 3 and 2 a step
    images, times = next_use.uses(0, next_use.total_steps)
    micro_batches = MicroBatches(Split(dataset, "train").rows, config)
    ours = [(step, k) for step in range(next_use.total_steps) for k in range(8) if k % 3 != 1]
    assert np.array_equal(images, np.concatenate([micro_batches(*place).images for place in ours]))
    assert (
        np.array_equal(times, np.repeat([next_use.time(*place) for place in ours], 4)) and (np.diff(times) >= 0).all()
    )
    sizes = np.full(50, 10)
    for now in (0, 3, 7):
        next_use.forget(now - 2)
        first = next_use.first_use(now, sizes, 10**9)
        for image in range(50):
            later = times[(images == image) & (times >= now)]
            assert first[image] == (later[0] if len(later) else np.iinfo(np.int32).max)
    short = NextUse(config, SampleOrder.of(config, labels), dp_size=3, coordinates=frozenset({0, 2}), start_step=0)
    near = short.first_use(0, sizes, 100)  # ten images are enough
    assert 10 <= (near < np.iinfo(np.int32).max).sum() < 50


@pytest.mark.thorough
@pytest.mark.parametrize("every", [1, 5])
def test_what_is_needed_latest_is_removed(
    server: ObjectServer, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Round by round, the cache serves what an exact simulation serves, within what a round is late; and it is within
    its limit, though several micro-batches pass between two rounds."""
    config = load_config(tiny_config).replace({"run.epochs": 8, "batch.global_batch": 4, "batch.micro_batch": 2})
    split = Split(server.url, "train")
    cache = ImageCache(tmp_path / "cache", split)
    images = RangedImages(split, cache, staged_bytes=10_000_000)
    labels = split.rows["label"]
    uses = NextUse(config, SampleOrder.of(config, labels), dp_size=1, coordinates=frozenset({0}), start_step=0)
    order, times = NextUse(
        config, SampleOrder.of(config, labels), dp_size=1, coordinates=frozenset({0}), start_step=0
    ).uses(0, uses.total_steps)
    limit = 25 * 4096
    monkeypatch.setattr(cache_module, "_LEAST_WAIT_S", 3600.0)  # its thread's rounds are made here
    eviction = Eviction(cache, uses, limit=limit, start_step=0, num_ahead=0)
    for _ in read_in_rounds(images, order, times, eviction, every):
        assert len([path for path in cache.directory.rglob("*") if path.is_file()]) * 4096 <= limit
    best = simulate_cache(order, cache.file_sizes, limit).sum()
    assert every > 1 or 0.9 * best < cache.num_hits <= best


def test_no_more_is_read_ahead_than_half_of_a_cache(
    server: ObjectServer, tiny_config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits for its use cannot be evicted: with data.read_ahead_mb's 256 MB a smaller cache exceeded its limit."""
    config = load_config(tiny_config).replace({"data.root": server.url, "data.cache_gb": 4096e-9 * 63})
    split, coordinates = Split(server.url, "train"), frozenset({0, 1})
    storage = RangedImages(split, ImageCache(tmp_path, split), staged_bytes=10_000_000)
    for limit, most in ((None, 50), (4096 * 63, 12), (4096, 0)):  # the training split is 50 of 63 images
        node = Node(directory=tmp_path, limit=limit, dp_size=2, coordinates=coordinates, lock=None)
        assert node.most_ahead(split) == pytest.approx(most, abs=3)
        caplog.clear()
        ahead = read_ahead(split, Segment(config=config, start_step=0, dp_rank=0, dp_size=2), storage, node)
        assert isinstance(ahead, ReadAhead)
        assert ahead._prefetcher._num_ahead == max(1, min(node.most_ahead(split), 25) // 4)
        assert ("images are read ahead, less than data.read_ahead_mb" in caplog.text) == (limit is not None)


def test_simulated_caches_serve_their_share() -> None:
    """One node: every epoch all images in a new order, of which the best cache serves its share of the dataset."""
    generator = np.random.default_rng(0)
    uses = np.concatenate([generator.permutation(1000) for _ in range(12)]).astype(np.int32)
    for share in (0.1, 0.5):
        served = simulate_cache(uses, np.full(1000, 7), int(share * 7000))
        assert served[:1000].sum() == 0
        assert served[4000:].mean() == pytest.approx(share, abs=0.02)


# The trainer


@pytest.mark.thorough
def test_a_cache_in_use_is_refused(server: ObjectServer, train: Train, tmp_path: Path) -> None:
    directory = tmp_path / "cache" / f"user-{os.getuid()}"
    directory.mkdir(parents=True)
    with (directory / "lock").open("ab") as lock:
        assert try_lock(lock)
        options = ("--data.root", server.url, "--data.cache", str(tmp_path / "cache"))
        output = train("refused", *options, ranks=2, status=2)
    assert f"data.cache {tmp_path / 'cache'} is in use by another run on" in output
    local = train("local", "--data.cache", str(tmp_path / "cache"), status=2)
    assert "no dataset of the run is in an object store; use data.local_copy" in local


@pytest.mark.thorough
def test_a_run_from_a_bucket_is_the_run_from_a_disk(
    server: ObjectServer, train: Train, tiny_config: Path, dataset: Path, tmp_path: Path
) -> None:
    """With a cache of a few images, faults on the way, stopped and resumed on another number of ranks, and half of the
    cache damaged in between: the bits of the weights. The disk stays within the limit, other datasets' images go."""
    options = (*OFTEN, "--data.cache", str(tmp_path / "cache"), "--data.cache_gb", "6e-5", "--data.root", server.url)
    server.fault = some_times(unavailable, 10)
    caches, foreign = tmp_path / "cache" / f"user-{os.getuid()}", tmp_path / "foreign"
    removed, kept = caches / "validation-9-00000000", caches / "validation-8-00000000"
    for directory in (removed, kept, foreign):  # caches of other datasets
        (directory / "0").mkdir(parents=True)
        (directory / "0" / "17").write_text("")
        (directory / ".dali-train-cache").touch()
    (kept / "notes").write_text("")
    (kept / "1").symlink_to(foreign / "0")
    (caches / "validation-7-00000000").symlink_to(foreign)
    (caches / "thesis").mkdir()
    (caches / "thesis" / "17").write_text("")
    train("bucket", *options, *FOUR_STEPS)
    assert not removed.exists() and not (kept / "0").exists() and (kept / "notes").exists()
    assert (foreign / "0" / "17").exists() and (foreign / ".dali-train-cache").exists()
    assert (caches / "thesis" / "17").exists()
    for path in (kept, caches / "thesis"):
        shutil.rmtree(path)
    files = [path for path in (tmp_path / "cache").glob("user-*/*/*/*") if path.is_file()]
    assert 5 <= len(files) <= 60e3 / 4096 + 40
    for path in files[::2]:
        path.write_bytes(path.read_bytes()[:-1])
    assert "resuming from step 4" in train("bucket", *options, ranks=3)
    micro_batches = MicroBatches(Split(dataset, "train").rows, load_config(tiny_config).replace({"run.epochs": 7}))
    named = {(s, k): micro_batches(s, k).images.tolist() for s in range(11) for k in range(8)}
    assert samples(tmp_path / "bucket") == named
    train("block", *options, "--data.shuffle", "block", "--data.block_images", "4", ranks=2)
    train("block-disk", *OFTEN, "--data.shuffle", "block", "--data.block_images", "4", ranks=2)
    assert state_difference(tmp_path / "block", tmp_path / "block-disk") == 0
