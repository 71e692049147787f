"""Train on any number of processes: torchrun --nproc-per-node 2 examples/ddp/loop.py DATASET; resume on any other"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dali_train import TrainLoader


def main(dataset: str, checkpoint: Path = Path("checkpoint.pt"), epochs: int = 3) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train = TrainLoader(dataset, batch_size=8, global_batch=48, image_size=64, mixup=dict(alpha=0.2), device=device)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 32, 16, 16), nn.GELU(), nn.Flatten(), nn.Linear(512, train.num_classes))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        train.load_state_dict(saved["train"])
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    weight = dist.get_world_size() / 6  # of a micro-batch's loss: a step has six, and DDP averages over processes
    for _ in range(train.epoch, epochs):
        for images, targets in train:
            model.require_backward_grad_sync = train.ends_step  # what no_sync() sets
            (F.cross_entropy(model(images), targets) * weight).backward()
            if train.ends_step:
                optimizer.step()
                optimizer.zero_grad()
                if dist.get_rank() == 0:
                    parts = {"train": train, "model": network, "optimizer": optimizer}
                    torch.save({name: part.state_dict() for name, part in parts.items()}, f"{checkpoint}.new")
                    Path(f"{checkpoint}.new").replace(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *(Path(word) for word in sys.argv[2:]))
