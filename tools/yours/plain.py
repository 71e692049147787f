"""What the scripts that have no trainer share: a linear network under DDP and its checkpoint."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision import transforms
from torchvision.datasets import ImageFolder

from tools.yours.counting import NUM_IMAGES, SIZE

Checkpoint = dict[str, Any]


def image_folder(images: Path) -> ImageFolder:
    return ImageFolder(images / "train", transforms.ToTensor())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, NUM_IMAGES))


class Plain:
    """The network, its optimizer, and their checkpoint, which the first process writes."""

    def __init__(self, work: Path) -> None:
        dist.init_process_group("gloo")
        self._path = work / "checkpoint.pt"
        self._network = network()
        self._model = DistributedDataParallel(self._network)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.01)

    def load(self) -> Checkpoint | None:
        """Load the checkpoint, if there is one, and return it."""
        if not self._path.exists():
            return None
        checkpoint: Checkpoint = torch.load(self._path, weights_only=False)
        self._network.load_state_dict(checkpoint["model"])
        self._optimizer.load_state_dict(checkpoint["optimizer"])
        return checkpoint

    def train(self, images: torch.Tensor, labels: torch.Tensor, *, weight: float = 1, ends_step: bool = True) -> None:
        self._model.require_backward_grad_sync = ends_step  # what no_sync() sets
        (F.cross_entropy(self._model(images), labels) * weight).backward()
        if ends_step:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def save(self, **position: object) -> None:
        if dist.get_rank() == 0:
            states = {"model": self._network.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save({**states, **position}, new := self._path.with_suffix(".new"))
            new.replace(self._path)
        dist.barrier()


def written(path: Path, write: Callable[[Path], object]) -> Path:
    """Return a dataset that the first process writes if there is none yet."""
    if os.environ["RANK"] == "0" and not path.exists():
        write(path)
    dist.barrier()
    return path
