"""From nothing to a trained and evaluated ViT in a few minutes: what `make quickstart` runs.

Writes scikit-learn's handwritten digits (1,797 real scans) to TFRecords, trains configs/digits.py on one rank per GPU,
or without a GPU on as many ranks as are fastest, and prints what came out. Interrupted, it resumes where it stopped.

    python tools/quickstart.py [--run.epochs 10] [--section.field value ...]
"""

import statistics
import sys
from pathlib import Path

import torch

from dali_train import cli
from dali_train.commands import data
from dali_train.config import Config
from dali_train.config.command_line import config_with
from dali_train.data.dataset.manifest import Manifest
from dali_train.extras.cost.speed import bf16_speedup
from dali_train.runtime.status import read_events
from dali_train.text import plural
from dali_train.training.cost import FASTER
from dali_train.training.model import build_model

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
    ranks = 1 << (num_gpus.bit_length() - 1) if num_gpus else 1  # a power of two divides the batch
    micro_batch = min(config.batch.micro_batch, config.batch.global_batch // ranks)
    dtype = "fp16" if num_gpus else fastest_precision(config)
    directory = next_run(runs)
    say(3, f"training {config.model.name} on the {'GPUs' if num_gpus else 'CPU'} in {dtype} into {directory}")
    processes = ["--num-processes", str(ranks) if num_gpus else "auto"]
    settings = ["--run.dir", str(directory), "--precision.dtype", dtype, "--batch.micro_batch", str(micro_batch)]
    if status := cli.main(["train", *processes, "--config", str(CONFIG), *overrides, *settings]):
        sys.exit(status)
    print_results(directory, config, dtype)


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
    """float32, or bfloat16 where this processor trains the model faster in it."""
    num_classes = Manifest.read(config.data.root).num_classes
    speedup = bf16_speedup(config, build_model(config, num_classes, torch.device("meta")), num_classes)
    fastest = "bf16" if speedup >= FASTER else "fp32"
    compared = f"{speedup:.1f} times as fast as" if speedup != 1 else "no faster than"
    say(2, f"no GPU, and bf16 is {compared} fp32: {fastest}")
    return fastest


def print_results(directory: Path, config: Config, dtype: str) -> None:
    events = read_events(directory / "metrics.jsonl")
    ranks = int([event for event in events if event["event"] == "start"][-1]["ranks"])
    last = [event for event in events if event["event"] == "eval"][-1]
    rate = statistics.median(event["images_per_second"] for event in events if event["event"] == "train")
    seconds = next(event for event in reversed(events) if event["event"] == "end")["seconds"]
    total = sum(seconds.values())
    rows = [
        ("top-1", f"{last['top1']:.2%} of {last['num_images']} held-out images ({USUAL})"),
        ("top-5", f"{last['top5']:.2%}"),
        ("images/s", f"{rate:,.0f} on {plural(ranks, 'rank')} in {dtype}"),
        ("time", f"{total:.0f} s: " + ", ".join(f"{name} {spent / total:.0%}" for name, spent in seconds.items())),
        ("run", f"{directory}: config.json, metrics.jsonl, checkpoints"),
        ("report", f"{directory}/report/index.html"),
    ]
    print()
    for name, value in rows:
        print(f"  {name:<10} {value}")


if __name__ == "__main__":
    main()
