"""DeiT III-B on ImageNet-1k with LAMB at 192 pixels; deit3-b-finetune.py follows. See deit3-s.py.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit3-b.py --data.root DATASET \
        --batch.micro_batch 256

Published: top-1 83.8 % after the fine-tune at 224 pixels (facebookresearch/deit, README_revenge.md).
"""

from dali_train.config import load_config

config = load_config("deit3-s.py").replace(
    data=dict(train_size=192, eval_size=192, eval_resize_to=192),
    model=dict(name="deit3_base_patch16_224", kwargs=dict(img_size=192, drop_path_rate=0.2)),
    optimizer=dict(lr=3e-3),
    run=dict(dir="runs/deit3-b", published_top1=None),
)
