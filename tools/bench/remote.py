"""Training images from an object store, with and without a cache, against the same from a disk.

    python -m tools.bench.remote DATASET --delay 0.02 --cached 0.5 --epochs 4

Starts a server of DATASET on this machine, a process of its own, that answers each request after a delay. Printed is a
line per epoch of each way: images/s of the data path (decoded, cropped, resized), CPU time per image of this process,
bytes fetched per byte of the dataset, and the share that the cache served, beside the best possible.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dali_train.config import Config, DataConfig
from dali_train.data.dataset.index import Split
from dali_train.data.loading.cache import join_node
from dali_train.data.loading.loader import make_loader
from dali_train.data.loading.remote import RemoteImages
from dali_train.data.sampling.micro_batch import MicroBatches
from dali_train.data.sampling.next_use import simulate_cache
from dali_train.parallel.layout import Layout
from dali_train.runtime.launch import Launch
from tools.bench.turns import describe_machine, loading_config

REPOSITORY = Path(__file__).parents[2]
MICRO_BATCH = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--delay", type=float, default=0.02, metavar="S", help="of each answer (default: %(default)s)")
    parser.add_argument("--cached", type=float, default=0.5, metavar="SHARE", help="of the dataset (default: 0.5)")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    options = parser.parse_args()
    print(describe_machine())
    command = [sys.executable, str(REPOSITORY / "tests" / "object_server.py"), str(options.dataset), str(options.delay)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as directory,
    ):
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        num_bytes = sum(shard.num_bytes for shard in Split(options.dataset, "train").shards)
        cache = {"cache": directory, "cache_gb": options.cached * num_bytes / 1e9}
        for name, data in (
            ("disk", {"root": str(options.dataset)}),
            ("store", {"root": url}),
            ("cache", {"root": url, **cache}),
        ):
            for line in measure(name, data, options.epochs, options.threads):
                print(json.dumps(line), flush=True)
        server.kill()


def measure(name: str, data: dict[str, Any], num_epochs: int, num_threads: int) -> list[dict[str, float | str | int]]:
    config = loading_config(DataConfig(read_ahead_mb=16, **data), micro_batch=MICRO_BATCH)
    config = config.replace({"run.epochs": num_epochs})
    launch = Launch()
    split = Split(config.data.root, "train")
    node = join_node(config, launch, Layout.from_config(launch, config.parallel))
    loader = make_loader(
        split,
        config,
        torch.device("cpu"),
        start_step=0,
        dp_rank=0,
        dp_size=1,
        num_threads=num_threads,
        node=node,
    )
    pipeline: Any = loader._pipeline
    storage = pipeline._storage
    steps = len(split) // MICRO_BATCH
    best = best_shares(split, config, num_epochs) if node is not None else []
    lines: list[dict[str, float | str | int]] = []
    for epoch in range(num_epochs):
        start, cpu, before = time.perf_counter(), time.process_time(), _fetched(storage)
        for _ in range(steps):
            loader.next()
        images = steps * MICRO_BATCH
        requests, num_bytes = (now - then for now, then in zip(_fetched(storage), before, strict=True))
        lines.append(
            {
                "way": name,
                "epoch": epoch + 1,
                "images_per_second": round(images / (time.perf_counter() - start), 1),
                "cpu_ms_per_image": round(1000 * (time.process_time() - cpu) / images, 3),
                "requests": requests,
                "fetched": round(num_bytes / int(split.rows["size"].sum()), 3),
                **({"least": round(1 - best[epoch], 3)} if best else {}),
            }
        )
    del loader, pipeline, storage
    gc.collect()  # its threads read ahead, and would go on when the server is gone
    return lines


def _fetched(storage: Any) -> tuple[int, int]:
    """Return (requests, bytes) so far; a disk counts none."""
    return (storage.num_requests, storage.num_bytes) if isinstance(storage, RemoteImages) else (0, 0)


def best_shares(split: Split, config: Config, num_epochs: int) -> list[float]:
    """Return the share of each epoch's bytes that no cache of this size could serve more of."""
    micro_batches = MicroBatches(split.rows, config)
    images = np.concatenate([micro_batches(step, 0).images for step in range(config.steps(num_epochs, len(split)))])
    sizes = split.rows["size"].astype(np.int64)
    served = simulate_cache(images.astype(np.int32), sizes, int((config.data.cache_gb or 0) * 1e9))
    each = np.array_split(served * sizes[images], num_epochs)
    return [float(part.sum() / sizes.sum()) for part in each]


if __name__ == "__main__":
    main()
