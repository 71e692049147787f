"""From nothing to a trained and evaluated ViT in a few minutes: what `make quickstart` runs.

Writes scikit-learn's handwritten digits (1,797 real scans) to TFRecords, trains configs/digits.py on one rank per GPU,
or on two ranks where there is no GPU, and prints what came out. Interrupted, it resumes where it stopped.

    python tools/quickstart.py [--run.epochs 10] [--section.field value ...]
"""

import os
import statistics
import sys
import time
from pathlib import Path

import torch

from dali_train import cli
from dali_train.commands import data
from dali_train.config import Config
from dali_train.config.command_line import config_with
from dali_train.data.dataset.manifest import Manifest
from dali_train.runtime.status import read_events
from dali_train.training.loss import mixup_loss
from dali_train.training.model import build_model
from dali_train.training.precision import Precision

REPOSITORY = Path(__file__).parent.parent
CONFIG = REPOSITORY / "configs" / "digits.py"
USUAL = "95 to 98% is usual"  # 95.8 to 97.2 % in six runs: processors round differently, and one image is 0.28 %


def main() -> None:
    overrides = sys.argv[1:]
    config = config_with(CONFIG, overrides, "quickstart")
    dataset, runs = Path(config.data.root), Path(config.run.dir)
    say(1, f"writing the digits as TFRecords to {dataset}")
    if status := data.main("convert", ["digits", "--out", str(dataset)]):
        sys.exit(status)  # it has said why

    num_gpus = torch.cuda.device_count()
    ranks = 1 << (num_gpus.bit_length() - 1) if num_gpus else 2  # a power of two divides the batch
    micro_batch = min(config.batch.micro_batch, config.batch.global_batch // ranks)
    dtype = "fp16" if num_gpus else fastest_precision(config)
    directory = next_run(runs)
    say(3, f"training {config.model.name} on {ranks} {'GPUs' if num_gpus else 'CPU ranks'} in {dtype} into {directory}")
    # One thread per rank, unless the user knows better: the ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    settings = ["--run.dir", str(directory), "--precision.dtype", dtype, "--batch.micro_batch", str(micro_batch)]
    if status := cli.main(["train", "--num-processes", str(ranks), "--config", str(CONFIG), *overrides, *settings]):
        sys.exit(status)
    print_results(directory, config, ranks, dtype)


def say(number: int, text: str) -> None:
    print(f"[{number}/3] {text}", flush=True)


def next_run(runs: Path) -> Path:
    """The first of run-1, run-2, ... that has not been finished: a new one, or one that was interrupted."""
    number = 1
    while any(
        event["event"] == "end" and event["error"] is None
        for event in read_events(runs / f"run-{number}" / "metrics.jsonl")
    ):
        number += 1
    return runs / f"run-{number}"


def fastest_precision(config: Config) -> str:
    """Which of float32, bfloat16 and float16 runs one micro-batch forward and backward in the least time here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each rank will
    device, size = torch.device("cpu"), config.data.train_size
    images = torch.randn(config.batch.micro_batch, 3, size, size)
    targets, lambdas = torch.zeros(len(images), 2, dtype=torch.int64), torch.ones(len(images))
    num_classes = Manifest.read(Path(config.data.root)).num_classes
    milliseconds = {}
    for dtype in ("fp32", "bf16", "fp16"):
        model = build_model(config, num_classes, device)
        autocast = Precision(type(config.precision)(dtype=dtype), device).autocast
        times = []
        for _ in range(12):
            start = time.perf_counter()
            with autocast():
                loss = mixup_loss(model(images), targets, lambdas)
            loss.backward()
            times.append(time.perf_counter() - start)
        milliseconds[dtype] = 1000 * statistics.median(times[2:])
    torch.set_num_threads(threads)
    fastest = min(milliseconds, key=milliseconds.__getitem__)
    measured = ", ".join(f"{dtype} {ms:.0f} ms" for dtype, ms in milliseconds.items())
    say(2, f"no GPU: a micro-batch takes {measured}, so {fastest}")
    return fastest


def print_results(directory: Path, config: Config, ranks: int, dtype: str) -> None:
    events = read_events(directory / "metrics.jsonl")
    last = [event for event in events if event["event"] == "eval"][-1]
    rate = statistics.median(event["images_per_second"] for event in events if event["event"] == "train")
    seconds = next(event for event in reversed(events) if event["event"] == "end")["seconds"]
    total = sum(seconds.values())
    rows = [
        ("top-1", f"{last['top1']:.2%} of {last['num_images']} held-out images ({USUAL})"),
        ("top-5", f"{last['top5']:.2%}"),
        ("images/s", f"{rate:,.0f} on {ranks} ranks in {dtype}"),
        ("time", f"{total:.0f} s: " + ", ".join(f"{name} {spent / total:.0%}" for name, spent in seconds.items())),
        ("run", f"{directory}: config.json, metrics.jsonl, checkpoints"),
        ("report", f"{directory}/report/index.html"),
    ]
    print()
    for name, value in rows:
        print(f"  {name:<10} {value}")


if __name__ == "__main__":
    main()
