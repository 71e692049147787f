#!/usr/bin/env python
"""Images a second from a cold page cache: each order, with and without reading ahead, through the real data path.

    python tools/bench_read.py DATASET [--threads 2] [--repeat 3]

Before each measurement the dataset's pages are dropped from this host's page cache, which needs no privilege but that no
other process has the files mapped. Run it where the data lies: whether `data.shuffle block` is worth its weaker mixing depends
on the disk or file system. The last measurement of each order finds everything in memory: what reading ahead costs then.
"""

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path

import torch

from dali_train.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig
from dali_train.data.index import Split
from dali_train.data.loader import make_loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--block-images", type=int, default=128)
    parser.add_argument("--window-blocks", type=int, default=4)
    parser.add_argument("--read-ahead-mb", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print(f"{'order':<7}{'read ahead':>11}{'cache':>7}{'images/s':>10}   all measurements")
    cases = [
        (shuffle, ahead, cold) for cold in (True, False) for shuffle in ("full", "block") for ahead in (0, options.read_ahead_mb)
    ]
    measured: dict[tuple[str, int, bool], list[float]] = {case: [] for case in cases}
    for _ in range(options.repeat):  # interleaved
        for case in cases:
            measured[case].append(measure(options, *case))
    for (shuffle, ahead, cold), speeds in measured.items():
        median = statistics.median(speeds)
        print(
            f"{shuffle:<7}{ahead:>8} MB{'cold' if cold else 'warm':>7}{median:>10,.0f}   {', '.join(f'{s:,.0f}' for s in speeds)}"
        )
        print(json.dumps({"shuffle": shuffle, "read_ahead_mb": ahead, "cold": cold, "images_per_second": round(median, 1)}))


def measure(options: argparse.Namespace, shuffle: str, read_ahead_mb: int, cold: bool) -> float:
    """Images a second over one epoch."""
    config = Config(
        data=DataConfig(
            root=str(options.dataset), shuffle=shuffle, block_images=options.block_images,  # type: ignore[arg-type]
            window_blocks=options.window_blocks, read_ahead_mb=read_ahead_mb,
        ),
        model=ModelConfig(name=""), optimizer=OptimizerConfig(lr=1), schedule=ScheduleConfig(warmup_epochs=0),
        batch=BatchConfig(global_batch=options.lanes * options.micro_batch, micro_batch=options.micro_batch),
        run=RunConfig(dir="", epochs=1),
    )  # fmt: skip
    split = Split(options.dataset, "train")
    if cold:
        gc.collect()  # mapped pages stay, and the pipeline before this one may still map them
        drop_pages(split)
    start = time.perf_counter()
    loader = make_loader(split, config, torch.device("cpu"), start_step=0, dp_rank=0, dp_size=1, num_threads=options.threads)
    count = len(split) // options.micro_batch
    for _ in range(count):
        loader.next()
    return count * options.micro_batch / (time.perf_counter() - start)


def drop_pages(split: Split) -> None:
    for path in split.paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # a page that is not written yet would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
