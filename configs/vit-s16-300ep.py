"""ViT-S/16 on ImageNet-1k for 300 epochs: big_vision's improved baseline. See vit-s16-90ep.py.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/vit-s16-300ep.py --data.root DATASET \
        --batch.micro_batch 128

Published: top-1 about 80 %; reproduced in torch with 79.75 % (EIFY/mup-vit).
"""

from dali_train.config import load_config

config = load_config("vit-s16-90ep.py").replace(
    run=dict(dir="runs/vit-s16-300ep", epochs=300, published_top1=0.80),
)
