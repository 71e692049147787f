"""DeiT-S on ImageNet-1k, without distillation (arXiv 2012.12877).

    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit-s.py --data.root DATASET \
        --batch.micro_batch 128

Published: top-1 79.9 % (facebookresearch/deit, the defaults of main.py).
Nobody has run this file to the end.

batch.micro_batch is small so that 128 GPUs can share the batch; the command has the one for 8 GPUs, which is faster.
The batch is no multiple of three: as in the source, the repeats of an image may be in different micro-batches.

The source passes a color jitter of 0.3 on to timm, which leaves it out where RandAugment is on, unless it is forced:
this file applies it, as the arguments say; --data.color_jitter 0 is what timm does. Erased boxes are filled with noise,
which here is limited to what a pixel can be.
"""

from dali_train.config import (
    BatchConfig,
    Config,
    DataConfig,
    LossConfig,
    MixupConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
)

config = Config(
    data=DataConfig(
        root="data/imagenet",
        train_size=224,
        interpolation="bicubic",
        augment="rand-m9-mstd0.5-inc1",
        color_jitter=0.3,
        random_erasing=0.25,
        random_erasing_fill="noise",
        repeats=3,
        split_repeats=True,
        normalise="imagenet",
    ),
    model=ModelConfig(name="deit_small_patch16_224", kwargs={"drop_path_rate": 0.1}),
    loss=LossConfig(label_smoothing=0.1),
    optimizer=OptimizerConfig(
        name="adamw", lr=5e-4, scale_lr="linear", base_batch=512, weight_decay=0.05, eps=1e-8, clip_grad_norm=None
    ),
    schedule=ScheduleConfig(
        name="cosine", warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5, decay_from="start", step_every="epoch"
    ),
    batch=BatchConfig(global_batch=1024, micro_batch=8),
    mixup=MixupConfig(alpha=0.8, cutmix_alpha=1.0),
    precision=PrecisionConfig(dtype="fp16"),
    run=RunConfig(dir="runs/deit-s", epochs=300, published_top1=0.799),
)
