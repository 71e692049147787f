"""A small ViT on scikit-learn's handwritten digits: the quickstart, and a check that everything works together.

    make quickstart

1,437 real scans to train on and 360 from other writers to validate, enlarged from 8 to 32 pixels. The large-batch
recipe of vit-b16.py (LAMB without bias correction, linear warmup and decay, Mixup, accumulation, clipping) with what
digits need instead of photographs: mild crops, no mirroring, no dropout, a short warmup.

Measured on 2 cores of an AMD EPYC (AVX-512), two ranks: 88 s, top-1 97 %. Without dropout 60 epochs reach 96 %, with
0.1 of it 95 %; with ImageNet's crops and flips it stays near 65 %.
"""

from dali_train.config import (
    BatchConfig,
    Config,
    DataConfig,
    HooksConfig,
    MixupConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)

config = Config(
    data=DataConfig(
        root="runs/quickstart/dataset",
        train_size=32,
        crop_area=(0.5, 1.0),
        horizontal_flip=0.0,
        eval_resize_to=32,
        eval_size=32,
    ),
    model=ModelConfig(
        name="vit_tiny_patch16_224",
        kwargs={"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3},
    ),
    optimizer=OptimizerConfig(lr=2e-2, weight_decay=0.1, bias_correction=False, exclude_vectors=False),
    schedule=ScheduleConfig(warmup_epochs=5),
    batch=BatchConfig(global_batch=128, micro_batch=32),
    mixup=MixupConfig(alpha=0.2),
    run=RunConfig(dir="runs/quickstart", epochs=90, eval_every_epochs=10, checkpoint_every_steps=200),
    hooks=HooksConfig(log_every_steps=50),
)
