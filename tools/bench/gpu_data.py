"""How fast images get to the GPU: this project's data path alone, from several datasets, with several shares of the
JPEGs given to the hardware decoder.

    python -m tools.bench.gpu_data --data original=DATASET [stored-256=DATASET ...]

Each combination is a process of its own; they take turns. A round ends when the GPU has finished its last batch. Images
are decoded, cropped to 224, antialiased, mirrored, normalised and mixed on the GPU; "decoded on the CPU" is the same
with data.device cpu and a copy.
"""

import argparse
import multiprocessing
import os
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from dali_train.config import DataConfig
from dali_train.data.dataset.index import Split
from dali_train.data.loading.dali import PREFETCH
from dali_train.data.loading.loader import make_loader
from tools.bench.turns import (
    ALONE,
    Spread,
    describe_machine,
    loading_config,
    parser_of,
    print_ratio,
    take_turns,
    write_lines,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    dataset: Path
    threads: int
    batch: int
    batches: int  # of a round
    load: float | None  # data.hw_decoder_load; None: decoded on the CPU
    device: str


@dataclass(frozen=True)
class Round:
    images_per_second: float
    host_memory_mb: float  # largest resident size of the process


def main() -> None:
    # Threads by default as in training: all cores but three.
    defaults = {"threads": max(1, len(os.sched_getaffinity(0)) - 3), "batch": 256, "rounds": 3}
    parser = parser_of(__doc__, "--threads", "--batch", "--rounds", "--json", **defaults)
    parser.add_argument("--data", nargs="+", required=True, metavar="NAME=DATASET", help="training splits to read")
    parser.add_argument(
        "--loads",
        nargs="+",
        type=float,
        default=[0.0, 0.2, 0.4, 0.6, 0.85],
        metavar="SHARE",
        help="data.hw_decoder_load, for JPEGs",
    )
    parser.add_argument(
        "--batches", type=int, default=24, metavar="N", help="timed batches a round (default: %(default)s)"
    )
    parser.add_argument(
        "--device", default="cuda", metavar="NAME", help="cpu tries this program out where there is no GPU"
    )
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["tools.bench.gpu_data"])  # torch and DALI, once for all processes
    cases = name_cases(options)
    print(
        f"batches of {options.batch}, {options.threads} threads, {options.rounds} rounds of {options.batches} batches"
    )
    print(describe_machine(), flush=True)
    if options.json:
        write_lines(options.json, [])
    shared = {"threads": options.threads, "batch": options.batch}
    answers = take_turns(
        list(cases), contend, (cases,), [None] * (1 + options.rounds), lines=options.json, shared=shared
    )
    print(f"\n{'':<44}{'images/s':>10}{'low':>9}{'high':>9}{'host MB':>9}")
    rates = {}
    for name, results in answers.items():
        rates[name] = rate = Spread.of(result.images_per_second for result in results)
        memory = max(result.host_memory_mb for result in results)
        print(f"{name:<44}{rate.median:>10,.0f}{rate.low:>9,.0f}{rate.high:>9,.0f}{memory:>9,.0f}")
    print()
    for dataset in (words.partition("=")[0] for words in options.data):
        ours = {name: rate.median for name, rate in rates.items() if name.startswith(f"{dataset},")}
        best = max(ours, key=lambda name: ours[name])
        print_ratio(
            best, f"its CPU decoding: {ours[best]:,.0f} images/s", ours[best] / ours[f"{dataset}, decoded on the CPU"]
        )


def name_cases(options: argparse.Namespace) -> dict[str, Case]:
    cases = {}
    for words in options.data:
        name, _, path = words.partition("=")
        shared = {"dataset": Path(path), "threads": options.threads, "batch": options.batch, "batches": options.batches}
        raw = Split(path, "train").manifest.encoding == "raw"
        for load in [0.0] if raw else options.loads:
            case = f"{name}, raw pixels" if raw else f"{name}, {load:.0%} to the hardware decoder"
            cases[case] = Case(load=load, device=options.device, **shared)
        cases[f"{name}, decoded on the CPU"] = Case(load=None, device=options.device, **shared)
    return cases


def contend(name: str, cases: dict[str, Case], pipe: Connection) -> None:
    """One combination's process: a round for each request."""
    case = cases[name]
    device = torch.device(case.device, 0) if case.device == "cuda" else torch.device(case.device)
    where: dict[str, Any] = {"device": "cpu"} if case.load is None else {"hw_decoder_load": case.load}
    data = DataConfig(root=str(case.dataset), num_threads=case.threads, **where)
    config = loading_config(data, micro_batch=case.batch, mixup_alpha=0.2)
    loader = make_loader(Split(case.dataset, "train"), config, device, **ALONE, num_threads=case.threads)

    def advance(count: int) -> None:
        for _ in range(count):
            loader.next()
        if device.type == "cuda":
            torch.cuda.synchronize()

    pipe.send("ready")
    while True:
        pipe.recv()
        advance(PREFETCH + 2)  # what was prepared while the others worked
        start = time.perf_counter()
        advance(case.batches)
        rate = case.batches * case.batch / (time.perf_counter() - start)
        pipe.send(Round(rate, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6))


if __name__ == "__main__":
    main()
