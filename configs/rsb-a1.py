"""ResNet-50 on ImageNet-1k: ResNet strikes back, procedure A1.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/rsb-a1.py --data.root DATASET \
        --batch.micro_batch 512

Published: top-1 80.4 % after 600 epochs, about 110 h on 4 V100 (arXiv 2110.00476, table 2).

batch.micro_batch is small so that 128 GPUs can share the batch. With 4 GPUs use 512, as above: it is faster, and
BatchNorm sees as many images as in the source.

The batch is no multiple of three: as in the source, the repeats of an image may be in different micro-batches.

The threshold of the binary cross entropy, 0.2, and RandAugment's increasing form are not in the paper but in timm's
published arguments; mmpretrain's configs of these procedures have the increasing form too.
"""

from dali_train.config import Config

config = Config(
    data=dict(
        root="data/imagenet",
        interpolation="bicubic",
        augment="rand-m7-mstd0.5-inc1",
        repeats=3,
        normalise="imagenet",
        eval_resize_to=236,  # crop ratio 0.95
    ),
    model=dict(name="resnet50", kwargs=dict(drop_path_rate=0.05), channels_last=True),
    loss=dict(name="binary-cross-entropy", target_threshold=0.2, label_smoothing=0.1),
    optimizer=dict(lr=5e-3, weight_decay=0.01),
    schedule=dict(name="cosine", warmup_epochs=5, warmup_lr=5e-7, min_lr=1e-6, decay_from="start", step_every="epoch"),
    batch=dict(global_batch=2048, micro_batch=16),
    mixup=dict(alpha=0.2, cutmix_alpha=1.0),
    precision=dict(dtype="fp16"),
    run=dict(dir="runs/rsb-a1", epochs=600, published_top1=0.804),
)
