"""DeiT III-S on ImageNet-1k with LAMB (arXiv 2204.07118).

    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit3-s.py --data.root DATASET \
        --batch.micro_batch 256

Published: top-1 81.4 % after 800 epochs at 224 pixels (facebookresearch/deit, README_revenge.md).

batch.micro_batch is small so that 128 GPUs can share the batch; the command has the one for 8 GPUs, which is faster.
The batch is no multiple of three: as in the source, the repeats of an image may be in different micro-batches.

Both images of a mixture count fully: with --bce-loss the source's engine.py sets each target over 0 to 1. Its LAMB is
apex's FusedLAMB, which clips at a global norm of 1, with main.py's default of 1e-8 for eps; vectors, position
embeddings and the class token have no weight decay. All blocks have the same rate of stochastic depth (models_v2.py).
"""

from dali_train.config import Config

config = Config(
    data=dict(
        root="data/imagenet",
        interpolation="bicubic",
        augment="3-augment",
        color_jitter=0.3,
        repeats=3,
        normalise="imagenet",
        eval_resize_to=224,
    ),
    model=dict(name="deit3_small_patch16_224", kwargs=dict(drop_path_rate=0.05), constant_drop_path=True),
    loss=dict(name="binary-cross-entropy", target_threshold=0.0),
    optimizer=dict(lr=4e-3, weight_decay=0.05, eps=1e-8, clip_grad_norm=1.0, exclude_vectors="and-tokens"),
    schedule=dict(name="cosine", warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5, decay_from="start", step_every="epoch"),
    batch=dict(global_batch=2048, micro_batch=16),
    mixup=dict(alpha=0.8, cutmix_alpha=1.0),
    precision=dict(dtype="fp16"),
    run=dict(dir="runs/deit3-s", epochs=800, published_top1=0.814),
)
