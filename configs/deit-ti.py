"""DeiT-Ti on ImageNet-1k, without distillation. See deit-s.py for batch, repeats and color jitter.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit-ti.py --data.root DATASET \
        --batch.micro_batch 128

Published: top-1 72.2 % (facebookresearch/deit, the defaults of main.py).
"""

from dali_train.config import load_config

config = load_config("deit-s.py").replace(
    model=dict(name="deit_tiny_patch16_224"),
    run=dict(dir="runs/deit-ti", published_top1=0.722),
)
