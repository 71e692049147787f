"""torchdata's StatefulDataLoader over torch's DistributedSampler, its state_dict in the checkpoint.

The state is a process's own, so the checkpoint has those of all. A process that had none takes the first one's.
"""

import sys
from pathlib import Path

import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tools.yours.counting import EPOCHS, SAVE_EVERY, Log
from tools.yours.plain import Plain, image_folder


def main(images: Path, work: Path, batch_size: int) -> None:
    plain = Plain(work)
    dataset = image_folder(images)
    sampler: DistributedSampler = DistributedSampler(dataset)
    loader: StatefulDataLoader = StatefulDataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=2)
    checkpoint = plain.load()
    first, done = (0, 0)
    if checkpoint:
        first, done = checkpoint["behind"]
        states = checkpoint["loaders"]
        sampler.set_epoch(first)
        loader.load_state_dict(states[dist.get_rank() if dist.get_rank() < len(states) else 0])
    log = Log(work, behind=checkpoint["behind"] if checkpoint else None)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for step, (batch, labels) in enumerate(loader, start=done + 1):
            log.trains(epoch, step, labels)
            plain.train(batch, labels)
            if step % SAVE_EVERY == 0:
                states = [None] * dist.get_world_size()
                dist.all_gather_object(states, loader.state_dict())
                plain.save(loaders=states, behind=(epoch, step))
        done = 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
