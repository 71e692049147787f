"""DeiT III-L, fine-tuned at 224 pixels from the weights of deit3-l.py. See deit3-b-finetune.py.

    dali-train export runs/deit3-l --format timm
    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit3-l-finetune.py --data.root DATASET \
        --batch.micro_batch 64

Published: top-1 84.9 % after these 20 epochs (facebookresearch/deit, README_revenge.md).
"""

from dali_train.config import load_config

config = load_config("deit3-b-finetune.py").replace(
    model=dict(
        name="deit3_large_patch16_224",
        kwargs=dict(drop_path_rate=0.45),
        weights="runs/deit3-l/export/timm/model.safetensors",
    ),
    run=dict(dir="runs/deit3-l-finetune", published_top1=0.849),
)
