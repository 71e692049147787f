"""Hugging Face's Trainer: train(resume_from_checkpoint=True), which skips the batches that it counts as done."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from tools.yours.counting import EPOCHS, SAVE_EVERY, Log
from tools.yours.plain import image_folder, network


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class LoggingTrainer(Trainer):
    log_of_images: Log
    epoch = 0

    def training_step(self, model: nn.Module, inputs: dict[str, torch.Tensor], *more: Any) -> torch.Tensor:
        self.log_of_images.trains(self.epoch, self.state.global_step % 12 + 1, inputs["labels"])
        return super().training_step(model, inputs, *more)


class Epochs(TrainerCallback):
    def __init__(self, trainer: LoggingTrainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trainer.epoch = int(state.epoch + 1e-6)


def collate(rows: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    images, labels = zip(*rows, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}


def main(images: Path, work: Path, batch_size: int) -> None:
    arguments = TrainingArguments(
        output_dir=str(work),
        use_cpu=True,
        per_device_train_batch_size=batch_size,
        num_train_epochs=EPOCHS,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        dataloader_num_workers=2,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = LoggingTrainer(Classifier(), arguments, data_collator=collate, train_dataset=image_folder(images))
    trainer.add_callback(Epochs(trainer))
    saved = [int(path.name.removeprefix("checkpoint-")) for path in work.glob("checkpoint-*")]
    trainer.log_of_images = Log(work, behind=divmod(max(saved), 12) if saved else None)
    trainer.train(resume_from_checkpoint=bool(saved))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
