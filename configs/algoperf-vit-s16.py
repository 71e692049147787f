"""ViT-S/16 on ImageNet-1k with NAdamW: the run that set AlgoPerf's target.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/algoperf-vit-s16.py --data.root DATASET \
        --batch.micro_batch 128

Published: top-1 77.309 %, the median of 20 seeds after 139,999 steps (mlcommons/algorithmic-efficiency 2c90454:
algorithms/README.md, algorithms/target_setting_algorithms/imagenet_vit/tuning_search_space.json). About 16 h on 8 V100
by the benchmark's own count of 167,999 steps in 69,768 s; about 11 hours of an H100 at 3,600 images/s, the speed of
ViT-5-S in vit5-s.py.

A neutral target for optimizers: every submission to the benchmark has this model, these images and this number to
reach. Every parameter has weight decay, nothing is clipped. The steps are three quarters of the 186,666 that the
benchmark allowed then, the warmup is a twentieth of them.

Images are those of the benchmark's JAX version, with which the target was set. What differs: it mixes each image with
its neighbour in the batch, with one lambda for all 1,024.
"""

from dali_train.config import Config

_STEP = 1024 / 1_281_167  # epochs

config = Config(
    data=dict(
        root="data/imagenet",
        crop="inception",
        augment="big-vision",
        interpolation="bicubic",
        antialias=False,
        normalise="imagenet",
    ),
    model=dict(name="dali_vit_small_patch16"),
    optimizer=dict(
        name="nadamw",
        lr=8.445074561975979e-4,
        betas=(0.8895758153482813, 0.9978504782314613),
        eps=1e-8,
        weight_decay=0.08135402759553023,
        exclude_vectors=False,
        clip_grad_norm=None,
    ),
    schedule=dict(name="cosine", warmup_epochs=6_999 * _STEP, warmup_lr=0.0),
    batch=dict(global_batch=1024, micro_batch=8),
    mixup=dict(alpha=0.2),
    precision=dict(dtype="bf16"),
    run=dict(dir="runs/algoperf-vit-s16", epochs=139_999 * _STEP, published_top1=0.77309),
)
