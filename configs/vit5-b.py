"""ViT-5-B on ImageNet-1k with LAMB at 192 pixels; vit5-b-finetune.py follows. See vit5-s.py.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/vit5-b.py --data.root DATASET \
        --batch.micro_batch 256

Published: top-1 84.2 % after the fine-tune at 224 pixels (wangf3014/ViT-5, README.md at b7b0796).
"""

from dali_train.config import load_config

config = load_config("vit5-s.py").replace(
    data=dict(train_size=192, eval_size=192, eval_resize_to=192),
    model=dict(name="dali_vit5_base_patch16", kwargs=dict(img_size=192, drop_path_rate=0.2)),
    optimizer=dict(lr=3e-3),
    run=dict(dir="runs/vit5-b", published_top1=None),
)
