"""ConvNeXt-T on ImageNet-1k (arXiv 2201.03545).

    torchrun --nproc-per-node 8 -m dali_train train --config configs/convnext-t.py --data.root DATASET \
        --batch.micro_batch 128 --model.channels_last true

Published: top-1 82.1 % (facebookresearch/ConvNeXt 048efce, README.md; the file of weights is that of the average).

All settings are those of TRAINING.md's command and of main.py's defaults. timm leaves out the color jitter of 0.4 where
RandAugment is on. Biases, norms and LayerScale have no weight decay. The source trains in float32 by default; bfloat16
halves the time.
"""

from dali_train.config import Config

config = Config(
    data=dict(
        root="data/imagenet",
        interpolation="bicubic",
        augment="rand-m9-mstd0.5-inc1",
        random_erasing=0.25,
        random_erasing_fill="noise",
        normalise="imagenet",
    ),
    model=dict(name="convnext_tiny", kwargs=dict(drop_path_rate=0.1)),
    loss=dict(label_smoothing=0.1),
    optimizer=dict(name="adamw", lr=4e-3, weight_decay=0.05, eps=1e-8, clip_grad_norm=None),
    schedule=dict(name="cosine", warmup_epochs=20, warmup_lr=0.0, min_lr=1e-6),
    batch=dict(global_batch=4096, micro_batch=32),
    mixup=dict(alpha=0.8, cutmix_alpha=1.0),
    ema=dict(decay=0.9999),
    precision=dict(dtype="bf16"),
    run=dict(dir="runs/convnext-t", epochs=300, published_top1=0.821),
)
