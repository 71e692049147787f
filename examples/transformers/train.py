"""Hugging Face's Trainer with this package's loader: torchrun --nproc-per-node 2 examples/transformers/train.py DATASET

With --resume it goes on from the newest checkpoint, on any number of processes that divides the micro-batches.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dali_train import EvalLoader, TrainLoader

MICRO_BATCHES = 6  # of a step, on all processes
POSITION = "loader.json"


class Batches:
    """Batches by name, epoch after epoch: without a length the Trainer counts steps alone, since epochs differ by
    one."""

    def __init__(self, loader: TrainLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            for images, labels in self.loader:
                yield {"pixel_values": images, "labels": labels}


class Position(TrainerCallback):
    """Saves the loader's position with each checkpoint, and tells the Trainer the true epoch."""

    def __init__(self, loader: TrainLoader) -> None:
        self.loader = loader

    def on_step_end(self, args, state, control, **kwargs):
        state.epoch = self.loader.epoch

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            (folder / POSITION).write_text(json.dumps(self.loader.state_dict()))


class ImageTrainer(Trainer):
    """Trains from a `TrainLoader`, and evaluates every image of an `EvalLoader` once."""

    def __init__(self, *, loader: TrainLoader, validation: EvalLoader, **options: object) -> None:
        super().__init__(**options, eval_dataset=validation, callbacks=[Position(loader)])
        self.loader, self.validation = loader, validation

    def get_train_dataloader(self) -> Batches:
        return Batches(self.loader)

    def train(self, resume_from_checkpoint: str | None = None, **options: object) -> object:
        if resume_from_checkpoint:
            self.loader.load_state_dict(json.loads((Path(resume_from_checkpoint) / POSITION).read_text()))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)

    def evaluate(self, *args: object, **options: object) -> dict[str, float]:
        """The Trainer's own gathers each batch, and would wait for ever for a process that has one less."""
        model = self.model.eval()
        counts = torch.zeros(2, device=self.args.device)
        with torch.inference_mode():
            for images, labels in self.validation:
                right = (model(images)["logits"].argmax(dim=1) == labels).sum()
                counts += torch.stack([right, torch.full_like(right, len(labels))])
        right, total = self.accelerator.reduce(counts).tolist()
        metrics = {"eval_top1": right / total}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class Classifier(nn.Module):
    """A small network without dropout and BatchNorm, with the interface of an AutoModelForImageClassification."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(3, 32, 16, 16), nn.GELU(), nn.Flatten(), nn.Linear(512, num_classes))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.network(pixel_values)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume", metavar="CHECKPOINT", help="a folder checkpoint-N")
    parser.add_argument("--root", default="runs/transformers")
    options = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=options.root,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=8,
        learning_rate=0.02,
        optim="sgd",
        lr_scheduler_type="constant",
        ignore_data_skip=True,  # the loader goes on by itself
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        logging_steps=4,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    shared = {"batch_size": 8, "image_size": 64, "device": arguments.device}  # asking for it makes the process group
    loader = TrainLoader(options.dataset, global_batch=8 * MICRO_BATCHES, **shared)
    if MICRO_BATCHES % arguments.world_size:
        parser.error(f"{arguments.world_size} processes: use a number that divides {MICRO_BATCHES}")
    arguments.gradient_accumulation_steps = MICRO_BATCHES // arguments.world_size
    arguments.max_steps = loader.steps(options.epochs)
    torch.manual_seed(0)
    trainer = ImageTrainer(
        model=Classifier(loader.num_classes),
        args=arguments,
        loader=loader,
        validation=EvalLoader(options.dataset, **shared),
    )
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()
