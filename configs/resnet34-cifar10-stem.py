"""ResNet-34 on CIFAR-10 with a stem for 32 x 32 pixels: a 3 x 3 convolution and no max-pool. See resnet34-cifar10.py.

    torchrun --nproc-per-node 2 -m dali_train train --config configs/resnet34-cifar10-stem.py --data.root DATASET

Published: top-1 95.3 % after 200 epochs (mmpretrain, with its own recipe for this network).
"""

from dali_train.config import load_config

config = load_config("resnet34-cifar10.py").replace(
    model=dict(name="dali_resnet34_cifar"),
    run=dict(dir="runs/resnet34-cifar10-stem", epochs=200, published_top1=0.953),
)
