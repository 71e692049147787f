"""Lightning: Trainer.fit(ckpt_path=) with a checkpoint of ModelCheckpoint(every_n_train_steps=).

With a third word `stateful` the loader is torchdata's StatefulDataLoader, whose state Lightning saves and loads.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tools.yours.counting import EPOCHS, SAVE_EVERY, Log
from tools.yours.plain import image_folder, network


class Classifier(lightning.LightningModule):
    def __init__(self, log_of_images: Log) -> None:
        super().__init__()
        self.network = network()
        self.log_of_images = log_of_images

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        self.log_of_images.trains(self.current_epoch, batch_idx + 1, labels)
        return F.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main(images: Path, work: Path, batch_size: int, kind: str) -> None:
    lightning.seed_everything(0)
    settings: Any = {"batch_size": batch_size, "shuffle": True, "num_workers": 2}
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader: Any = StatefulDataLoader(image_folder(images), **settings)
    else:
        loader = DataLoader(image_folder(images), **settings)
    steps = [int(path.stem.rpartition("=")[2]) for path in work.glob("*.ckpt")]
    log = Log(work, behind=divmod(max(steps), 12) if steps else None)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(dirpath=work, filename="{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(log), loader, ckpt_path=work / f"step={max(steps)}.ckpt" if steps else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), "".join(sys.argv[4:]))
