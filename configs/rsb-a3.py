"""ResNet-50 on ImageNet-1k: ResNet strikes back, procedure A3. See rsb-a1.py for batch and threshold.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/rsb-a3.py --data.root DATASET \
        --batch.micro_batch 512

Published: top-1 78.1 % at 224 pixels after 100 epochs at 160, about 15 h on 4 V100 (arXiv 2110.00476, table 2).
"""

from dali_train.config import load_config

config = load_config("rsb-a1.py").replace(
    data=dict(train_size=160, augment="rand-m6-mstd0.5-inc1", repeats=1),
    model=dict(kwargs=dict(drop_path_rate=None)),
    optimizer=dict(lr=8e-3, weight_decay=0.02),
    schedule=dict(warmup_lr=8e-7),
    loss=dict(label_smoothing=0.0),
    mixup=dict(alpha=0.1),
    run=dict(dir="runs/rsb-a3", epochs=100, published_top1=0.781),
)
