"""A small convolutional network on MNIST: the single-node multi-GPU tutorial.

    dali-train data convert mnist --download --source downloads/mnist --out data/mnist
    torchrun --nproc-per-node 1 -m dali_train train --config configs/mnist.py --data.root data/mnist

The batch is 128 a process: --batch.global_batch 256 on two. The same command trains on Fashion-MNIST. No accuracy was
published; the tutorial logs tables of predictions to W&B: --hooks.trackers wandb --hooks.predictions 32.
"""

from dali_train.config import Config

config = Config(
    data=dict(
        root="data/mnist",
        seed=1,
        train_size=28,
        crop_side=28,
        horizontal_flip=0.0,
        normalise="mnist",
        eval_size=28,
        eval_resize_to=28,
    ),
    model=dict(name="dali_lenet"),
    optimizer=dict(
        name="sgd", lr=0.01, kwargs=dict(momentum=0.5, nesterov=False), exclude_vectors=False, clip_grad_norm=None
    ),
    schedule=dict(name="step", decay_epochs=10, decay_rate=1.0),  # a constant rate
    batch=dict(global_batch=128, micro_batch=128),
    run=dict(dir="runs/mnist", epochs=10),
)
