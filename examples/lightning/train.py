"""Lightning with this package's loaders: python examples/lightning/train.py DATASET [--devices 2] [--ckpt-path FILE]

Lightning saves the position of the loader with each checkpoint, and loads it, on any number of devices.
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from torch import nn

from dali_train import EvalLoader, TrainLoader


class Images(lightning.LightningDataModule):
    """The two loaders of a dataset; `settings` are those of `TrainLoader`."""

    def __init__(self, dataset: str, *, batch_size: int, image_size: int, **settings: object) -> None:
        super().__init__()
        self.dataset, self.settings = dataset, settings
        self.shared = {"batch_size": batch_size, "image_size": image_size}
        self.train: TrainLoader | None = None

    def place(self) -> dict[str, object]:
        assert self.trainer is not None
        strategy = self.trainer.strategy
        return {"dp_rank": self.trainer.global_rank, "dp_size": self.trainer.world_size, "device": strategy.root_device}

    def train_dataloader(self) -> TrainLoader:
        if self.train is None:  # Lightning asks again in every epoch, which goes on where the last one ended
            self.train = TrainLoader(self.dataset, **self.shared, **self.settings, **self.place())
        return self.train

    def val_dataloader(self) -> EvalLoader:
        return EvalLoader(self.dataset, **self.shared, **self.place())


class Classifier(lightning.LightningModule):
    """A small network without dropout and BatchNorm, which takes its own steps: a step is over when the loader says."""

    def __init__(self, num_classes: int, num_micro_batches: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.num_micro_batches = num_micro_batches  # of a step, on all devices
        self.network = nn.Sequential(
            nn.Conv2d(3, 32, 16, 16), nn.GELU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, num_classes)
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        images, targets = batch
        ends_step, optimizer = self.trainer.datamodule.train.ends_step, self.optimizers()
        loss = F.cross_entropy(self.network(images), targets)
        self.trainer.model.require_backward_grad_sync = ends_step  # of DDP: what no_sync() sets
        self.manual_backward(loss * self.trainer.world_size / self.num_micro_batches)
        if ends_step:
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        correct = (self.network(images).argmax(dim=1) == labels).float().mean()
        self.log("top1", correct, batch_size=len(labels), on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--ckpt-path")
    parser.add_argument("--root", default="runs/lightning")
    options = parser.parse_args()
    images = Images(options.dataset, batch_size=8, global_batch=48, image_size=64, mixup={"alpha": 0.2})
    lightning.seed_everything(0)
    every_step = lightning.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, dirpath=options.root)
    trainer = lightning.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_epochs=options.epochs,
        max_steps=options.max_steps,
        reload_dataloaders_every_n_epochs=1,  # epochs differ by a step, and Lightning remembers the length of the first
        callbacks=[every_step],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=options.root,
    )
    num_classes = EvalLoader(options.dataset, batch_size=1, device="cpu", dp_rank=0, dp_size=1).num_classes
    trainer.fit(Classifier(num_classes, num_micro_batches=6), images, ckpt_path=options.ckpt_path)


if __name__ == "__main__":
    main()
