"""ResNet-50 on ImageNet-1k in 88 epochs: FFCV's recipe. See ffcv-resnet50-16ep.py for the batch and the differences.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/ffcv-resnet50-88ep.py --data.root DATASET \
        --batch.micro_batch 512

Published: top-1 78.4 % after 77.2 minutes on 8 A100 (libffcv/ffcv-imagenet 4dd291a, README.md and
rn50_configs/rn50_88_epochs.yaml): 10 hours of an A100.
"""

from dali_train.config import load_config

config = load_config("ffcv-resnet50-16ep.py").replace(
    data=dict(progressive=((71, 160),)),
    run=dict(dir="runs/ffcv-resnet50-88ep", epochs=88, published_top1=0.784),
)
