"""DeiT-B on ImageNet-1k, without distillation. See deit-s.py for batch, repeats and color jitter.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit-b.py --data.root DATASET \
        --batch.micro_batch 128

Published: top-1 81.8 % (facebookresearch/deit, the defaults of main.py, 53 h on 8 V100).
Nobody has run this file to the end.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("deit-s.py"))
config = base.replace(
    {
        "model.name": "deit_base_patch16_224",
        "run.dir": "runs/deit-b",
        "run.published_top1": 0.818,
    }
)
