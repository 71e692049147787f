"""torchvision's reference training: DistributedSampler, set_epoch, and a checkpoint at the end of each epoch.

The loop has what references/classification/train.py has for this; --resume goes on with the epoch behind the
checkpoint's.
"""

import sys
from pathlib import Path

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tools.yours.counting import EPOCHS, Log
from tools.yours.plain import Plain, image_folder


def main(images: Path, work: Path, batch_size: int) -> None:
    plain = Plain(work)
    dataset = image_folder(images)
    sampler: DistributedSampler = DistributedSampler(dataset)
    loader: DataLoader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=2)
    checkpoint = plain.load()
    log = Log(work, behind=(checkpoint["epoch"], len(loader)) if checkpoint else None)
    for epoch in range(checkpoint["epoch"] + 1 if checkpoint else 0, EPOCHS):
        sampler.set_epoch(epoch)
        for step, (batch, labels) in enumerate(loader, start=1):
            log.trains(epoch, step, labels)
            plain.train(batch, labels)
        plain.save(epoch=epoch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
