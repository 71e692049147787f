"""ViT-B/16 on CIFAR-10 with AdamW: the hybrid-parallel part of the tutorial, here data parallel. See
vit-b16-cifar10.py.

    torchrun --nproc-per-node 1 -m dali_train train --config configs/vit-b16-cifar10-adamw.py --data.root DATASET

No accuracy was published.
"""

from dali_train.config import load_config

config = load_config("vit-b16-cifar10.py").replace(
    optimizer=dict(name="adamw", lr=3e-3, weight_decay=0.3, eps=1e-8, kwargs={}),
    schedule=dict(name="cosine", warmup_epochs=32),
    loss=dict(label_smoothing=0.1),
    mixup=dict(alpha=0.0),
    model=dict(kwargs=dict(pos_drop_rate=None, proj_drop_rate=None), activation_checkpointing=True),
    batch=dict(global_batch=256),
    run=dict(dir="runs/vit-b16-cifar10-adamw"),
)
