"""ResNet-50 on ImageNet-1k with LARS in batches of 40,448: MLPerf Training v4.0. See resnet50-lars-57k.py.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/resnet50-lars-40k.py --data.root DATASET

Published: 76.2 % in 70 epochs; the target is 75.9 % (MLPerf Training v4.0, logs and configs).
"""

from dali_train.config import load_config

config = load_config("resnet50-lars-57k.py").replace(
    optimizer=dict(lr=19.4, weight_decay=1e-4),
    schedule=dict(warmup_epochs=24),
    batch=dict(global_batch=40_448, micro_batch=158),
    run=dict(dir="runs/resnet50-lars-40k", epochs=70),
)
