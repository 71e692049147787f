"""Does the trainer train as well as a plain loop? Both run the same recipe with many seeds.

    python -m tools.bench.plain --config configs/resnet34-cifar10.py --out plain.jsonl --seeds 10 \\
        precision.dtype=fp32 data.root=data/cifar10

The plain loop is what one would write around torch: the tfrecord package reads the records, torchvision's transforms
crop and flip, a DataLoader shuffles, and the model, its initial weights and the optimizer are timm's or torch's. Of
dali_train it uses the config alone, so that a fault anywhere else shows as a difference between the two. Every run is a
process of its own on one thread. The file gets a line per run; the same command continues where it was interrupted.
Printed is a table of all seeds, with the probability that two samples of one distribution differ so much
(Mann-Whitney's test, which asks for no normal distribution).
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from scipy.stats import mannwhitneyu
from tfrecord.reader import tfrecord_loader
from torchvision import transforms

from dali_train import load_config, run
from dali_train.config import Config
from tools.bench.turns import describe_machine


class Records(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A split whose images are stored raw, as (transformed image, label from 0)."""

    def __init__(self, split: Path, transform: Callable[[Any], torch.Tensor]) -> None:
        self.transform, self.images, self.labels = transform, [], []
        for shard in sorted(split.iterdir()):
            for record in tfrecord_loader(str(shard), None):
                size = int(record["image/height"][0]), int(record["image/width"][0]), 3
                self.images.append(np.frombuffer(record["image/encoded"], np.uint8).reshape(size))
                self.labels.append(int(record["image/class/label"][0]) - 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


def plain_loop(config: Config, seed: int) -> dict[str, float]:
    """Train `config` on one thread. Returns top-1 after the last epoch and the mean loss over the last epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, batch = config.data, config.batch
    normalise = transforms.Normalize([m / 255 for m in data.mean], [s / 255 for s in data.std])
    if data.crop_side is not None:
        crop: Any = transforms.RandomCrop(data.crop_side, padding=data.crop_padding)
    else:
        crop = transforms.RandomResizedCrop(data.train_size, data.crop_area, data.crop_aspect, antialias=True)
    flip = transforms.RandomHorizontalFlip(data.horizontal_flip)
    train = Records(
        Path(data.root) / "train",
        transforms.Compose([transforms.ToPILImage(), crop, flip, transforms.ToTensor(), normalise]),
    )
    test_size = transforms.Resize((data.eval_size, data.eval_size), antialias=True)
    test = Records(
        Path(data.root) / "validation",
        transforms.Compose([transforms.ToPILImage(), test_size, transforms.ToTensor(), normalise]),
    )
    model = timm.create_model(config.model.name, num_classes=len(set(test.labels)), **config.model.kwargs)
    optimizer = _optimizer(config, model)
    num_steps = int(config.run.epochs * len(train) / batch.global_batch)
    per_epoch = len(train) / batch.global_batch
    batches = _batches(train, batch.global_batch)
    losses = []
    dtype = {"bf16": torch.bfloat16}.get(config.precision.dtype)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(config, step, per_epoch)
        images, labels = next(batches)
        optimizer.zero_grad()
        num_micro_batches = batch.global_batch // batch.micro_batch
        total = 0.0
        for x, y in zip(images.chunk(num_micro_batches), labels.chunk(num_micro_batches), strict=True):
            weight, other = 1.0, y
            if config.mixup.alpha > 0:
                weight = float(np.random.default_rng((seed, step)).beta(config.mixup.alpha, config.mixup.alpha))
                order = torch.randperm(len(x))
                x, other = weight * x + (1 - weight) * x[order], y[order]
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                logits = model(x).float()
            loss = weight * F.cross_entropy(logits, y) + (1 - weight) * F.cross_entropy(logits, other)
            (loss / num_micro_batches).backward()
            total += loss.item() / num_micro_batches
        if config.optimizer.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad_norm)
        optimizer.step()
        losses.append(total)
    model.eval()
    correct = 0
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
        for x, y in torch.utils.data.DataLoader(test, 500):
            correct += int((model(x).argmax(1) == y).sum())
    return {"top1": correct / len(test), "loss": float(np.mean(losses[-math.ceil(per_epoch) :]))}


def _batches(train: Records, size: int) -> Iterator[Any]:
    while True:
        yield from torch.utils.data.DataLoader(train, size, shuffle=True, drop_last=True)


def _optimizer(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    settings = config.optimizer
    vectors = [p for p in model.parameters() if p.ndim < 2 and settings.exclude_vectors]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if not any(p is v for v in vectors)]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    decay = settings.weight_decay
    if settings.name == "sgd":
        return torch.optim.SGD(groups, settings.lr, weight_decay=decay, **settings.kwargs)
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, settings.lr, settings.betas, settings.eps, decay)
    if settings.name == "lamb":
        more = {"max_grad_norm": None, "always_adapt": not settings.exclude_vectors, **settings.kwargs}
        rates = {"betas": settings.betas, "eps": settings.eps}
        return timm.optim.Lamb(groups, settings.lr, weight_decay=decay, **rates, **more)
    sys.exit(f"optimizer.name is {settings.name}: the plain loop has sgd, adamw and lamb")


def _rate(config: Config, step: int, per_epoch: float) -> float:
    """Linear warmup, then a cosine or a line to 0; by epoch or by step."""
    schedule = config.schedule
    unit = 1.0 if schedule.step_every == "epoch" else per_epoch
    now = float(int(step / per_epoch)) if schedule.step_every == "epoch" else float(step)
    warmup, total = schedule.warmup_epochs * unit, config.run.epochs * unit
    if now < warmup:
        return config.optimizer.lr * (now + 1) / (warmup + 1)
    start = 0.0 if schedule.decay_from != "warmup-end" else warmup
    done = (now - start) / (total - start)
    return config.optimizer.lr * ((1 + math.cos(math.pi * done)) / 2 if schedule.name == "cosine" else 1 - done)


def trainer(config: Config, seed: int) -> dict[str, float]:
    """The same by `dali_train.run`, as a user calls it."""
    with tempfile.TemporaryDirectory() as directory:
        config = config.replace(
            {"data.seed": seed, "run.dir": directory, "data.num_threads": 1, "hooks.log_every_steps": 1}
        )
        result = run(config)
        events = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "train"]
    per_epoch = math.ceil(result.total_steps / config.run.epochs)
    return {"top1": result.epoch_accuracies[-1], "loss": float(np.mean(losses[-per_epoch:]))}


WAYS = {"trainer": trainer, "plain": plain_loop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe of a dataset that is stored raw (--format raw)")
    parser.add_argument("--out", type=Path, required=True, help="gets a JSON line per run")
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0 to N - 1 of each")
    parser.add_argument("--only", nargs=2, metavar=("WAY", "SEED"), help=argparse.SUPPRESS)  # in the process of one run
    parser.add_argument("changes", nargs="*", metavar="section.field=value", help="changes to the recipe")
    arguments = parser.parse_args()
    if arguments.only:
        from dali_train.config.command_line import config_with

        words = [f"--{change}" for change in arguments.changes]
        config = config_with(arguments.config, words, "plain")
        way, seed = arguments.only[0], int(arguments.only[1])
        line = {"way": way, "seed": seed, **WAYS[way](config, seed)}
        with arguments.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return
    load_config(arguments.config)
    for seed in range(arguments.seeds):
        for way in WAYS:
            if any((line["way"], line["seed"]) == (way, seed) for line in read(arguments.out)):
                continue
            print(f"{way}, seed {seed} of {arguments.seeds} ...", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "tools.bench.plain", *sys.argv[1:], "--only", way, str(seed)]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    print_table(read(arguments.out))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def print_table(lines: list[dict[str, Any]]) -> None:
    top1 = {way: [100 * line["top1"] for line in lines if line["way"] == way] for way in WAYS}
    print(describe_machine())
    for way, values in top1.items():
        losses = [line["loss"] for line in lines if line["way"] == way]
        error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        each = ", ".join(f"{value:.2f}" for value in values)
        print(
            f"{way:8} {np.mean(values):6.2f} +- {error:.2f} %, loss {np.mean(losses):.3f}, {len(values)} seeds: {each}"
        )
    print(f"Mann-Whitney: p = {mannwhitneyu(top1['trainer'], top1['plain']).pvalue:.3f}")


if __name__ == "__main__":
    main()
