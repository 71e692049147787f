"""Whole trainers on the same images: this one, timm's train.py and torchvision's reference, each as a user starts it.

    python -m tools.bench.trainers DATASET --timm pytorch-image-models/train.py \\
        --torchvision vision/references/classification/train.py

They train ResNet-18 with SGD in float32 on the CPU, in batches of 64 random crops of 224 pixels, mirrored at random,
with as many loading threads or workers as there are cores, and weights in channels-last memory, which torchvision's has
no option for. Each logs every step; a line of its log is a step. In turn, round after round, each is started and killed
after --steps steps. Measured from outside, in the same way for all: the time from the start to the first step's line,
images/s over the steps after the third, and the memory of all its processes (proportional set size) at the end. This
project also trains on synthetic data, which says what its data path costs; the two others cannot. A script that is not
given is left out. The dataset must hold encoded images.
"""

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
from tools.bench.turns import Spread, describe_machine, kill_family, parser_of, write_lines

SKIPPED = 3  # steps before images/s are counted: caches, and batches that were ready

CONFIG = """
from dali_train.config import *

config = Config(
    data=DataConfig(root={root!r}, train_size={size}, num_threads={threads}),
    model=ModelConfig(name="resnet18", channels_last=True),
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
    memory_mb: float


def main() -> None:
    parser = parser_of(__doc__, "dataset", "--threads", "--batch", "--rounds", "--json", rounds=3)
    parser.add_argument("--steps", type=int, default=13, metavar="N", help="of a run (default: %(default)s)")
    parser.add_argument("--timm", type=Path, metavar="FILE", help="timm's train.py, for the timm that is installed")
    parser.add_argument("--torchvision", type=Path, metavar="FILE", help="references/classification/train.py")
    options = parser.parse_args()
    if options.steps < SKIPPED + 2:
        parser.error(f"--steps is {options.steps}: use at least {SKIPPED + 2}")
    if Split(options.dataset, "train").manifest.encoding == "raw":
        parser.error(f"{options.dataset} has raw pixels: use a dataset of encoded images")
    for script in filter(None, (options.timm, options.torchvision)):
        if not script.is_file():
            parser.error(f"{script} does not exist")
    print(describe_machine())
    runs: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-trainers-") as directory:
        work = Path(directory)
        task = Task(dataset=options.dataset.resolve(), work=work, batch=options.batch, threads=options.threads)
        for number in range(options.rounds):
            for trainer in trainers(task, options.timm, options.torchvision):
                run = start(trainer, options.steps, task)
                runs.setdefault(trainer.name, []).append(run)
                print(f"  round {number + 1} of {options.rounds}: {trainer.name}", file=sys.stderr, flush=True)
    if options.json:
        write_lines(
            options.json, [{"trainer": name, **asdict(run)} for name, results in runs.items() for run in results]
        )
    print(f"\n{'':<26}{'images/s':>9}{'low':>7}{'high':>7}{'first step s':>14}{'memory MB':>11}")
    for name, results in runs.items():
        rate = Spread.of(run.images_per_second for run in results)
        first = Spread.of(run.first_step_s for run in results)
        memory = max(run.memory_mb for run in results)
        print(f"{name:<26}{rate.median:>9.1f}{rate.low:>7.1f}{rate.high:>7.1f}{first.median:>14.1f}{memory:>11.0f}")


def trainers(task: Task, timm: Path | None, torchvision: Path | None) -> list[Trainer]:
    config = task.work / "config.py"
    if not config.exists():
        config.write_text(CONFIG.format(root=str(task.dataset), size=SIZE, threads=task.threads, batch=task.batch))
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
    common = ["--model", "resnet18", "--opt", "sgd", "--lr", "0.01", "--device", "cpu", "--epochs", "1000"]
    common += ["--batch-size", str(task.batch), "--workers", str(task.threads)]
    if timm is not None:
        own = ["--data-dir", str(task.work), "--train-split", "train", "--val-split", "", "--log-interval", "1"]
        plain = ["--color-jitter", "0", "--train-interpolation", "bilinear", "--channels-last"]
        command = [sys.executable, str(timm), *common, *own, *plain]
        chosen.append(Trainer("timm train.py", command, re.compile(r"Train: \d+ \[")))
    if torchvision is not None:
        own = ["--data-path", str(task.work), "--print-freq", "1"]
        command = [sys.executable, str(torchvision), *common, *own]
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
                if len(times) == steps:
                    break
            else:
                sys.exit(f"{trainer.name} ended after {len(times)} of {steps} steps:\n{''.join(said[-20:])}")
            memory = memory_mb(psutil.Process(process.pid))
        finally:
            kill_family(process.pid)
    images = (steps - SKIPPED) * task.batch
    return Run(times[0], images / (times[-1] - times[SKIPPED - 1]), memory)


if __name__ == "__main__":
    main()
