"""This project's TrainLoader in a plain loop. Its state is a part of the checkpoint.

A step has 48 images, in micro-batches of 8, on any number of processes.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from dali_train import TrainLoader
from dali_train.cli import main as dali_train
from tools.yours.counting import EPOCHS, SAVE_EVERY, SIZE, Log
from tools.yours.plain import Plain, written

MICRO_BATCHES = 6  # of a step, on all processes


def main(images: Path, work: Path) -> None:
    plain = Plain(work)
    index = written(
        images.with_name("index"), lambda path: dali_train(["data", "index", str(images), "--out", str(path)])
    )
    train = TrainLoader(index, batch_size=8, global_batch=8 * MICRO_BATCHES, image_size=SIZE)
    checkpoint = plain.load()
    if checkpoint:
        train.load_state_dict(checkpoint["train"])
    log = Log(work, behind=checkpoint["behind"] if checkpoint else None)
    weight = dist.get_world_size() / MICRO_BATCHES  # of a micro-batch's loss: DDP averages over processes
    for epoch in range(train.epoch, EPOCHS):
        for batch, labels in train:
            step = (train.step - train.ends_step) % 12 + 1
            log.trains(epoch, step, labels)
            plain.train(batch, labels, weight=weight, ends_step=train.ends_step)
            if train.ends_step and step % SAVE_EVERY == 0:
                plain.save(train=train.state_dict(), behind=(epoch, step))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
