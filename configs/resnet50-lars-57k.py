"""ResNet-50 on ImageNet-1k with LARS in batches of 57,344: MLPerf Training v4.0.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/resnet50-lars-57k.py --data.root DATASET

Published: 76.2 % in 77 epochs on 448 nodes; the target is 75.9 % (MLPerf Training v4.0, logs and configs).
"""

from dali_train.config import Config

config = Config(
    data=dict(root="data/imagenet", normalise="imagenet"),
    model=dict(name="resnet50", channels_last=True),
    loss=dict(label_smoothing=0.1),
    optimizer=dict(
        name="lars",
        lr=23.0,
        kwargs=dict(momentum=0.95, trust_coeff=1e-3),
        weight_decay=2.5e-5,
        eps=0.0,
        clip_grad_norm=None,
    ),
    schedule=dict(name="polynomial", power=2.0, warmup_epochs=32),
    batch=dict(global_batch=57_344, micro_batch=64),
    precision=dict(dtype="fp16"),
    run=dict(dir="runs/resnet50-lars-57k", epochs=78, published_top1=0.762),
)
