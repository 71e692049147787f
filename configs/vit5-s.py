"""ViT-5-S on ImageNet-1k with LAMB (arXiv 2602.08071).

    torchrun --nproc-per-node 8 -m dali_train train --config configs/vit5-s.py --data.root DATASET \
        --batch.micro_batch 256

Published: top-1 82.2 % (wangf3014/ViT-5, README.md at b7b0796, which has a command for this training and for a
fine-tune, vit5-s-finetune.py, and does not say after which). An independent repetition with DALI and LAMB had 81.7 %
after two trainings with a CPU loader, about 82 % with DALI, and 82.07 % after a fine-tune of 20 epochs, at 29,103
images/s on 8 H100: about 10 hours (NVIDIA-BioNeMo/nvSubquadratic 5129112, examples/vit5_imagenet).

The recipe is DeiT III's with another network: see deit3-s.py for the batch, the loss and LAMB. main.py trains in
bfloat16, and keeps a moving average of the weights, from which the fine-tunes begin.
"""

from dali_train.config import load_config

config = load_config("deit3-s.py").replace(
    model=dict(name="dali_vit5_small_patch16", kwargs=dict(drop_path_rate=0.05)),
    ema=dict(decay=0.99996),
    precision=dict(dtype="bf16"),
    run=dict(dir="runs/vit5-s", published_top1=0.822),
)
