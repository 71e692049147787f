"""ViT-B/32 on ImageNet-1k: ColossalAI's 32K-batch recipe, as published. See vit-b16.py for its sources.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/vit-b32.py --data.root DATASET

Published: 14.58 h on 4 A100 (1,831 images/s per GPU). No top-1 was published for this model.
"""

from dali_train.config import load_config

config = load_config("vit-b16.py").replace(
    model=dict(name="vit_base_patch32_224"),
    run=dict(dir="runs/vit-b32", published_top1=None),
)
