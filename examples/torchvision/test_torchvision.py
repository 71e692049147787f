"""The script itself is not in torchvision's package: TORCHVISION_REFERENCE=references/classification/train.py."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.conftest import Start, load_program

TRAIN = Path(__file__).with_name("train.py")
ARGUMENTS = {
    "batch_size": 8,
    "device": "cpu",
    "interpolation": "bilinear",
    "train_crop_size": 32,
    "val_crop_size": 32,
    "val_resize_size": 36,
    "auto_augment": "ta_wide",
    "random_erase": 0.1,
    "ra_sampler": False,
    "mixup_alpha": 0.2,
    "cutmix_alpha": 1.0,
    "start_epoch": 0,
}


def batches(dataset: Path, **arguments: Any) -> tuple[Any, Any]:
    program = load_program(TRAIN)
    given = Namespace(data_path=str(dataset), **{**ARGUMENTS, **arguments})
    train, test, sampler, _ = program.load_data("unused", "unused", given)
    assert sampler is train
    return program.as_it_is(train, batch_size=8, num_workers=4), test


def test_a_resumed_epoch_is_that_of_a_whole_run(dataset: Path) -> None:
    whole, test = batches(dataset)
    assert len(whole) == 25 and whole.classes == range(2)
    epochs = [list(whole), list(whole)]
    (images, targets), resumed = epochs[1][0], next(iter(batches(dataset, start_epoch=1)[0]))
    assert torch.equal(resumed[0], images) and torch.equal(resumed[1], targets)
    assert images.shape == (8, 3, 32, 32) and targets.shape == (8, 2)
    assert not torch.equal(epochs[0][0][0], images)
    assert sum(len(labels) for _, labels in test) == 10


def test_a_policy_that_there_is_not(dataset: Path) -> None:
    with pytest.raises(SystemExit, match="--auto-augment is ra: use ta_wide, imagenet, cifar10"):
        batches(dataset, auto_augment="ra")


@pytest.mark.skipif("TORCHVISION_REFERENCE" not in os.environ, reason=str(__doc__))
def test_the_script_itself(dataset: Path, tmp_path: Path, start: Start) -> None:
    words = "--model shufflenet_v2_x0_5 --batch-size 16 --train-crop-size 64 --val-resize-size 72 --val-crop-size 64 "
    words += "--device cpu --lr 0.01 --mixup-alpha 0.2 --auto-augment ta_wide --random-erase 0.1 --epochs"
    script = os.environ["TORCHVISION_REFERENCE"]
    command = [script, "--data-path", dataset, *words.split()]
    assert start(TRAIN, *command, "1").wait() == 0
    assert start(TRAIN, *command, "2", "--resume", "model_0.pth").wait() == 0
    assert torch.load(tmp_path / "model_1.pth", weights_only=False)["epoch"] == 1
