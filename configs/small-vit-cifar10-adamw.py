"""A small ViT on CIFAR-10 with AdamW in batches of 512: what small-vit-cifar10-lamb.py is compared with.

    dali-train data convert cifar10 --download --source downloads/cifar10 --out data/cifar10 --format raw
    dali-train train --config configs/small-vit-cifar10-adamw.py

0.2 million parameters, 16 patches of 8 x 8 pixels. Measured: 69.96 % in 41 minutes on one CPU core that multiplies in
bfloat16 (AVX512_BF16 or AMX); elsewhere --precision.dtype fp32. docs/measurements/optimizers.md has the
curves. No accuracy was published.
"""

from dali_train.config import Config

config = Config(
    data=dict(
        root="data/cifar10",
        train_size=32,
        crop_side=32,
        crop_padding=4,
        normalise="cifar10",
        eval_size=32,
        eval_resize_to=32,
    ),
    model=dict(
        name="vit_tiny_patch16_224",
        kwargs=dict(
            img_size=32,
            patch_size=8,
            embed_dim=64,
            depth=4,
            num_heads=1,
            weight_init="moco",  # Xavier's; timm's default, 0.02 everywhere, is a sixth of it at this width
        ),
    ),
    optimizer=dict(name="adamw", lr=1e-3, weight_decay=0.05, eps=1e-8),
    schedule=dict(name="cosine", warmup_epochs=5),
    batch=dict(global_batch=512, micro_batch=512),
    precision=dict(dtype="bf16"),
    run=dict(dir="runs/small-vit-cifar10-adamw", epochs=100, eval_every_epochs=5),
)
