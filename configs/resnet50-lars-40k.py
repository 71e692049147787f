"""ResNet-50 on ImageNet-1k with LARS in batches of 40,448: MLPerf Training v4.0. See resnet50-lars-57k.py.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/resnet50-lars-40k.py --data.root DATASET

Published: 76.2 % in 70 epochs; the target is 75.9 % (MLPerf Training v4.0, logs and configs).
Nobody has run this file to the end.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("resnet50-lars-57k.py"))
config = base.replace(
    {
        "optimizer.lr": 19.4,
        "optimizer.weight_decay": 1e-4,
        "schedule.warmup_epochs": 24,
        "batch.global_batch": 40_448,
        "batch.micro_batch": 158,
        "run.epochs": 70,
        "run.dir": "runs/resnet50-lars-40k",
    }
)
