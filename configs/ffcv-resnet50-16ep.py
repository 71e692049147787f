"""ResNet-50 on ImageNet-1k in 16 epochs: FFCV's recipe, the cheapest run in this directory.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/ffcv-resnet50-16ep.py --data.root DATASET \
        --batch.micro_batch 512

Published: top-1 73.8 % at 256 pixels, the mean of an image and its mirror image, after 14.9 minutes on 8 A100
(libffcv/ffcv-imagenet 4dd291a, README.md and rn50_configs/rn50_16_epochs.yaml): 2 hours of an A100.

batch.micro_batch is small so that 128 GPUs can share the batch. With 8 GPUs use 512, as above: it is faster, and
BatchNorm sees as many images as in the source.

Trained at 160 pixels for 12 epochs, then at 192; inputs of convolutions with a stride are blurred; SGD with momentum,
weight decay on all but BatchNorm's weights that are called bn. What differs from the source: its images are stored
with at most 500 pixels a side, half of them compressed again, and resized by OpenCV's area filter; its epochs drop the
last 3,215 images.
"""

from dali_train.config import Config

config = Config(
    data=dict(
        root="data/imagenet",
        train_size=192,
        progressive=((12, 160),),
        eval_size=256,
        eval_views="mirrored",
        normalise="imagenet",
    ),
    model=dict(name="dali_resnet50_blur", kwargs=dict(zero_init_last=False), channels_last=True),
    loss=dict(label_smoothing=0.1),
    optimizer=dict(
        name="momentum",
        lr=1.7,
        kwargs=dict(momentum=0.9),
        weight_decay=1e-4,
        groups=(("fc.bias", 1.0, 1.0), ("*.downsample.1.*", 1.0, 1.0)),  # not called bn, so not excluded
        clip_grad_norm=None,
    ),
    schedule=dict(name="linear", warmup_epochs=2, warmup_lr=1.7e-4),
    batch=dict(global_batch=4096, micro_batch=32),
    precision=dict(dtype="fp16"),
    run=dict(dir="runs/ffcv-resnet50-16ep", epochs=16, published_top1=0.738),
)
