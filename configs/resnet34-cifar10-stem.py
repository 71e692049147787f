"""ResNet-34 on CIFAR-10 with a stem for 32 x 32 pixels: a 3 x 3 convolution and no max-pool. See resnet34-cifar10.py.

    torchrun --nproc-per-node 2 -m dali_train train --config configs/resnet34-cifar10-stem.py --data.root DATASET

Published: top-1 95.3 % after 200 epochs (mmpretrain, with its own recipe for this network).
Nobody has run this file to the end.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("resnet34-cifar10.py"))
config = base.replace(
    {
        "model.name": "dali_resnet34_cifar",
        "run.epochs": 200,
        "run.dir": "runs/resnet34-cifar10-stem",
        "run.published_top1": 0.953,
    }
)
