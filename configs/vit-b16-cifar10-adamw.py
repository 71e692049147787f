"""ViT-B/16 on CIFAR-10 with AdamW: the hybrid-parallel part of the tutorial, here data parallel. See
vit-b16-cifar10.py.

    torchrun --nproc-per-node 1 -m dali_train train --config configs/vit-b16-cifar10-adamw.py --data.root DATASET

No accuracy was published.
Nobody has run this file to the end.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("vit-b16-cifar10.py"))
config = base.replace(
    {
        "optimizer.name": "adamw",
        "optimizer.lr": 3e-3,
        "optimizer.weight_decay": 0.3,
        "optimizer.eps": 1e-8,
        "optimizer.bias_correction": True,
        "schedule.name": "cosine",
        "schedule.warmup_epochs": 32,
        "loss.label_smoothing": 0.1,
        "mixup.alpha": 0.0,
        "model.kwargs": {},
        "model.activation_checkpointing": True,
        "batch.global_batch": 256,
        "run.dir": "runs/vit-b16-cifar10-adamw",
    }
)
