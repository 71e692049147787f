"""DeiT-B on ImageNet-1k, without distillation. See deit-s.py for batch, repeats and color jitter.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit-b.py --data.root DATASET \
        --batch.micro_batch 128

Published: top-1 81.8 % (facebookresearch/deit, the defaults of main.py, 53 h on 8 V100).
"""

from dali_train.config import load_config

config = load_config("deit-s.py").replace(
    model=dict(name="deit_base_patch16_224"),
    run=dict(dir="runs/deit-b", published_top1=0.818),
)
