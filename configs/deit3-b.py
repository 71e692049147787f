"""DeiT III-B on ImageNet-1k with LAMB at 192 pixels; deit3-b-finetune.py follows. See deit3-s.py.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit3-b.py --data.root DATASET \
        --batch.micro_batch 256

Published: top-1 83.8 % after the fine-tune at 224 pixels (facebookresearch/deit, README_revenge.md).
Nobody has run this file to the end.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("deit3-s.py"))
config = base.replace(
    {
        "data.train_size": 192,
        "data.eval_size": 192,
        "data.eval_resize_to": 192,
        "model.name": "deit3_base_patch16_224",
        "model.kwargs": {"img_size": 192, "drop_path_rate": 0.2},
        "optimizer.lr": 3e-3,
        "run.dir": "runs/deit3-b",
        "run.published_top1": None,
    }
)
