"""Whole trainers on the same images: this one, timm's train.py and torchvision's reference, each as a user starts it.

    python -m tools.bench.trainers DATASET --timm pytorch-image-models/train.py \\
        --torchvision vision/references/classification/train.py

They train ResNet-18 with SGD in float32 on the CPU, in batches of 64 random crops of 224 pixels, mirrored at random,
with as many loading threads or workers as there are cores, and weights in channels-last memory, which torchvision's has
no option for. Each logs every step; a line of its log is a step. In turn, round after round, each is started and killed
after --steps steps. Measured from outside, in the same way for all: the time from the start to the first step's line,
images/s and processor time over the steps after the third, and the memory of all its processes (proportional set size)
at the end. This project also trains on synthetic data, which says what its data path costs; the two others cannot. A
script that is not given is left out. The dataset must hold encoded images.

--timm-through is a program that runs timm's script with other loaders, by that script's path and arguments: with
examples/timm/train.py the same script and network have this project's loaders. A small --model shows what loaders
cost, since a ResNet-18 takes nearly all of the time of two cores.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from dali_train.data.dataset.index import Split
from tools.bench.data import memory_mb
from tools.bench.peers import SIZE, Task, export_files
from tools.bench.turns import Spread, cpu_seconds, describe_machine, kill_family, parser_of, write_lines

SKIPPED = 3  # steps before images/s are counted: caches, and batches that were ready

CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root={root!r}, train_size={size}, num_threads={threads}),
    model=ModelConfig(name={model!r}, channels_last=True),
    optimizer=OptimizerConfig(name="sgd", lr=0.01, weight_decay=1e-4),
    schedule=ScheduleConfig(warmup_epochs=0),
    batch=BatchConfig(global_batch={batch}, micro_batch={batch}),
    precision=PrecisionConfig(dtype="fp32"),
    run=RunConfig(dir="run", epochs=1000, eval_every_epochs=None),
    hooks=HooksConfig(log_every_steps=1),
)
"""


@dataclass(frozen=True)
class Trainer:
    name: str
    command: list[str]
    step: re.Pattern[str]  # what a line that tells of a step begins with


@dataclass(frozen=True)
class Run:
    first_step_s: float
    images_per_second: float
    cpu_ms_per_image: float
    memory_mb: float


def main() -> None:
    parser = parser_of(__doc__, "dataset", "--threads", "--batch", "--rounds", "--json", rounds=3)
    parser.add_argument("--steps", type=int, default=13, metavar="N", help="of a run (default: %(default)s)")
    parser.add_argument("--timm", type=Path, metavar="FILE", help="timm's train.py, for the timm that is installed")
    parser.add_argument("--timm-through", type=Path, metavar="FILE", help="run --timm's script by this program, too")
    parser.add_argument("--model", default="resnet18", metavar="NAME", help="the network (default: %(default)s)")
    parser.add_argument("--torchvision", type=Path, metavar="FILE", help="references/classification/train.py")
    options = parser.parse_args()
    if options.steps < SKIPPED + 2:
        parser.error(f"--steps is {options.steps}: use at least {SKIPPED + 2}")
    if Split(options.dataset, "train").manifest.encoding == "raw":
        parser.error(f"{options.dataset} has raw pixels: use a dataset of encoded images")
    if options.timm_through and not options.timm:
        parser.error("--timm-through: it needs --timm")
    for script in filter(None, (options.timm, options.timm_through, options.torchvision)):
        if not script.is_file():
            parser.error(f"{script} does not exist")
    print(describe_machine())
    runs: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-trainers-") as directory:
        work = Path(directory)
        task = Task(dataset=options.dataset.resolve(), work=work, batch=options.batch, threads=options.threads)
        for number in range(options.rounds):
            for trainer in trainers(task, options):
                run = start(trainer, options.steps, task)
                runs.setdefault(trainer.name, []).append(run)
                print(f"  round {number + 1} of {options.rounds}: {trainer.name}", file=sys.stderr, flush=True)
    if options.json:
        write_lines(
            options.json, [{"trainer": name, **asdict(run)} for name, results in runs.items() for run in results]
        )
    columns = f"{'images/s':>9}{'low':>7}{'high':>7}{'CPU ms/image':>14}{'first step s':>14}{'memory MB':>11}"
    print(f"\n{'':<28}{columns}")
    for name, results in runs.items():
        rate = Spread.of(run.images_per_second for run in results)
        cpu = Spread.of(run.cpu_ms_per_image for run in results)
        first = Spread.of(run.first_step_s for run in results)
        memory = max(run.memory_mb for run in results)
        figures = f"{rate.median:>9.1f}{rate.low:>7.1f}{rate.high:>7.1f}{cpu.median:>14.1f}{first.median:>14.1f}"
        print(f"{name:<28}{figures}{memory:>11.0f}")


def trainers(task: Task, options: argparse.Namespace) -> list[Trainer]:
    config = task.work / "config.py"
    if not config.exists():
        numbers = {"size": SIZE, "threads": task.threads, "batch": task.batch}
        config.write_text(CONFIG.format(root=str(task.dataset), model=options.model, **numbers))
        export_files(task)
        # The two others expect directories of these names; no evaluation is reached.
        for name in ("train", "val"):
            (task.work / name).symlink_to(task.files)
    ours = [sys.executable, "-m", "dali_train", "train", "--config", str(config)]
    lines = re.compile(r"step \d+/")
    chosen = [
        Trainer("dali_train", ours, lines),
        Trainer("dali_train, synthetic data", [*ours, "--data.reader", "synthetic"], lines),
    ]
    common = ["--model", options.model, "--opt", "sgd", "--lr", "0.01", "--device", "cpu", "--epochs", "1000"]
    common += ["--batch-size", str(task.batch), "--workers", str(task.threads)]
    if options.timm is not None:
        own = [
            "--train-split",
            "train",
            "--val-split",
            "",
            "--log-interval",
            "1",
            "--input-size",
            "3",
            *[str(SIZE)] * 2,
        ]
        plain = ["--color-jitter", "0", "--train-interpolation", "bilinear", "--channels-last"]
        words = [str(options.timm.resolve()), *common, *own, *plain, "--data-dir"]
        lines = re.compile(r"Train: \d+ \[")
        chosen.append(Trainer("timm train.py", [sys.executable, *words, str(task.work)], lines))
        if options.timm_through is not None:
            through = [sys.executable, str(options.timm_through.resolve()), *words, str(task.dataset)]
            chosen.append(Trainer("timm train.py, our loaders", through, lines))
    if options.torchvision is not None:
        own = ["--data-path", str(task.work), "--print-freq", "1"]
        command = [sys.executable, str(options.torchvision.resolve()), *common, *own]
        chosen.append(Trainer("torchvision's reference", command, re.compile(r"Epoch: \[\d+\] +\[")))
    return chosen


def start(trainer: Trainer, steps: int, task: Task) -> Run:
    """Run a trainer in a new directory until it has logged `steps` steps, and kill it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    began = time.perf_counter()
    with subprocess.Popen(
        trainer.command,
        cwd=tempfile.mkdtemp(dir=task.work),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        times: list[float] = []
        said: list[str] = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if trainer.step.match(line):
                    times.append(time.perf_counter() - began)
                    if len(times) == SKIPPED:
                        cpu_before = cpu_seconds(psutil.Process(process.pid))
                if len(times) == steps:
                    break
            else:
                sys.exit(f"{trainer.name} ended after {len(times)} of {steps} steps:\n{''.join(said[-20:])}")
            cpu = cpu_seconds(psutil.Process(process.pid)) - cpu_before
            memory = memory_mb(psutil.Process(process.pid))
        finally:
            kill_family(process.pid)
    images = (steps - SKIPPED) * task.batch
    return Run(times[0], images / (times[-1] - times[SKIPPED - 1]), 1000 * cpu / images, memory)


if __name__ == "__main__":
    main()
