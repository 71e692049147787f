"""ViT-B/16 on ImageNet-1k: ColossalAI's 32K-batch recipe, as published.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/vit-b16.py --data.root DATASET

Published: 78.58 h on 4 A100 (340 images/s per GPU); top-1 only as a plot, about 72.7 % near epoch 296, with a dip to
about 49 % near epoch 147. Source: ColossalAI-Examples at 7e6ee00, image/vision_transformer/data_parallel, and the
post about it.

The source's code has 50 epochs of warmup, its published loss curve peaks at 150: this is the published run,
vit-b16-warmup50.py is the code. The rate moves once per epoch, as in the source; vit-b16-per-step.py moves it at
every step. "Dropout 0.1" is timm's pos_drop_rate and proj_drop_rate today (drop_rate was all of them in early 2022
and is the head's alone now).
"""

from dali_train.config import Config

config = Config(
    data=dict(root="data/imagenet", normalise="inception"),
    model=dict(name="vit_base_patch16_224", kwargs=dict(pos_drop_rate=0.1, proj_drop_rate=0.1)),
    optimizer=dict(
        lr=1.8e-2,
        weight_decay=0.1,
        betas=(0.9, 0.999),
        eps=1e-6,
        kwargs=dict(bias_correction=False),
        exclude_vectors=False,
        clip_grad_norm=1.0,
    ),
    schedule=dict(warmup_epochs=150, step_every="epoch"),
    batch=dict(global_batch=32_768, micro_batch=256),
    mixup=dict(alpha=0.2),
    precision=dict(dtype="fp16"),
    run=dict(dir="runs/vit-b16", epochs=300, published_top1=0.727),
)
