"""How fast the data path is, against its peers on the same images in the same run.

Every contender is a process of its own that yields batches of 224-pixel crops, mirrored at random and normalised. They
take turns, round after round, so that a busy moment of the machine hits all of them; while one works the others wait.
Printed are medians and spread over the rounds of images/s and CPU time, and each process's memory.

Contenders: this project bilinear and antialiased; torchvision's ImageFolder and DataLoader with PIL and with
decode_image; timm's loader; DALI's own TFRecord reader with its random-crop decoder; the predecessor's pipeline; FFCV
and WebDataset where they are installed (`pip install -e .[bench]`); a synthetic source; and the floor, bare decoding
of whole images by libjpeg-turbo on as many threads. The ladder adds this project's stages one by one.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from bench_peers import CONTENDERS, Task, export

# What the last lines compare, and the least that each ratio should be (for original ImageNet bytes on two cores).
RATIOS = [
    ("dali_train", "ffcv", "FFCV"),
    ("dali_train antialiased", "ffcv", "FFCV"),
    ("dali_train", "torchvision", "torchvision's better DataLoader"),
    ("dali_train", "dali tfrecord reader", "DALI's own TFRecord reader"),
    ("dali_train", "libjpeg-turbo alone", "bare decoding by libjpeg-turbo"),
]


@dataclass(frozen=True)
class Round:
    images_per_second: float
    cpu_ms_per_image: float
    memory_mb: float


def main() -> None:
    options = parse_arguments()
    names = [name for name in CONTENDERS if not options.only or any(word in name for word in options.only)]
    with tempfile.TemporaryDirectory(dir=options.work_dir, prefix="bench-data-") as work:
        task = Task(dataset=options.dataset.resolve(), work=Path(work), batch=options.batch, threads=options.threads)
        print(header(options, task))
        export(task)
        rounds = measure(names, task, options)
    summary = {name: summarise(results) for name, results in rounds.items() if results}
    print_table(summary)
    if options.json:
        write_json(options.json, rounds, task)
    if options.plot:
        plot(options.plot, summary, task)
    print_ratios(summary)


def parse_arguments() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="directory with dataset.json; its training split is read")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="of each contender (default: one a core)"
    )
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="images a batch (default: 64)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="default: 7")
    parser.add_argument("--batches", type=int, default=24, metavar="N", help="timed batches a round (default: 24)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="contenders whose name holds one of these words")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="where copies in the peers' formats are written meanwhile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round as JSON lines")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the medians as a PNG")
    return parser.parse_args()


def measure(names: list[str], task: Task, options: argparse.Namespace) -> dict[str, list[Round]]:
    """Rounds of all contenders, interleaved."""
    context = multiprocessing.get_context("spawn")
    workers = {}
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=contend, args=(name, task, theirs), daemon=False)
        process.start()
        theirs.close()
        state = ours.recv()
        if state == "ready":
            workers[name] = (process, ours)
        else:
            print(f"  without {name}: {state}", flush=True)
            process.join()
    rounds: dict[str, list[Round]] = {name: [] for name in workers}
    try:
        for number in range(options.rounds + 1):
            for name, (_, pipe) in workers.items():
                pipe.send(options.batches)
                result = pipe.recv()
                if number:  # the first round warms up
                    rounds[name].append(result)
            print(f"  round {number} of {options.rounds}", file=sys.stderr, flush=True)
    except EOFError:
        sys.exit(f"{name} ended with an error, see above; leave it out with --only")
    finally:
        # Not asked politely: loaders with workers of their own take long to say goodbye.
        for process, _ in workers.values():
            for member in family(psutil.Process(process.pid)):
                member.kill()
    return rounds


def contend(name: str, task: Task, pipe: Connection) -> None:
    """One contender's process: runs so many batches whenever it is told to."""
    multiprocessing.set_start_method("fork", force=True)  # what a DataLoader's own workers do by default on Linux
    try:
        batches = CONTENDERS[name](task)
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
        # What was prepared while the others worked: two batches of each of the loader's workers, or of DALI's queue.
        advance(batches, 2 * task.threads + 2)
        cpu, start = cpu_seconds(process), time.perf_counter()
        advance(batches, count)
        seconds, cpu = time.perf_counter() - start, cpu_seconds(process) - cpu
        images = count * task.batch
        pipe.send(Round(images / seconds, 1000 * cpu / images, memory_mb(process)))


def advance(batches: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(batches)


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def cpu_seconds(process: psutil.Process) -> float:
    return sum(sum(member.cpu_times()[:2]) for member in family(process))


def memory_mb(process: psutil.Process) -> float:
    """Proportional set size: shared pages count once, divided among the processes that share them."""
    return sum(member.memory_full_info().pss for member in family(process)) / 1e6


def summarise(results: list[Round]) -> dict[str, float]:
    rates = sorted(result.images_per_second for result in results)
    return {
        "rate": statistics.median(rates),
        "low": rates[0],
        "high": rates[-1],
        "cpu_ms": statistics.median(result.cpu_ms_per_image for result in results),
        "memory_mb": max(result.memory_mb for result in results),
    }


def header(options: argparse.Namespace, task: Task) -> str:
    return (
        f"{task.dataset.name}: {options.rounds} rounds of {options.batches} batches of {options.batch}, {options.threads} threads\n"
        f"{describe_machine()}"
    )


def describe_machine() -> str:
    """Two lines: the hardware, and the versions of what is installed."""
    packages = []
    for package in ("torch", "torchvision", "timm", "nvidia-dali-cuda130", "nvidia-dali-cuda120", "ffcv", "webdataset", "numpy"):
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    memory = psutil.virtual_memory().total / 2**30
    return f"{cpu_name()}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}\n{', '.join(packages)}"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def print_table(summary: dict[str, dict[str, float]]) -> None:
    print(f"\n{'':<34}{'images/s':>9}{'low':>7}{'high':>7}{'CPU ms/image':>14}{'memory MB':>11}")
    for name, row in summary.items():
        print(f"{name:<34}{row['rate']:>9.0f}{row['low']:>7.0f}{row['high']:>7.0f}{row['cpu_ms']:>14.2f}{row['memory_mb']:>11.0f}")


def print_ratios(summary: dict[str, dict[str, float]]) -> None:
    print()
    for name, peer, words in RATIOS:
        peers = [row["rate"] for other, row in summary.items() if other.startswith(peer)]
        if name in summary and peers:
            print(f"{name:<24} {summary[name]['rate'] / max(peers):.2f} x {words}")


def write_json(path: Path, rounds: dict[str, list[Round]], task: Task) -> None:
    with path.open("w") as file:
        for name, results in rounds.items():
            for number, result in enumerate(results):
                line = {"contender": name, "round": number, "dataset": task.dataset.name, "threads": task.threads, **asdict(result)}
                file.write(json.dumps(line) + "\n")


def plot(path: Path, summary: dict[str, dict[str, float]], task: Task) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(reversed(summary))
    rates = [summary[name]["rate"] for name in names]
    spread = [[summary[n]["rate"] - summary[n]["low"] for n in names], [summary[n]["high"] - summary[n]["rate"] for n in names]]
    colours = ["#1f6feb" if name.startswith("dali_train") else "#b0b7c0" for name in names]
    figure, axes = plt.subplots(figsize=(9, 0.38 * len(names) + 1.4), layout="constrained")
    bars = axes.barh(names, rates, xerr=spread, color=colours, error_kw={"ecolor": "#555555", "lw": 1})
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=14)
    axes.set_xlabel("images/s (median, with the lowest and highest round)")
    axes.set_xlim(0, max(summary[n]["high"] for n in names) * 1.15)
    axes.set_title(f"{task.dataset.name}, {task.threads} threads", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
