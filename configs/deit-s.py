"""DeiT-S on ImageNet-1k, without distillation (arXiv 2012.12877).

    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit-s.py --data.root DATASET \
        --batch.micro_batch 128

Published: top-1 79.9 % (facebookresearch/deit, the defaults of main.py).

batch.micro_batch is small so that 128 GPUs can share the batch; the command has the one for 8 GPUs, which is faster.
The batch is no multiple of three: as in the source, the repeats of an image may be in different micro-batches.

The source passes a color jitter of 0.3 on to timm, which leaves it out where RandAugment is on, unless it is forced:
this file applies it, as the arguments say; --data.color_jitter 0 is what timm does. Erased boxes are filled with noise,
which here is limited to what a pixel can be.
"""

from dali_train.config import Config

config = Config(
    data=dict(
        root="data/imagenet",
        interpolation="bicubic",
        augment="rand-m9-mstd0.5-inc1",
        color_jitter=0.3,
        random_erasing=0.25,
        random_erasing_fill="noise",
        repeats=3,
        normalise="imagenet",
    ),
    model=dict(name="deit_small_patch16_224", kwargs=dict(drop_path_rate=0.1)),
    loss=dict(label_smoothing=0.1),
    optimizer=dict(
        name="adamw",
        lr=5e-4 / 2,
        scale_lr="linear",
        weight_decay=0.05,
        eps=1e-8,
        exclude_vectors="and-tokens",
        clip_grad_norm=None,
    ),
    schedule=dict(name="cosine", warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5, decay_from="start", step_every="epoch"),
    batch=dict(global_batch=1024, micro_batch=8),
    mixup=dict(alpha=0.8, cutmix_alpha=1.0),
    precision=dict(dtype="fp16"),
    run=dict(dir="runs/deit-s", epochs=300, published_top1=0.799),
)
