"""ViT-B/16 as in vit-b16.py, with RandAugment in place of the flip, as in the source's later code.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/vit-b16-randaugment.py --data.root DATASET

Published: "+4.1 % accuracy with +10 s an epoch" (ColossalAI pull request 147, which names neither model nor base), so
about 76.8 %.

The source's RandAugment (rand_augment.py beside its DALI loader) is Google's at full strength, 10 of 10, on decoded
batches. It draws two different operators for an entire micro-batch; here each image has its own two.
vit-b16-randaugment-dali.py is the other reading of "magnitude 10".
"""

from dali_train.config import load_config

config = load_config("vit-b16.py").replace(
    data=dict(augment="colossalai", horizontal_flip=0.0),
    run=dict(dir="runs/vit-b16-randaugment", published_top1=None),
)
