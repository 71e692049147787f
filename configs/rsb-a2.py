"""ResNet-50 on ImageNet-1k: ResNet strikes back, procedure A2. See rsb-a1.py for batch, repeats and threshold.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/rsb-a2.py --data.root DATASET \
        --batch.micro_batch 512

Published: top-1 79.8 % after 300 epochs, about 55 h on 4 V100 (arXiv 2110.00476, table 2).
Nobody has run this file to the end.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("rsb-a1.py"))
config = base.replace(
    {
        "optimizer.weight_decay": 0.02,
        "loss.label_smoothing": 0.0,
        "mixup.alpha": 0.1,
        "run.epochs": 300,
        "run.dir": "runs/rsb-a2",
        "run.published_top1": 0.798,
    }
)
