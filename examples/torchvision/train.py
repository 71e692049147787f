"""torchvision's reference training, unchanged, with this package's loaders: give its path and then its arguments.

    python examples/torchvision/train.py vision/references/classification/train.py --data-path DATASET --model resnet18

The script's function load_data is replaced, and what it makes DataLoaders of is a loader already.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from dali_train import EvalLoader, TrainLoader

POLICIES = {None: "none", "ta_wide": "trivial", "imagenet": "auto-imagenet", "cifar10": "auto-cifar10"}


class Batches:
    """A loader with what the script asks of its datasets, samplers and DataLoaders."""

    dataset = None  # its length would be compared with the images seen, and each is seen once

    def __init__(self, loader: TrainLoader | EvalLoader, arguments: Namespace) -> None:
        self.loader, self.arguments = loader, arguments
        self.classes = range(loader.num_classes)
        self.is_first = True

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self.is_first and isinstance(self.loader, TrainLoader):  # after --resume; a single process has no set_epoch
            self.loader.set_epoch(self.arguments.start_epoch)
        self.is_first = False
        return iter(self.loader)

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)


def load_data(training: str, validation: str, arguments: Namespace) -> tuple[Batches, Batches, Batches, Batches]:
    """Take the place of the script's, with its arguments."""
    if arguments.auto_augment not in POLICIES:
        known = ", ".join(filter(None, POLICIES))
        sys.exit(f"--auto-augment is {arguments.auto_augment}: use {known}, or leave it out")
    shared = {
        "batch_size": arguments.batch_size,
        "device": arguments.device,
        "interpolation": arguments.interpolation,
        "normalise": "imagenet",
    }
    train = TrainLoader(
        arguments.data_path,
        image_size=arguments.train_crop_size,
        augment=POLICIES[arguments.auto_augment],
        random_erasing=arguments.random_erase,
        repeats=arguments.ra_reps if arguments.ra_sampler else 1,
        mixup={"alpha": arguments.mixup_alpha, "cutmix_alpha": arguments.cutmix_alpha},
        **shared,
    )
    test = EvalLoader(
        arguments.data_path,
        image_size=arguments.val_crop_size,
        eval_resize_to=arguments.val_resize_size,
        **shared,
    )
    batches = [Batches(loader, arguments) for loader in (train, test)]
    return batches[0], batches[1], batches[0], batches[1]


def as_it_is(batches: Batches, **_: object) -> Batches:
    """Take the place of DataLoader."""
    return batches


def main() -> None:
    path = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(path.resolve().parent))  # of the modules beside it
    specification = spec_from_file_location("reference_training", path)
    assert specification is not None and specification.loader is not None
    script: Any = module_from_spec(specification)
    specification.loader.exec_module(script)
    torch.serialization.add_safe_globals([Namespace])  # in its checkpoints, which it reads with weights_only
    script.load_data, torch.utils.data.DataLoader = load_data, as_it_is
    script.main(script.get_args_parser().parse_args())


if __name__ == "__main__":
    main()
