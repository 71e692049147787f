"""ViT-5-L, fine-tuned at 224 pixels from the averaged weights of vit5-l.py.

    dali-train export runs/vit5-l --format timm
    torchrun --nproc-per-node 8 -m dali_train train --config configs/vit5-l-finetune.py --data.root DATASET \
        --batch.micro_batch 64

Published: top-1 84.9 % after these 20 epochs, 86.0 % at 384 pixels: see vit5-b-finetune.py (wangf3014/ViT-5, README.md
at b7b0796).
"""

from dali_train.config import load_config

config = load_config("vit5-b-finetune.py").replace(
    model=dict(
        name="dali_vit5_large_patch16",
        kwargs=dict(img_size=224, drop_path_rate=0.5),
        weights="runs/vit5-l/export/timm/model.safetensors",
    ),
    run=dict(dir="runs/vit5-l-finetune", published_top1=0.849),
)
