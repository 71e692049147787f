"""timm's own train.py, unchanged, with this package's loaders: give its path and then its arguments.

    python examples/timm/train.py pytorch-image-models/train.py DATASET --model resnet18 --num-classes 10

train.py asks timm.data for its datasets and loaders; it gets ours, with the settings that its arguments mean.
"""

import io
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import timm.data
import torch
import torch.distributed as dist

import dali_train
from dali_train.cli import main as dali_train_command

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
ARGUMENTS = sys.argv[2:]


class Images:
    """What train.py takes for a dataset: it says which epoch comes."""

    def __init__(self, name: str, root: str, split: str, **_: object) -> None:
        self.root, self.split = root, split
        self.loader: dali_train.TrainLoader | None = None

    def set_epoch(self, epoch: int) -> None:
        if self.loader is not None:
            self.loader.set_epoch(epoch)


class Training:
    """What train.py takes for the loader of a `TrainLoader`. It mixes by itself, with mixup.until_epoch too."""

    batch_sampler = sampler = None
    mixup_enabled = False

    def __init__(self, images: Images, smoothing: float) -> None:
        assert images.loader is not None
        self.dataset, self.loader, self.smoothing = images, images.loader, smoothing

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Batches:
        for images, targets in self.loader:
            if self.smoothing:  # with mixup train.py leaves it to the loader
                targets = targets * (1 - self.smoothing) + self.smoothing / self.loader.num_classes
            yield images, targets


class Validation:
    """What train.py takes for the loader of an `EvalLoader`.

    It averages over processes after each batch, so each process needs as many: one that has a batch less takes the
    first of all once more.
    """

    def __init__(self, own: dali_train.EvalLoader, first: dali_train.EvalLoader) -> None:
        self.own, self.first = own, first

    def __len__(self) -> int:
        return len(self.first)

    def __iter__(self) -> Batches:
        yield from self.own
        if len(self.own) < len(self.first):
            yield next(iter(self.first))


def num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@cache
def settings(root: str) -> Any:
    """Return what `dali-train init --from-timm` makes of train.py's arguments."""
    # The schedule is train.py's own, which warms up for longer than it trains where it is told to.
    line = shlex.join(["train.py", *ARGUMENTS, "--sched", "cosine", "--warmup-epochs", "0"])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.py"
        # What it could not translate is of interest once, and much of it train.py does itself.
        quiet = dist.is_initialized() and dist.get_rank() > 0
        with redirect_stdout(io.StringIO() if quiet else sys.stderr):
            words = ["init", root, "--output", str(path), "--from-timm", line, "--ranks", str(num_processes())]
            if dali_train_command(words):
                sys.exit(2)
        return dali_train.load_config(path)


def create_loader(
    images: Images,
    input_size: Any,
    batch_size: int,
    *,
    device: torch.device,
    is_training: bool = False,
    collate_fn: Any = None,
    use_prefetcher: bool = True,
    **_: object,
) -> Training | Validation:
    """Take the place of timm's, with its arguments; the others are in the settings, from the command line."""
    if not use_prefetcher:
        sys.exit("--no-prefetcher: leave it out, since train.py would then mix what this loader has mixed")
    config = settings(images.root)
    if is_training:
        images.loader = dali_train.TrainLoader.from_config(config, device=device)
        mixing = collate_fn or SimpleNamespace(num_classes=images.loader.num_classes, label_smoothing=0.0)
        if mixing.num_classes != images.loader.num_classes:
            sys.exit(f"the dataset has other classes than the model: use --num-classes {images.loader.num_classes}")
        return Training(images, mixing.label_smoothing)
    config = config.replace({"batch.micro_batch": batch_size, "batch.global_batch": batch_size * num_processes()})
    own = dali_train.EvalLoader.from_config(config, device=device)
    first = dali_train.EvalLoader.from_config(config, device=device, dp_rank=0, dp_size=num_processes())
    return Validation(own, first)


if __name__ == "__main__":
    timm.data.create_dataset, timm.data.create_loader = Images, create_loader
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
