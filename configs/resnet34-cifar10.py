"""ResNet-34 on CIFAR-10: ColossalAI's data-parallel example, as its multi-GPU notebook ran it.

    dali-train data convert cifar10 --download --source downloads/cifar10 --out data/cifar10 --format raw
    torchrun --nproc-per-node 2 -m dali_train train --config configs/resnet34-cifar10.py

Published (ColossalAI resnet_cifar10_data_parallel, the notebook's output): accuracy 35.89 % after 2 epochs on two GPUs,
with train loss 1.8014 and test loss 1.4863, which are those of the last batch on rank 0: compare accuracy. The
example's complete recipe has 200 epochs: --run.epochs 200.

The batch is 128 per GPU. The model is torchvision's ResNet-34 for ImageNet, whose stem leaves 8 x 8 pixels of 32 x 32;
resnet34-cifar10-stem.py has a stem for CIFAR.
"""

from dali_train.config import Config

config = Config(
    data=dict(
        root="data/cifar10",
        train_size=32,
        crop_side=32,
        crop_padding=4,
        normalise="cifar10",
        eval_size=32,
        eval_resize_to=32,
    ),
    model=dict(name="resnet34", kwargs=dict(zero_init_last=False)),
    optimizer=dict(
        name="sgd",
        lr=0.1,
        kwargs=dict(momentum=0.9, nesterov=False),
        weight_decay=5e-4,
        exclude_vectors=False,
        clip_grad_norm=None,
    ),
    schedule=dict(name="cosine", step_every="epoch"),
    batch=dict(global_batch=256, micro_batch=128),
    precision=dict(dtype="fp16"),
    run=dict(dir="runs/resnet34-cifar10", epochs=2, published_top1=0.3589),
)
