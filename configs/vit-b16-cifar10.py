"""ViT-B/16 on CIFAR-10, data parallel: ColossalAI's data-parallel to hybrid-parallel tutorial, read literally.

    torchrun --nproc-per-node 1 -m dali_train train --config configs/vit-b16-cifar10.py --data.root DATASET

No accuracy was published.

The training crop pastes the 32 pixels anywhere into a black square of 224, while test images are enlarged to 224:
training and test see objects of very different sizes. vit-b16-cifar10-corrected.py enlarges the training images too.
The batch is 256 a GPU with 16 accumulated: 4,096 on one GPU, --batch.global_batch 16384 on four.
"""

from dali_train.config import Config

config = Config(
    data=dict(
        root="data/cifar10",
        crop_side=224,
        crop_padding=192,
        horizontal_flip=0.0,
        augment="auto-cifar10",
        normalise="cifar10",
        eval_resize_to=224,
    ),
    model=dict(name="vit_base_patch16_224", kwargs=dict(pos_drop_rate=0.1, proj_drop_rate=0.1)),
    optimizer=dict(
        lr=1.8e-2, weight_decay=0.1, kwargs=dict(bias_correction=False), exclude_vectors=False, clip_grad_norm=1.0
    ),
    schedule=dict(warmup_epochs=50, step_every="epoch"),
    batch=dict(global_batch=4096, micro_batch=256),
    mixup=dict(alpha=0.2),
    precision=dict(dtype="fp16"),
    run=dict(dir="runs/vit-b16-cifar10", epochs=300),
)
