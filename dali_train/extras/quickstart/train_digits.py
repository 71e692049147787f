"""From scikit-learn's handwritten digits to a trained network: what `dali-train quickstart` does.

The digits become TFRecords, the recipe `digits` is trained on them in the precision and on the ranks that suit the
machine, and the results are printed. Each step goes on where an interruption left it.
"""

import statistics
from pathlib import Path

import torch

from dali_train.checkpoint.run_directory import RunDirectory
from dali_train.commands import data
from dali_train.commands.train import run
from dali_train.config import Config
from dali_train.config.command_line import config_with
from dali_train.data.dataset.manifest import Manifest
from dali_train.extras.cost.speed import bf16_speedup, half_precision
from dali_train.runtime.status import FINISHED, START_AGAIN, read_status
from dali_train.runtime.stop import StopReason
from dali_train.text import plural
from dali_train.training.cost import FASTER
from dali_train.training.model import build_model

RECIPE = "digits"
USUAL = "95 to 98% is usual"  # 95.8 to 97.2 % in six runs: processors round differently, and one image is 0.28 %


def quickstart(overrides: list[str]) -> int:
    """Convert, train, print the results, and return the exit status.

    Args:
        overrides: words of ``--section.field VALUE``; `run.dir` is the directory of all runs.

    Raises:
        ConfigError: a setting cannot be used, or an interrupted run has other settings.
    """
    config = config_with(RECIPE, overrides, "dali-train quickstart")
    dataset = config.data.root
    _say(1, f"writing the digits as TFRecords to {dataset}")
    status = data.main("convert", ["digits", "--out", dataset])
    if status != FINISHED:
        return status

    num_gpus = torch.cuda.device_count()
    ranks = 1 << (num_gpus.bit_length() - 1) if num_gpus else 1  # a power of two divides the batch
    directory, is_begun = next_run(Path(config.run.dir))
    micro_batch = min(config.batch.micro_batch, config.batch.global_batch // ranks)
    if is_begun:  # a run keeps its recipe, where a measurement or other GPUs would now choose another
        begun = RunDirectory(directory).config
        micro_batch = begun.batch.micro_batch
        dtype: str = begun.precision.dtype
        _say(2, f"{directory} was interrupted, and goes on in {dtype}")
    else:
        dtype = precision_of(num_gpus) if num_gpus else _fastest_precision(config)
    _say(3, f"training {config.model.name} on the {'GPUs' if num_gpus else 'CPU'} in {dtype} into {directory}")
    config = config.replace({"run.dir": str(directory), "precision.dtype": dtype, "batch.micro_batch": micro_batch})
    if run(config, num_processes=ranks if num_gpus else "auto").stopped != StopReason.NONE:
        return START_AGAIN
    _print_results(directory, config, dtype)
    return FINISHED


def _say(number: int, text: str) -> None:
    print(f"[{number}/3] {text}", flush=True)


def next_run(runs: Path) -> tuple[Path, bool]:
    """Return the first of run-1, run-2, ... that has not finished, and whether it was begun."""
    number = 1
    while _has_finished(runs / f"run-{number}"):
        number += 1
    directory = runs / f"run-{number}"
    return directory, (directory / "config.json").exists()


def _has_finished(run: Path) -> bool:
    status = read_status(run)
    return status is not None and status.state == "finished"


def precision_of(num_gpus: int) -> str:
    """Return the half precision of these GPUs, as `dali-train init` chooses it; fp32 where they have none."""
    dtype = half_precision(torch.cuda.get_device_capability()) or "fp32"
    _say(2, f"{plural(num_gpus, 'GPU')}: {dtype}")
    return dtype


def _fastest_precision(config: Config) -> str:
    """Return bf16 where this processor trains the model faster in it, else fp32."""
    num_classes = Manifest.read(config.data.root).num_classes
    speedup = bf16_speedup(config, build_model(config, num_classes, torch.device("meta")), num_classes)
    fastest = "bf16" if speedup >= FASTER else "fp32"
    compared = f"{speedup:.1f} times as fast as" if speedup != 1 else "no faster than"
    _say(2, f"no GPU, and bf16 is {compared} fp32: {fastest}")
    return fastest


def _print_results(directory: Path, config: Config, dtype: str) -> None:
    events = RunDirectory(directory).events
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
