"""How fast the data path is, against its peers on the same images in the same run.

Every contender is a process of its own that yields batches of 224-pixel crops, mirrored at random and normalised. They
take turns, round after round, so that a busy moment of the machine hits all of them; while one works the others wait.
Printed are medians and spread over the rounds of the processor time an image, which a busy machine disturbs least, and
of images/s, and each process's memory. Each draws its own crops, by the same rule.

Contenders: this project bilinear and antialiased; torchvision's ImageFolder and DataLoader with PIL and with
torchcodec; timm's loader; DALI's own TFRecord reader with its random-crop decoder; the pipeline of ColossalAI's ViT
example; FFCV, TurboLoader, WebDataset, SPDL and Grain; this project, timm and torchvision with RandAugment; this
project, torchvision and lightly with ten views of an image (views.py); a synthetic source; and the floor, bare decoding
of complete images by libjpeg-turbo on as many threads. What is not installed (`pip install -e .[bench]`) is left out.
The ladder adds this project's stages one by one.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from dali_train.data.dataset.index import Split
from tools.bench.peers import CONTENDERS, Task, export
from tools.bench.turns import (
    Spread,
    chosen,
    cpu_seconds,
    describe_machine,
    family,
    parser_of,
    plot_bars,
    print_ratio,
    take_turns,
    write_lines,
)
from tools.bench.views import VIEWS

# What the last lines compare: a contender, its peer's name or how its peers' names begin (the fastest counts), who they
# are, and the least that the ratio should be with original ImageNet JPEGs, with JPEGs stored at 400 pixels or less,
# with raw pixels.
RATIOS: list[tuple[str, str, str, tuple[float | None, float | None, float | None]]] = [
    ("dali_train", "ffcv", "FFCV", (2.0, 2.0, 2.0)),
    ("dali_train antialiased", "ffcv", "FFCV", (1.8, 1.8, 1.8)),
    ("dali_train", "turboloader", "TurboLoader", (1.5, 1.5, 1.5)),
    ("dali_train", "torchvision", "torchvision's better DataLoader", (2.0, 2.0, None)),
    ("dali_train", "dali tfrecord reader", "DALI's own TFRecord reader", (1.4, 1.4, None)),
    ("TrainLoader", "dali_train", "the trainer's own path", (0.98, 0.98, 0.98)),
    ("RandAugment dali_train", "RandAugment peer", "the better of timm's and torchvision's loaders", (2.0, 2.0, None)),
    ("views dali_train", "views peer", "the better of torchvision's and lightly's", (None, None, None)),
    ("dali_train", "libjpeg-turbo alone", "bare decoding by libjpeg-turbo", (0.8, None, None)),
]

ALL = {**CONTENDERS, **VIEWS}


@dataclass(frozen=True)
class Round:
    images_per_second: float
    cpu_ms_per_image: float
    memory_mb: float


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(dir=options.work_dir, prefix="bench-data-") as work:
        task = Task(dataset=options.dataset.resolve(), work=Path(work), batch=options.batch, threads=options.threads)
        print(
            f"{task.dataset.name}: {options.rounds} rounds of {options.batches} batches of {options.batch}, "
            f"{options.threads} threads\n{describe_machine()}"
        )
        print("  writing the images in the peers' formats", file=sys.stderr, flush=True)
        export(task)
        if options.json:
            write_lines(options.json, [])
        answers = take_turns(
            chosen(ALL, options.only),
            contend,
            (task,),
            [options.batches] * (options.rounds + 1),
            lines=options.json,
            shared={"dataset": task.dataset.name, "threads": task.threads},
        )
    rounds: dict[str, list[Round]] = {name: results for name, results in answers.items() if results}
    rates = {name: Spread.of(result.images_per_second for result in results) for name, results in rounds.items()}
    cpu_ms = {name: Spread.of(result.cpu_ms_per_image for result in results) for name, results in rounds.items()}
    memory = {name: max(result.memory_mb for result in results) for name, results in rounds.items()}
    print_table(rates, cpu_ms, memory)
    if options.plot:
        # Cheap stages would dwarf the others.
        drawn = {name: rate for name, rate in rates.items() if name not in ("synthetic", "ladder: read")}
        plot_bars(options.plot, drawn, f"{task.dataset.name}, {task.threads} threads", ours="dali_train")
    print_ratios(rates, cpu_ms, Split(task.dataset, "train"))


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "dataset", "--threads", "--batch", "--rounds", "--json")
    parser.add_argument(
        "--batches", type=int, default=24, metavar="N", help="timed batches a round (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="contenders whose name is one of these, or holds it")
    parser.add_argument(
        "--work-dir", type=Path, metavar="DIR", help="where copies in the peers' formats are written meanwhile"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the medians as a PNG")
    return parser.parse_args()


def contend(name: str, task: Task, pipe: Connection) -> None:
    """One contender's process: runs the number of batches that it receives, whenever it receives one."""
    multiprocessing.set_start_method("fork", force=True)  # the default of a DataLoader's workers on Linux
    try:
        batches = ALL[name](task)
        next(batches)  # a missing package may show only here
    except (ImportError, NotImplementedError) as error:
        pipe.send(str(error))
        return
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise
    process = psutil.Process()
    pipe.send("ready")
    while True:
        count = pipe.recv()
        # Prepared while the others ran: two batches of each worker, or of DALI's queue.
        advance(batches, 2 * task.threads + 2)
        cpu, start = cpu_seconds(process), time.perf_counter()
        advance(batches, count)
        seconds, cpu = time.perf_counter() - start, cpu_seconds(process) - cpu
        images = count * task.batch
        pipe.send(Round(images / seconds, 1000 * cpu / images, memory_mb(process)))


def advance(batches: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(batches)


def memory_mb(process: psutil.Process) -> float:
    """Proportional set size: shared pages count once, divided among the processes that share them."""
    return sum(member.memory_full_info().pss for member in family(process)) / 1e6


def print_table(rates: dict[str, Spread], cpu_ms: dict[str, Spread], memory: dict[str, float]) -> None:
    print(f"\n{'':<34}{'CPU ms/image':>13}{'low':>7}{'high':>7}{'images/s':>10}{'low':>7}{'high':>7}{'memory MB':>11}")
    for name, rate in rates.items():
        cpu = cpu_ms[name]
        print(
            f"{name:<34}{cpu.median:>13.2f}{cpu.low:>7.2f}{cpu.high:>7.2f}"
            f"{rate.median:>10.0f}{rate.low:>7.0f}{rate.high:>7.0f}{memory[name]:>11.0f}"
        )


def print_ratios(rates: dict[str, Spread], cpu_ms: dict[str, Spread], split: Split) -> None:
    print()
    stored_small = max(split.rows["height"].max(), split.rows["width"].max()) <= 400
    kind = 2 if split.manifest.encoding == "raw" else int(stored_small)
    for name, peer, words, goals in RATIOS:
        named = [peer] if peer in rates else [other for other in rates if other.startswith(peer)]
        peers = [rates[other].median for other in named]
        if name in rates and peers:
            print_ratio(name, words, rates[name].median / max(peers), goal=goals[kind])
            least = min(cpu_ms[other].median for other in named)
            print_ratio("  by processor time", words, least / cpu_ms[name].median, goal=goals[kind])


if __name__ == "__main__":
    main()
