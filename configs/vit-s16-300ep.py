"""ViT-S/16 on ImageNet-1k for 300 epochs: big_vision's improved baseline. See vit-s16-90ep.py.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/vit-s16-300ep.py --data.root DATASET \
        --batch.micro_batch 128

Published: top-1 about 80 %; reproduced in torch with 79.75 % (EIFY/mup-vit).
Nobody has run this file to the end.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("vit-s16-90ep.py"))
config = base.replace(
    {
        "run.epochs": 300,
        "run.dir": "runs/vit-s16-300ep",
        "run.published_top1": 0.80,
    }
)
