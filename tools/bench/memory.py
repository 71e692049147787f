"""Memory of the data path over many epochs: is it small, and does it stay constant?

    python -m tools.bench.memory DATASET --plot memory.png

Runs this project's loader (antialiased, Mixup) in one process with nothing else in it and looks at its memory several
times per epoch. Counted is the proportional set size, as Linux reports it in /proc/PID/smaps_rollup, in two parts.
"Own" is anonymous and shared memory: the interpreter's, torch's and DALI's buffers; it cannot be taken back, has to
stay under the limit, and a leak would show in it. "Mapped" is pages of files, libraries and shards: with a dataset
larger than the memory it grows as far as there is room, and the kernel takes it back when somebody needs it.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from dali_train.data.dataset.index import Split
from tools.bench.peers import CONTENDERS, Task
from tools.bench.turns import describe_machine, family, parser_of, write_lines

LIMIT_MB = 1000
LOOKS_PER_EPOCH = 10
Look = dict[str, float]  # epoch, seconds, private_mb, mapped_mb


def main() -> None:
    parser = parser_of(__doc__, "dataset", "--batch", "--threads", "--json")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve as a PNG")
    options = parser.parse_args()
    if options.epochs < 3:
        parser.error(f"--epochs is {options.epochs}: use at least 3")
    task = Task(dataset=options.dataset.resolve(), work=Path(os.devnull), batch=options.batch, threads=options.threads)
    title = f"{task.dataset.name}: {options.epochs} epochs in batches of {task.batch}, {task.threads} threads"
    print(f"{title}\n{describe_machine()}", flush=True)
    import nvidia.dali.fn  # noqa: F401 - the baseline: torch and DALI alone
    import torch  # noqa: F401

    imported = memory_mb()
    looks = watch(task, options.epochs)
    if options.json:
        write_lines(options.json, looks)
    if options.plot:
        plot(options.plot, looks, imported, title)
    print_result(looks, imported)


def watch(task: Task, num_epochs: int) -> list[Look]:
    """Memory after every tenth of an epoch, the first look after the first batch."""
    num_images = len(Split(task.dataset, "train"))
    loader = CONTENDERS["dali_train antialiased, Mixup"](task)
    looks: list[Look] = []
    begin = time.perf_counter()
    for number in range(1, num_epochs * num_images // task.batch + 1):
        next(loader)
        epoch = number * task.batch / num_images
        if epoch >= len(looks) / LOOKS_PER_EPOCH:
            looks.append({"epoch": round(epoch, 3), "seconds": round(time.perf_counter() - begin, 2), **memory_mb()})
            if len(looks) % LOOKS_PER_EPOCH == 1:
                print(f"  epoch {epoch:.1f}: {looks[-1]['private_mb']:.0f} MB", file=sys.stderr, flush=True)
    return looks


def memory_mb() -> Look:
    """Proportional set size of this process and its children, in 10^6 bytes."""
    private = mapped = 0
    for member in family(psutil.Process()):
        # Lines like "Pss_Anon:         123456 kB" (proc(5)); the first line is the address range.
        lines = Path(f"/proc/{member.pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {name: int(words.split()[0]) * 1024 for name, _, words in (line.partition(":") for line in lines)}
        private += sizes["Pss_Anon"] + sizes["Pss_Shmem"]
        mapped += sizes["Pss_File"]
    return {"private_mb": private / 1e6, "mapped_mb": mapped / 1e6}


def slope(looks: list[Look]) -> float:
    """Growth of private memory in MB per epoch over the second half, by least squares.

    In the first half buffers still grow: each position of a batch keeps one for its largest crop so far.
    """
    late = looks[len(looks) // 2 :]
    return float(np.polyfit([look["epoch"] for look in late], [look["private_mb"] for look in late], 1)[0])


def print_result(looks: list[Look], imported: Look) -> None:
    middle = looks[len(looks) // 2]
    print(f"\n{'MB':<8}{'imports':>9}{'first batch':>13}{'half-way':>10}{'end':>7}{'largest':>9}")
    for name in ("private_mb", "mapped_mb"):
        row = [imported[name], looks[0][name], middle[name], looks[-1][name], max(look[name] for look in looks)]
        print(f"{name.removesuffix('_mb'):<8}{row[0]:>9.0f}{row[1]:>13.0f}{row[2]:>10.0f}{row[3]:>7.0f}{row[4]:>9.0f}")
    private, total = (
        max(look["private_mb"] for look in looks),
        max(look["private_mb"] + look["mapped_mb"] for look in looks),
    )
    print(f"\nprivate memory at most {private:.0f} MB (goal: under {LIMIT_MB}), {total:.0f} MB with the mapped files")
    print(f"growth over the second half: {slope(looks):+.2f} MB per epoch")


def plot(path: Path, looks: list[Look], imported: Look, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    epochs, private = [look["epoch"] for look in looks], [look["private_mb"] for look in looks]
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    axes.stackplot(
        epochs,
        private,
        [look["mapped_mb"] for look in looks],
        labels=["private", "mapped files"],
        colors=["#1f6feb", "#d0d7de"],
    )
    axes.axhline(imported["private_mb"], color="white", lw=1, ls="--")
    axes.text(
        epochs[-1],
        imported["private_mb"] - 15,
        "torch and DALI imported ",
        color="white",
        ha="right",
        va="top",
        fontsize=8,
    )
    axes.set_xlabel("epoch")
    axes.set_ylabel("MB (proportional set size)")
    axes.set_xlim(0, epochs[-1])
    axes.set_ylim(0, 1.2 * max(look["private_mb"] + look["mapped_mb"] for look in looks))
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(loc="upper left", frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
