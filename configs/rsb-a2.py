"""ResNet-50 on ImageNet-1k: ResNet strikes back, procedure A2. See rsb-a1.py for batch, repeats and threshold.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/rsb-a2.py --data.root DATASET \
        --batch.micro_batch 512

Published: top-1 79.8 % after 300 epochs, about 55 h on 4 V100 (arXiv 2110.00476, table 2).
"""

from dali_train.config import load_config

config = load_config("rsb-a1.py").replace(
    optimizer=dict(weight_decay=0.02),
    loss=dict(label_smoothing=0.0),
    mixup=dict(alpha=0.1),
    run=dict(dir="runs/rsb-a2", epochs=300, published_top1=0.798),
)
