"""What the benchmarks share: contenders that take turns, each in its own process; a config; how results are printed and
drawn."""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dali_train.config import (
    BatchConfig,
    Config,
    DataConfig,
    MixupConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from dali_train.runtime.process import num_cores

if TYPE_CHECKING:
    import torch

    from dali_train.data.loading.loader_arguments import Place

REPOSITORY = Path(__file__).parent.parent.parent

# Options that several benchmarks share.
OPTIONS: dict[str, dict[str, Any]] = {
    "dataset": {"type": Path, "metavar": "DATASET", "help": "directory with dataset.json; its training split is read"},
    "--threads": {"type": int, "metavar": "N", "help": "of each contender, for decoding (default: %(default)s)"},
    "--batch": {"type": int, "metavar": "N", "help": "images per batch (default: %(default)s)"},
    "--rounds": {"type": int, "metavar": "N", "help": "of measurement (default: %(default)s)"},
    "--json": {"type": Path, "metavar": "FILE", "help": "write every measurement as a JSON line"},
}
PACKAGES = ("torch", "torchvision", "timm", "nvidia-dali-cuda130", "nvidia-dali-cuda120", "ffcv", "webdataset", "numpy")


def alone(device: "torch.device", num_threads: int) -> "Place":
    """Return where the loader of a single process stands."""
    from dali_train.data.loading.loader_arguments import Place  # imports torch, which takes seconds

    return Place(dp_rank=0, dp_size=1, device=device, num_threads=num_threads)


@dataclass(frozen=True)
class Spread:
    """Of one figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


def parser_of(description: str | None, *names: str, **defaults: int) -> argparse.ArgumentParser:
    """Return a parser with the options `names` of `OPTIONS`; `defaults` override theirs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        parser.add_argument(name, **OPTIONS[name])
    parser.set_defaults(**{"threads": num_cores(), "batch": 64, "rounds": 7, **defaults})
    return parser


def take_turns(
    names: Sequence[str],
    contend: Callable[..., None],
    arguments: tuple[Any, ...],
    orders: Sequence[Any],
    *,
    lines: Path | None = None,
    shared: dict[str, Any] | None = None,
) -> dict[str, list[Any]]:
    """Run each contender in turn, round by round, so that a busy moment of the machine slows all of
    them.

    Each is a process that runs ``contend(name, *arguments, pipe)``: it sends "ready" or why it cannot take part, and
    then one answer for each order that it receives. They start together, but while one works the others wait.

    Args:
        lines: a file to which each answer but the first is appended as soon as it comes, as a JSON line with the
            contender, the round and what is `shared` by all lines.

    Returns:
        Each contender's answers. Not those to the first order, which warms up; nothing for who cannot take part.
    """
    context = multiprocessing.get_context("forkserver")  # as fresh as with spawn, unless its server has imports
    workers = {}
    answers: dict[str, list[Any]] = {}
    try:
        for name in names:
            ours, theirs = context.Pipe()
            process = context.Process(target=contend, args=(name, *arguments, theirs))
            process.start()
            theirs.close()
            workers[name] = (process, ours)
        for name, (process, pipe) in list(workers.items()):
            state = pipe.recv()
            if state == "ready":
                answers[name] = []
            else:
                print(f"  without {name}: {state}", flush=True)
                process.join()
                del workers[name]
        for number, order in enumerate(orders):
            for name, (process, pipe) in workers.items():
                pipe.send(order)
                answers[name].append(pipe.recv())
                wait_until_idle(psutil.Process(process.pid))
                if lines is not None and number:
                    facts = {"event": "round", "contender": name, "round": number - 1, **(shared or {})}
                    with lines.open("a") as file:
                        file.write(json.dumps({**facts, **asdict(answers[name][-1])}) + "\n")
            print(f"  round {number} of {len(orders) - 1}", file=sys.stderr, flush=True)
    except EOFError:
        sys.exit(f"{name} ended with an error, see above; leave it out with --only")
    finally:
        # Killed, since loaders with workers take long to shut down.
        for process, _ in workers.values():
            assert process.pid is not None, "it was started"
            kill_family(process.pid)
    return {name: given[1:] for name, given in answers.items()}


def loading_config(
    data: DataConfig,
    *,
    micro_batch: int,
    global_batch: int | None = None,
    mixup_alpha: float = 0.0,
    channels_last: bool = False,
) -> Config:
    """Return a config for the data path alone. By default a micro-batch is an entire step."""
    return Config(
        data=data,
        model=ModelConfig(name="vit_base_patch16_224", channels_last=channels_last),
        optimizer=OptimizerConfig(lr=1.0),
        schedule=ScheduleConfig(warmup_epochs=0),
        batch=BatchConfig(global_batch=global_batch or micro_batch, micro_batch=micro_batch),
        mixup=MixupConfig(alpha=mixup_alpha),
        run=RunConfig(dir="run", epochs=1),
    )


def chosen(names: Iterable[str], words: Sequence[str] | None) -> list[str]:
    """Return the names that contain one of `words`, or only the one that a word is; without words, all of them."""
    names, words = list(names), words or [""]
    return [name for name in names if any(name == word if word in names else word in name for word in words)]


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def kill_family(pid: int) -> None:
    """Kill a process, unless it has ended, and its children."""
    with suppress(psutil.NoSuchProcess):  # ended with an error
        for member in family(psutil.Process(pid)):
            with suppress(psutil.NoSuchProcess):  # a compiler's worker that has just ended
                member.kill()


def wait_until_idle(process: psutil.Process, *, timeout_s: float = 10) -> None:
    """Wait until its loader has filled its queues, since that would take cores from the next contender."""
    deadline, before = time.monotonic() + timeout_s, cpu_seconds(process)
    while time.monotonic() < deadline:
        time.sleep(0.2)
        after = cpu_seconds(process)
        if after - before < 0.02:
            return
        before = after


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its children, including those that have ended and were reaped."""
    total = 0.0
    for member in family(process):
        with suppress(psutil.NoSuchProcess):  # a compiler's worker that has just ended
            total += sum(member.cpu_times()[:4])
    return total


def python_environment() -> dict[str, str]:
    """Return the environment of a Python process that imports this repository, in any folder, and prints at once."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def describe_machine() -> str:
    """Return two lines: the hardware, and the installed versions."""
    packages = []
    for package in PACKAGES:
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{cpu_name()}, {num_cores()} cores, {memory:.0f} GiB, Python "
        f"{platform.python_version()}\n{', '.join(packages)}"
    )


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def print_ratio(name: str, peer: str, ratio: float, *, goal: float | None = None, rounds: Spread | None = None) -> None:
    """Print one of the last lines: a ratio beside its goal."""
    details = [f"rounds {rounds.low:.3f} to {rounds.high:.3f}"] if rounds is not None else []
    if goal is not None:
        details.append(f"goal {goal:g}: {'met' if ratio >= goal else 'not met'}")
    print(f"{name:<24} {ratio:.3f} x {peer}" + (f"  ({'; '.join(details)})" if details else ""))


def plot_bars(path: Path, rates: dict[str, Spread], title: str, *, ours: str) -> None:
    """Images per second as bars with the spread over the rounds, the first on top; names that hold `ours` stand out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(reversed(rates))
    rows = [rates[name] for name in names]
    spread = [[row.median - row.low for row in rows], [row.high - row.median for row in rows]]
    colours = ["#1f6feb" if ours in name else "#b0b7c0" for name in names]
    figure, axes = plt.subplots(figsize=(9, 0.38 * len(names) + 1.4), layout="constrained")
    bars = axes.barh(
        names, [row.median for row in rows], xerr=spread, color=colours, error_kw={"ecolor": "#555555", "lw": 1}
    )
    axes.bar_label(bars, [f"{row.median:,.0f}" for row in rows], padding=14)
    axes.set_xlabel("images/s (median, with the lowest and highest round)")
    axes.set_xlim(0, max(row.high for row in rows) * 1.15)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
