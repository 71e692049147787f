"""ResNet-50 on ImageNet-1k with heavy-ball momentum: the run that set AlgoPerf's target.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/algoperf-resnet50.py --data.root DATASET \
        --batch.micro_batch 128

Published: top-1 77.431 %, the median of 20 seeds after 139,999 steps (mlcommons/algorithmic-efficiency 2c90454:
algorithms/README.md, algorithms/target_setting_algorithms/imagenet_resnet/tuning_search_space.json). About 13 h on 8
V100 by the benchmark's own count of 195,999 steps in 66,159 s; by estimate 13 hours of an H100 at 3,000 images/s.

BatchNorm sees a micro-batch. The target was set on 8 TPU cores with 128 images each, as in the command;
batch.micro_batch is small so that 128 GPUs can share the batch, and its result is that of another recipe.

Images are those of the benchmark's JAX version, without Mixup and RandAugment. What differs: convolutions begin with
He's initial weights, there with LeCun's.
"""

from dali_train.config import load_config

_STEP = 1024 / 1_281_167  # epochs
_LR = 4.131896390902391

config = load_config("algoperf-vit-s16.py").replace(
    data=dict(augment="none"),
    model=dict(name="resnet50", channels_last=True),
    loss=dict(label_smoothing=0.2),
    optimizer=dict(
        name="momentum",
        lr=_LR,
        kwargs=dict(momentum=0.9274758113254791),
        betas=(0.9, 0.999),  # momentum has none
        eps=1e-6,
        weight_decay=5.6687777311501786e-6,
    ),
    schedule=dict(name="linear", min_lr=0.001 * _LR, decay_epochs=119_803 * _STEP),  # 0.9008 of what follows the warmup
    mixup=dict(alpha=0.0),
    run=dict(dir="runs/algoperf-resnet50", published_top1=0.77431),
)
