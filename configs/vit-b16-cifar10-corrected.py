"""ViT-B/16 on CIFAR-10 as in vit-b16-cifar10.py, with training images that are enlarged as the test images are.

    torchrun --nproc-per-node 1 -m dali_train train --config configs/vit-b16-cifar10-corrected.py --data.root DATASET

Not in the source: crops of 32 pixels with 4 of padding, enlarged to 224. No accuracy was published.
"""

from dali_train.config import load_config

config = load_config("vit-b16-cifar10.py").replace(
    data=dict(crop_side=32, crop_padding=4),
    run=dict(dir="runs/vit-b16-cifar10-corrected"),
)
