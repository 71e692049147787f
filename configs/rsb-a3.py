"""ResNet-50 on ImageNet-1k: ResNet strikes back, procedure A3. See rsb-a1.py for batch and threshold.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/rsb-a3.py --data.root DATASET \
        --batch.micro_batch 512

Published: top-1 78.1 % at 224 pixels after 100 epochs at 160, about 15 h on 4 V100 (arXiv 2110.00476, table 2).
Nobody has run this file to the end.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("rsb-a1.py"))
config = base.replace(
    {
        "data.train_size": 160,
        "data.augment": "rand-m6-mstd0.5-inc1",
        "data.repeats": 1,
        "data.split_repeats": False,
        "model.kwargs": {},
        "optimizer.lr": 8e-3,
        "optimizer.weight_decay": 0.02,
        "schedule.warmup_lr": 8e-7,
        "loss.label_smoothing": 0.0,
        "mixup.alpha": 0.1,
        "run.epochs": 100,
        "run.dir": "runs/rsb-a3",
        "run.published_top1": 0.781,
    }
)
