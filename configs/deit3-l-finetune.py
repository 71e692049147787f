"""DeiT III-L, fine-tuned at 224 pixels from the weights of deit3-l.py. See deit3-b-finetune.py.

    dali-train export runs/deit3-l --format timm
    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit3-l-finetune.py --data.root DATASET \
        --batch.micro_batch 64

Published: top-1 84.9 % after these 20 epochs (facebookresearch/deit, README_revenge.md).
Nobody has run this file to the end.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("deit3-b-finetune.py"))
config = base.replace(
    {
        "model.name": "deit3_large_patch16_224",
        "model.kwargs.drop_path_rate": 0.45,
        "model.weights": "runs/deit3-l/export/timm/model.safetensors",
        "run.dir": "runs/deit3-l-finetune",
        "run.published_top1": 0.849,
    }
)
