"""ViT-B/16 as in vit-b16.py, with a rate that moves at every optimizer step instead of once per epoch.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/vit-b16-per-step.py --data.root DATASET

Not in the source: 39 small steps per epoch instead of one jump. Hours as vit-b16.py; no top-1 was published.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("vit-b16.py"))
config = base.replace({"schedule.step_every": "step", "run.dir": "runs/vit-b16-per-step", "run.published_top1": None})
