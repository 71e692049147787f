"""A small ViT on scikit-learn's handwritten digits: the quickstart, and a check that everything works together.

    dali-train quickstart

1,437 real scans to train on and 360 from other writers to validate, enlarged from 8 to 32 pixels. The large-batch
recipe of vit-b16.py (LAMB without bias correction, linear warmup and decay, Mixup, accumulation, clipping) with what
digits need instead of photographs: mild crops, no mirroring, no dropout, a short warmup.

Measured on 2 cores of an AMD EPYC (AVX-512), two ranks: 88 s, top-1 96.9 %; 95.8 to 97.2 % with other processors and
seeds. Without dropout 60 epochs reach 96 %, with 0.1 of it 95 %; with ImageNet's crops and flips it stays near 65 %.
"""

from dali_train.config import Config

config = Config(
    data=dict(
        root="runs/quickstart/dataset",
        train_size=32,
        crop_area=(0.5, 1.0),
        horizontal_flip=0.0,
        eval_size=32,
        eval_resize_to=32,
    ),
    model=dict(
        name="vit_tiny_patch16_224",
        kwargs=dict(img_size=32, patch_size=8, embed_dim=96, depth=4, num_heads=3),
    ),
    optimizer=dict(lr=2e-2, weight_decay=0.1, kwargs=dict(bias_correction=False), exclude_vectors=False),
    schedule=dict(warmup_epochs=5),
    batch=dict(global_batch=128, micro_batch=32),
    mixup=dict(alpha=0.2),
    run=dict(dir="runs/quickstart", epochs=90, eval_every_epochs=10, checkpoint_every_steps=200),
    hooks=dict(log_every_steps=50),
)
