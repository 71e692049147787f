"""ViT-B/16 as in vit-b16.py, with RandAugment in place of the flip, as in the source's later code.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/vit-b16-randaugment.py --data.root DATASET

Published: "+4.1 % accuracy with +10 s an epoch" (ColossalAI pull request 147, which names neither model nor base), so
    about
76.8 %.
Nobody has run this file to the end.

The source's RandAugment (rand_augment.py beside its DALI loader) is Google's at full strength, 10 of 10, on decoded
batches. It draws two different operators for an entire micro-batch; here each image has its own two.
vit-b16-randaugment-dali.py is the other reading of "magnitude 10".
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("vit-b16.py"))
config = base.replace(
    {
        "data.augment": "colossalai",
        "data.horizontal_flip": 0.0,
        "run.dir": "runs/vit-b16-randaugment",
        "run.published_top1": None,
    }
)
