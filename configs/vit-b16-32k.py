"""ViT-B/16 on ImageNet-1k in batches of 32,768: our own recipe, unproven.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/vit-b16-32k.py --data.root DATASET

Nobody has run this file to the end.
It must beat the 72.7 % of vit-b16.py. Yardsticks: 79.15 % at batch 4,096 with Adam (AugReg in timm's results), 80.25 %
with SAM.

Why vit-b16.py is low: 11,729 steps, half of them warmup; clipping before LAMB, which is nearly scale-free; weight decay
and trust ratio on vectors; Mixup alone; no average of the weights. Here LAMB has its bias correction and leaves vectors
out.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("vit-b16.py"))
config = base.replace(
    {
        "data.augment": "rand-m9-mstd0.5",
        "model.kwargs": {"drop_path_rate": 0.1},
        "optimizer.bias_correction": True,
        "optimizer.exclude_vectors": True,
        "optimizer.clip_grad_norm": None,
        "schedule.name": "cosine",
        "schedule.warmup_epochs": 30,
        "schedule.step_every": "step",
        "mixup.alpha": 0.8,
        "mixup.cutmix_alpha": 1.0,
        "loss.name": "binary-cross-entropy",
        "ema.decay": 0.999,
        "ema.warmup": True,
        "precision.dtype": "bf16",
        "run.dir": "runs/vit-b16-32k",
        "run.published_top1": None,
    }
)
