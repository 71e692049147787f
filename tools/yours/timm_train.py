"""timm's own train.py and --resume, with a checkpoint of the last epoch or, by --recovery-interval, of its last steps.

The fourth word is `last` or `recovery`, the fifth train.py of a clone of huggingface/pytorch-image-models. Two things
are put into it: a log, where the loss of training is computed, and None for DDP's device_ids, which CPUs need.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.task import ClassificationTask

from tools.yours.counting import EPOCHS, NUM_IMAGES, SAVE_EVERY, SIZE, Log

OPTIONS = (
    *f"--model test_resnet --num-classes {NUM_IMAGES} --img-size {SIZE} --device cpu --workers 2".split(),
    *f"--epochs {EPOCHS} --warmup-epochs 0 --sched-on-updates --recovery-interval {SAVE_EVERY}".split(),
)


class Loss(LabelSmoothingCrossEntropy):
    """Logs the labels of each batch that is trained on; evaluation has another loss."""

    log: Log
    first_epoch: int
    steps_in_epoch: int
    done = 0

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        epochs, steps = divmod(Loss.done, Loss.steps_in_epoch)
        Loss.log.trains(Loss.first_epoch + epochs, steps + 1, labels)
        Loss.done += 1
        return super().forward(logits, labels)


def prepare_on_cpu(task: Any, device_ids: list[Any] | None = None, **settings: Any) -> Any:
    return prepare_distributed(task, None, **settings)


def newest(work: Path, kind: str) -> tuple[Path, tuple[int, int]] | None:
    """Return the checkpoint to resume from, and the last epoch and step in it."""
    if kind == "last":
        paths = list(work.glob("run/last.pth.tar"))
        return (paths[0], (0, Loss.steps_in_epoch)) if paths else None
    numbers = [tuple(map(int, path.name.split(".")[0].split("-")[1:])) for path in work.glob("run/recovery-*.pth.tar")]
    if not numbers:
        return None
    epoch, update = max(numbers)
    return work / "run" / f"recovery-{epoch}-{update}.pth.tar", (epoch, update + 1)


def main(images: Path, work: Path, batch_size: int, kind: str, program: Path) -> None:
    Loss.steps_in_epoch = NUM_IMAGES // (batch_size * int(os.environ["WORLD_SIZE"]))
    saved = newest(work, kind)
    Loss.first_epoch = saved[1][0] + 1 if saved else 0
    Loss.log = Log(work, behind=saved and saved[1])
    resume = ["--resume", str(saved[0])] if saved else []
    sys.argv = [str(program), str(images), *OPTIONS, "-b", str(batch_size), "--output", str(work)]
    sys.argv += ["--experiment", "run", *resume]
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    import timm.loss

    timm.loss.LabelSmoothingCrossEntropy = Loss
    prepare_distributed = ClassificationTask.prepare_distributed
    ClassificationTask.prepare_distributed = prepare_on_cpu
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
