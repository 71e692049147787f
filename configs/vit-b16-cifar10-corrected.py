"""ViT-B/16 on CIFAR-10 as in vit-b16-cifar10.py, with training images that are enlarged as the test images are.

    torchrun --nproc-per-node 1 -m dali_train train --config configs/vit-b16-cifar10-corrected.py --data.root DATASET

Not in the source: crops of 32 pixels with 4 of padding, enlarged to 224. No accuracy was published.
Nobody has run this file to the end.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("vit-b16-cifar10.py"))
config = base.replace(
    {
        "data.crop_side": 32,
        "data.crop_padding": 4,
        "run.dir": "runs/vit-b16-cifar10-corrected",
    }
)
