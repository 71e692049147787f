"""LitData's StreamingDataLoader, the first process's state_dict in the checkpoint, which its README says is global.

36 chunks of 16 images each.
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter

from tools.yours.counting import EPOCHS, SAVE_EVERY, Log
from tools.yours.plain import Plain, image_folder, written


def write(images: Path, path: Path) -> None:
    """Write the chunks by the writer of litdata.optimize, which would wait for the other processes of a WORLD_SIZE."""
    number_of_processes, os.environ["WORLD_SIZE"] = os.environ["WORLD_SIZE"], "1"
    writer = BinaryWriter(str(path), chunk_size=16)
    for number, (image, label) in enumerate(image_folder(images)):
        writer[number] = {"image": image, "label": label}
    writer.done()
    writer.merge()
    os.environ["WORLD_SIZE"] = number_of_processes


def main(images: Path, work: Path, batch_size: int) -> None:
    plain = Plain(work)
    dataset = StreamingDataset(str(written(images.with_name("litdata"), partial(write, images))), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=2)
    checkpoint = plain.load()
    first, done = checkpoint["behind"] if checkpoint else (0, 0)
    if checkpoint:
        loader.load_state_dict(checkpoint["loader"])
    log = Log(work, behind=(first, done) if checkpoint else None)
    for epoch in range(first, EPOCHS):
        for step, batch in enumerate(loader, start=done + 1):
            log.trains(epoch, step, batch["label"])
            plain.train(batch["image"], torch.as_tensor(batch["label"]))
            if step % SAVE_EVERY == 0:
                plain.save(loader=loader.state_dict(), behind=(epoch, step))
        done = 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
