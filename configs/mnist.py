"""A small convolutional network on MNIST: the single-node multi-GPU tutorial.

    dali-train data convert mnist --download --source downloads/mnist --out data/mnist
    torchrun --nproc-per-node 1 -m dali_train train --config configs/mnist.py --data.root data/mnist

The batch is 128 a process: --batch.global_batch 256 on two. The same command trains on Fashion-MNIST. No accuracy was
published; the tutorial logs tables of predictions to W&B: --hooks.trackers wandb --hooks.predictions 32.
"""

from dali_train.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)

config = Config(
    data=DataConfig(
        root="data/mnist",
        seed=1,
        train_size=28,
        crop_side=28,
        horizontal_flip=0.0,
        normalise=((255 * 0.1307,) * 3, (255 * 0.3081,) * 3),
        eval_resize_to=28,
        eval_size=28,
    ),
    model=ModelConfig(name="dali_lenet"),
    optimizer=OptimizerConfig(
        name="sgd", lr=0.01, kwargs={"momentum": 0.5, "nesterov": False}, exclude_vectors=False, clip_grad_norm=None
    ),
    schedule=ScheduleConfig(name="step", decay_epochs=10, decay_rate=1.0),  # a constant rate
    batch=BatchConfig(global_batch=128, micro_batch=128),
    run=RunConfig(dir="runs/mnist", epochs=10),
)
