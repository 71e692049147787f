"""ViT-B/16 on ImageNet-1k in batches of 32,768: our own recipe, unproven.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/vit-b16-32k.py --data.root DATASET

It must beat the 72.7 % of vit-b16.py. Yardsticks: 79.15 % at batch 4,096 with Adam (AugReg in timm's results), 80.25 %
with SAM.

Why vit-b16.py is low: 11,730 steps, half of them warmup; clipping before LAMB, which is nearly scale-free; weight decay
and trust ratio on vectors; Mixup alone; no average of the weights. Here LAMB has its bias correction and leaves vectors
out.
"""

from dali_train.config import load_config

config = load_config("vit-b16.py").replace(
    data=dict(augment="rand-m9-mstd0.5"),
    model=dict(kwargs=dict(pos_drop_rate=None, proj_drop_rate=None, drop_path_rate=0.1)),
    optimizer=dict(kwargs={}, exclude_vectors=True, clip_grad_norm=None),
    schedule=dict(name="cosine", warmup_epochs=30, step_every="step"),
    mixup=dict(alpha=0.8, cutmix_alpha=1.0),
    loss=dict(name="binary-cross-entropy"),
    ema=dict(decay=0.999, warmup=True),
    precision=dict(dtype="bf16"),
    run=dict(dir="runs/vit-b16-32k", published_top1=None),
)
