"""Accelerate with this package's loader: torchrun --nproc-per-node 2 examples/accelerate/train.py DATASET

The same command on another number of processes goes on behind the last step that was saved.
"""

import argparse
import shutil
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from dali_train import EvalLoader, TrainLoader

MICRO_BATCHES = 6  # of a step, on all processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="leave in the middle, as a killed run does")
    parser.add_argument("--root", type=Path, default=Path("runs/accelerate"))
    options = parser.parse_args()
    # Without cpu=True several processes without a GPU would each train alone. Made before the loader, which
    # finds its coordinate in the process group.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    shared = {"batch_size": 8, "image_size": 64, "device": accelerator.device}
    train = TrainLoader(options.dataset, global_batch=8 * MICRO_BATCHES, mixup={"alpha": 0.2}, **shared)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 32, 16, 16), nn.GELU(), nn.Flatten(), nn.Linear(512, train.num_classes))
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9))
    accelerator.register_for_checkpointing(train)  # save_state and load_state now hold the loader's position
    saved = options.root / "last"
    if saved.exists():
        accelerator.load_state(saved)
    weight = accelerator.num_processes / MICRO_BATCHES  # of a micro-batch's loss: DDP averages over processes
    for epoch in range(train.epoch, options.epochs):
        for images, targets in train:
            with nullcontext() if train.ends_step else accelerator.no_sync(model):
                accelerator.backward(F.cross_entropy(model(images), targets) * weight)
            if train.ends_step:
                optimizer.step()
                optimizer.zero_grad()
                save(accelerator, saved)
                if train.step == options.stop_after:
                    return
        correct = torch.zeros((), device=accelerator.device)
        validation = EvalLoader(options.dataset, **shared)
        with torch.inference_mode():
            for images, labels in validation:
                correct += (network(images).argmax(dim=1) == labels).sum()
        total = accelerator.reduce(correct)  # after the loop: a process may have a batch less than another
        accelerator.print(f"epoch {epoch}, step {train.step}: {int(total)} right")
    accelerator.end_training()


def save(accelerator: Accelerator, saved: Path) -> None:
    """Save, and replace the last checkpoint only when the new one is whole."""
    new, old = saved.with_name("new"), saved.with_name("old")
    accelerator.save_state(new)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if saved.exists():
            saved.rename(old)
        new.rename(saved)
        shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
