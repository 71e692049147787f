"""ViT-B/16 as in vit-b16.py, with a rate that moves at every optimizer step instead of once per epoch.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/vit-b16-per-step.py --data.root DATASET

Not in the source: 39 small steps per epoch instead of one jump. Hours as vit-b16.py; no top-1 was published.
"""

from dali_train.config import load_config

config = load_config("vit-b16.py").replace(
    schedule=dict(step_every="step"),
    run=dict(dir="runs/vit-b16-per-step", published_top1=None),
)
