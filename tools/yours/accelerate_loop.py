"""Accelerate's save_state, load_state and skip_first_batches, as its guide "Checkpointing" and its complete_cv_example.

More words choose `seedable`, use_seedable_sampler=True, to be paired with set_epoch as prepare_data_loader says, and
`stateful`, use_stateful_dataloader=True, with which load_state moves the loader and nothing is skipped.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from tools.yours.counting import EPOCHS, SAVE_EVERY, Log
from tools.yours.plain import image_folder, network


def main(images: Path, work: Path, batch_size: int, *kinds: str) -> None:
    stateful, seedable = "stateful" in kinds, "seedable" in kinds
    loading = DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    set_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = DataLoader(image_folder(images), batch_size=batch_size, shuffle=True, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    saved = sorted(work.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    first, done = 0, 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        first, done = divmod(int(saved[-1].name.removeprefix("step_")), len(loader))
    log = Log(work, behind=divmod(int(saved[-1].name.removeprefix("step_")), 12) if saved else None)
    for epoch in range(first, EPOCHS):
        if seedable:
            loader.set_epoch(epoch)
        skips = epoch == first and done and not stateful
        active = accelerator.skip_first_batches(loader, done) if skips else loader
        for step, (batch, labels) in enumerate(active, start=done + 1):
            log.trains(epoch, step, labels)
            accelerator.backward(F.cross_entropy(model(batch), labels))
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVE_EVERY == 0:
                accelerator.save_state(str(work / f"step_{epoch * len(loader) + step}"))
        done = 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
