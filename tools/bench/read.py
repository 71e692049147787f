"""Images per second from a cold page cache: each order, with and without reading ahead, through the real data path.

    python -m tools.bench.read DATASET

Before each cold measurement the dataset's pages are dropped from this host's page cache, which needs no privilege but
that no other process has the files mapped. Run it where the data lies: whether `data.shuffle block` is worth its weaker
mixing depends on the disk or file system. Warm measurements find everything in memory: what reading ahead costs then.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from dali_train.config import DataConfig
from dali_train.data.dataset.index import Split
from dali_train.data.loading.loader import TrainLoader
from tools.bench.turns import Spread, alone, describe_machine, loading_config, parser_of, write_lines


@dataclass(frozen=True)
class Case:
    shuffle: Literal["full", "block"]
    read_ahead_mb: int
    cold: bool


def main() -> None:
    options = parse_arguments()
    print(
        f"{options.dataset.name}: {options.rounds} rounds of one epoch, micro-batches of {options.micro_batch}, "
        f"{options.threads} threads, {options.window_blocks} blocks of {options.block_images} "
        f"images\n{describe_machine()}",
        flush=True,
    )
    shuffles: list[Literal["full", "block"]] = ["full", "block"]
    cases = [
        Case(shuffle, ahead, cold)
        for cold in (True, False)
        for shuffle in shuffles
        for ahead in (0, options.read_ahead_mb)
    ]
    measured: dict[Case, list[float]] = {case: [] for case in cases}
    context = multiprocessing.get_context("forkserver")
    # Otherwise each process spends seconds on importing torch and DALI.
    context.set_forkserver_preload(["dali_train.data.loading.loader"])
    for number in range(1, options.rounds + 1):  # interleaved, so that a busy moment of the disk slows all of them
        for case in cases:
            # In a new process: mapped pages stay cached while a loader's threads live.
            with ProcessPoolExecutor(1, context) as process:
                measured[case].append(process.submit(measure, case, options).result())
        print(f"  round {number} of {options.rounds}", file=sys.stderr, flush=True)
    print(f"\n{'order':<7}{'read ahead':>13}{'cache':>7}{'images/s':>10}{'low':>9}{'high':>9}")
    for case, speeds in measured.items():
        rate, cache = Spread.of(speeds), "cold" if case.cold else "warm"
        print(
            f"{case.shuffle:<7}{case.read_ahead_mb:>10} "
            f"MB{cache:>7}{rate.median:>10,.0f}{rate.low:>9,.0f}{rate.high:>9,.0f}"
        )
    if options.json:
        write_lines(
            options.json,
            (
                {**asdict(case), "round": number, "images_per_second": speed}
                for case, speeds in measured.items()
                for number, speed in enumerate(speeds)
            ),
        )


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "dataset", "--threads", "--rounds", "--json", rounds=3)
    parser.add_argument("--micro-batch", type=int, default=64, metavar="N", help="images (default: %(default)s)")
    parser.add_argument(
        "--global-batch", type=int, default=256, metavar="N", help="images per step (default: %(default)s)"
    )
    parser.add_argument(
        "--block-images", type=int, default=128, metavar="N", help="data.block_images (default: %(default)s)"
    )
    parser.add_argument(
        "--window-blocks", type=int, default=4, metavar="N", help="data.window_blocks (default: %(default)s)"
    )
    parser.add_argument(
        "--read-ahead-mb", type=int, default=256, metavar="MB", help="against none (default: %(default)s)"
    )
    return parser.parse_args()


def measure(case: Case, options: argparse.Namespace) -> float:
    """Images per second over one epoch."""
    data = DataConfig(
        root=str(options.dataset),
        shuffle=case.shuffle,
        read_ahead_mb=case.read_ahead_mb,
        block_images=options.block_images,
        window_blocks=options.window_blocks,
    )
    config = loading_config(data, micro_batch=options.micro_batch, global_batch=options.global_batch)
    split = Split(options.dataset, "train")
    if case.cold:
        drop_pages(split)
    start = time.perf_counter()
    loader = TrainLoader.of_split(split, config, alone(torch.device("cpu"), options.threads))
    count = len(split) // options.micro_batch
    for _ in range(count):
        loader.next()
    return count * options.micro_batch / (time.perf_counter() - start)


def drop_pages(split: Split) -> None:
    files = [] if split.files is None else [Path(split.files.path(number)) for number in range(len(split.files))]
    for path in files or split.paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # dirty pages cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
