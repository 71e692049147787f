"""This package's loader with torchtitan's interface, as a configuration of its own."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

from dali_train import TrainLoader


class ImageDataLoader(BaseDataLoader):
    """Batches as torchtitan's Trainer takes them, epoch after epoch: ({"input": images}, labels).

    The Trainer builds it with a data-parallel coordinate and the size of a micro-batch. torchtitan moves tensors to the
    device itself, so `settings` need no device unless a GPU decodes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`dataset_path` is the dataset."""

        global_batch: int
        """training.global_batch_size: torchtitan does not hand it on, and the state needs it."""
        settings: dict[str, Any] = field(default_factory=dict)
        """Keywords of `TrainLoader`."""

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: object) -> None:
        self.loader = TrainLoader(
            config.dataset_path,
            batch_size=local_batch_size,
            global_batch=config.global_batch,
            dp_rank=dp_rank,
            dp_size=dp_world_size,
            **{"device": "cpu", **config.settings},
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:  # torchtitan's Trainer counts steps, and ends when its data does
            for images, labels in self.loader:
                yield {"input": images}, labels

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:  # torchtitan's loaders take an empty one for none
            self.loader.load_state_dict(state_dict)
