"""Training images from an object store: this project with and without a cache, against its own speed from a disk and
against LitData, Streaming and WebDataset, each with a cache of the same size.

    python -m tools.bench.remote DATASET --delay 0.02 --cached 0.5 --epochs 3

A server of this machine answers each request after a delay. Each way runs in its own process with a few threads
or workers, which prepares images as ImageNet's recipes do (a random crop of 224 pixels, a flip, float32). Printed is a
line per epoch: images/s, CPU time per image, memory of all its processes, requests, and what it fetched in units of the
dataset; of our cache also the least that any cache of its size could fetch. Peers that are not installed are left out:
pip install litdata mosaicml-streaming webdataset.
"""

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

from dali_train.config import Config, DataConfig
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import MappedFiles, stored_image
from dali_train.data.loading.cache import ImageCache, join_node
from dali_train.data.loading.loader import TrainLoader
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch
from tests.object_server import ObjectServer
from tools.bench.cache import simulate_cache
from tools.bench.turns import alone, cpu_seconds, describe_machine, family, loading_config

MICRO_BATCH = 20
SHARD_BYTES = 8 << 20  # of the peers' formats: a cache of a small dataset must hold several

Epochs = Iterator[Iterable[Any]]
"""Of each epoch, its micro-batches."""


@dataclass(frozen=True)
class Task:
    """The same for every way."""

    split: Split  # on the disk
    url: str
    cache: Path
    cached: int  # bytes
    epochs: int
    ahead_mb: int  # for this project
    workers: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--delay", type=float, default=0.02, metavar="S", help="of each answer (default: %(default)s)")
    parser.add_argument("--cached", type=float, default=0.5, metavar="SHARE", help="of the dataset (default: 0.5)")
    parser.add_argument("--ahead", type=int, default=16, metavar="MB", help="this project's read-ahead (default: 16)")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="threads or processes (default: 2)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--only", nargs=3, metavar=("WAY", "URL", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    split = Split(options.dataset, "train")
    num_bytes = int(split.rows["size"].sum())
    if options.only:
        way, url, cache = options.only
        cached = int(options.cached * num_bytes)
        task = Task(split, url, Path(cache), cached, options.epochs, options.ahead, options.workers)
        measure(WAYS[way](task), task)
        return
    print(describe_machine())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "ours").symlink_to(options.dataset.resolve())
        with ObjectServer(folder, options.delay) as server:
            for way in options.ways:
                package, write = FORMATS.get(way, (None, None))
                if package is not None and importlib.util.find_spec(package) is None:
                    print(f"{way}: not installed", file=sys.stderr)
                    continue
                if write is not None:
                    write(split, folder / way)
                arguments = ["--only", way, server.url, str(folder / f"cache-{way}")]
                for line in lines_of([*sys.argv[1:], *arguments], folder, server, num_bytes):
                    print(json.dumps({"way": way, **line}), flush=True)


def lines_of(
    arguments: list[str], folder: Path, server: ObjectServer, num_bytes: int
) -> Iterator[dict[str, float | int]]:
    """Run one way, and yield its line of each epoch with the server's counts."""
    environment = os.environ | {
        "XDG_CACHE_HOME": str(folder / "metadata"),
        "OMP_NUM_THREADS": "1",
        "S3_ENDPOINT_URL": server.url,
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    command = [sys.executable, "-m", "tools.bench.remote", *arguments]
    requests, fetched = server.num_requests, server.num_bytes
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if not text.startswith('{"epoch"'):
                continue
            yield json.loads(text) | {
                "requests": server.num_requests - requests,
                "fetched": round((server.num_bytes - fetched) / num_bytes, 3),
            }
            requests, fetched = server.num_requests, server.num_bytes
    if process.returncode:
        print(f"ended with status {process.returncode}", file=sys.stderr)


def measure(epochs: Epochs, task: Task) -> None:
    """Print a line for each epoch, which may lack the last part of a micro-batch of each worker."""
    me = psutil.Process()
    cpu, start = cpu_seconds(me), time.perf_counter()
    for number, micro_batches in enumerate(epochs, 1):
        count = sum(1 for _ in micro_batches) * MICRO_BATCH
        assert count > len(task.split) - task.workers * MICRO_BATCH, f"{count} of {len(task.split)} images"
        now, end = cpu_seconds(me), time.perf_counter()
        line = {
            "epoch": number,
            "images_per_second": round(count / (end - start), 1),
            "cpu_ms_per_image": round(1000 * (now - cpu) / count, 2),
            "memory_mb": round(sum(process.memory_full_info().uss for process in family(me)) / 1e6),
        }
        print(json.dumps(line), flush=True)
        cpu, start = now, end


# This project


def from_disk(task: Task) -> Epochs:
    return ours(task, DataConfig(root=str(task.split.root)))


def from_store(task: Task) -> Epochs:
    return ours(task, DataConfig(root=f"{task.url}/ours", read_ahead_mb=task.ahead_mb))


def with_cache(task: Task) -> Epochs:
    data = DataConfig(
        root=f"{task.url}/ours", read_ahead_mb=task.ahead_mb, cache=str(task.cache), cache_gb=task.cached / 1e9
    )
    least = [round(1 - share, 3) for share in best_shares(task, data)]
    print(f"with a cache: at least {least} can be fetched in each epoch", file=sys.stderr)
    return ours(task, data)


def ours(task: Task, data: DataConfig) -> Epochs:
    config, launch = config_of(data, task.epochs), Launch()
    split = Split(config.data.root, "train")
    node = join_node(config.data, launch, Layout.from_config(launch, config.parallel))
    loader = TrainLoader.of_split(split, config, alone(torch.device("cpu"), task.workers), node=node)
    for _ in range(task.epochs):
        yield (loader.next() for _ in range(len(split) // MICRO_BATCH))
    del loader
    gc.collect()  # ends the threads that read ahead


def config_of(data: DataConfig, epochs: int) -> Config:
    return loading_config(data, micro_batch=MICRO_BATCH).replace({"run.epochs": epochs})


def best_shares(task: Task, data: DataConfig) -> list[float]:
    """Return the share of each epoch's bytes that no cache of this size could serve more of."""
    split, config = task.split, config_of(data, task.epochs)
    micro_batches = MicroBatches(split.rows, config)
    images = np.concatenate([micro_batches(step, 0).images for step in range(config.steps(task.epochs, len(split)))])
    served = simulate_cache(images.astype(np.int32), ImageCache(task.cache, split).file_sizes, task.cached)
    sizes = split.rows["size"].astype(np.int64)
    each = np.array_split(served * sizes[images], task.epochs)
    return [float(part.sum() / sizes.sum()) for part in each]


# Peers, as their documentation recommends


def prepared(content: bytes) -> torch.Tensor:
    from torchvision import transforms

    steps = (
        transforms.RandomResizedCrop(224, antialias=True),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    )
    image: torch.Tensor = transforms.Compose(steps)(Image.open(BytesIO(content)).convert("RGB"))
    return image


def images_of(split: Split) -> Iterator[tuple[bytes, int]]:
    storage = MappedFiles(split)
    for number, label in enumerate(split.rows["label"].tolist()):
        yield stored_image(storage, number).tobytes(), label


def write_litdata(split: Split, folder: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes=SHARD_BYTES)
    for number, (content, label) in enumerate(images_of(split)):
        writer.add_item(number, {"image": content, "label": label})
    writer.done()
    writer.merge()


def litdata(task: Task) -> Epochs:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader
    from litdata.streaming.resolver import Dir

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it refuses servers without encryption

    class Photos(StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(index)
            return prepared(sample["image"]), sample["label"]

    dataset = Photos(
        Dir(path=str(task.cache), url="s3://litdata"),
        shuffle=True,
        drop_last=True,
        max_cache_size=task.cached,
        storage_options={"endpoint_url": task.url},
    )
    loader = StreamingDataLoader(dataset, batch_size=MICRO_BATCH, num_workers=task.workers, drop_last=True)
    for _ in range(task.epochs):
        yield loader


def write_streaming(split: Split, folder: Path) -> None:
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES) as writer:
        for content, label in images_of(split):
            writer.write({"image": content, "label": label})


def streaming(task: Task) -> Epochs:
    from streaming import StreamingDataset

    class Photos(StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(index)
            return prepared(sample["image"]), sample["label"]

    dataset = Photos(
        remote="s3://streaming",
        local=str(task.cache),
        shuffle=True,
        shuffle_block_size=len(task.split) // 5,  # the default is larger than this dataset, and would not fit the cache
        cache_limit=task.cached,
        batch_size=MICRO_BATCH,
    )
    loader: Iterable[Any] = torch.utils.data.DataLoader(dataset, MICRO_BATCH, num_workers=task.workers, drop_last=True)
    for _ in range(task.epochs):
        yield loader


def write_webdataset(split: Split, folder: Path) -> None:
    from webdataset import ShardWriter

    folder.mkdir()
    with ShardWriter(f"{folder}/%06d.tar", maxsize=SHARD_BYTES, verbose=0) as writer:
        for number, (content, label) in enumerate(images_of(split)):
            writer.write({"__key__": f"{number:06}", "jpg": content, "cls": label})


def webdataset(task: Task) -> Epochs:
    import webdataset as wds

    task.cache.mkdir()
    num_shards = len(list((task.cache.parent / "webdataset").glob("*.tar")))
    dataset = (
        wds.WebDataset(
            f"{task.url}/webdataset/{{000000..{num_shards - 1:06}}}.tar",
            shardshuffle=num_shards,
            cache_dir=str(task.cache),
            cache_size=task.cached,
        )
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(prepared, int)
        .batched(MICRO_BATCH, partial=False)
    )
    loader: Iterable[Any] = torch.utils.data.DataLoader(dataset, None, num_workers=task.workers)
    for _ in range(task.epochs):
        yield loader


WAYS: dict[str, Callable[[Task], Epochs]] = {
    "disk": from_disk,
    "store": from_store,
    "cache": with_cache,
    "litdata": litdata,
    "streaming": streaming,
    "webdataset": webdataset,
}
FORMATS: dict[str, tuple[str, Callable[[Split, Path], None]]] = {
    "litdata": ("litdata", write_litdata),
    "streaming": ("streaming", write_streaming),
    "webdataset": ("webdataset", write_webdataset),
}

if __name__ == "__main__":
    main()
