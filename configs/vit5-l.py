"""ViT-5-L on ImageNet-1k with LAMB at 192 pixels, 400 epochs; vit5-l-finetune.py follows. See vit5-b.py.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/vit5-l.py --data.root DATASET \
        --batch.micro_batch 256

Published: top-1 84.9 % after the fine-tune at 224 pixels (wangf3014/ViT-5, README.md at b7b0796).
"""

from dali_train.config import load_config

config = load_config("vit5-b.py").replace(
    model=dict(name="dali_vit5_large_patch16", kwargs=dict(img_size=192, drop_path_rate=0.35)),
    run=dict(dir="runs/vit5-l", epochs=400),
)
