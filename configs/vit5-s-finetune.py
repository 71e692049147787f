"""ViT-5-S, fine-tuned at 224 pixels from the averaged weights of vit5-s.py.

    dali-train export runs/vit5-s --format timm
    torchrun --nproc-per-node 8 -m dali_train train --config configs/vit5-s-finetune.py --data.root DATASET \
        --batch.micro_batch 64

Published: top-1 82.2 %, see vit5-s.py (wangf3014/ViT-5, README.md at b7b0796).
"""

from dali_train.config import load_config

config = load_config("vit5-b-finetune.py").replace(
    model=dict(
        name="dali_vit5_small_patch16",
        kwargs=dict(img_size=224, drop_path_rate=0.05),
        weights="runs/vit5-s/export/timm/model.safetensors",
    ),
    run=dict(dir="runs/vit5-s-finetune", published_top1=0.822),
)
