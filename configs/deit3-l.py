"""DeiT III-L on ImageNet-1k with LAMB at 192 pixels; deit3-l-finetune.py follows. See deit3-s.py.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit3-l.py --data.root DATASET \
        --batch.micro_batch 256

Published: top-1 84.9 % after the fine-tune at 224 pixels (facebookresearch/deit, README_revenge.md).
"""

from dali_train.config import load_config

config = load_config("deit3-b.py").replace(
    model=dict(name="deit3_large_patch16_224", kwargs=dict(drop_path_rate=0.45)),
    run=dict(dir="runs/deit3-l"),
)
