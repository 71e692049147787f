"""ViT-B/16 on ImageNet-1k in batches of 32,768 with AdamW: the control of vit-b16-32k.py, unproven.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/vit-b16-32k-adamw.py --data.root DATASET

beta2 0.95 and a rate that grows with the square root of the batch, from AugReg's 1e-3 at 4,096: OpenCLIP trained at
160K with AdamW, beta2 0.95 and 2e-3, and standard optimizers match LARS and LAMB when they are tuned (arXiv
2102.06356).
"""

from dali_train.config import load_config

config = load_config("vit-b16-32k.py").replace(
    optimizer=dict(name="adamw", lr=1e-3 / 4, scale_lr="sqrt", betas=(0.9, 0.95), eps=1e-8, clip_grad_norm=1.0),
    run=dict(dir="runs/vit-b16-32k-adamw"),
)
