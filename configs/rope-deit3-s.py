"""DeiT III-S with RoPE-Mixed, 400 epochs, on ImageNet-1k with LAMB (arXiv 2403.13298).

    torchrun --nproc-per-node 8 -m dali_train train --config configs/rope-deit3-s.py --data.root DATASET \
        --batch.micro_batch 256

Published: top-1 80.9 % at 224 pixels, where the same recipe without rotations has 80.4 %; 81.8 % at 384 pixels with
the same weights (naver-ai/rope-vit ce85c2e, README.md, deit/README.md).

The recipe is DeiT III's at 400 epochs, with less weight decay and no stochastic depth: see deit3-s.py. timm's network
begins with other weights: it divides those of block i that write to the residual stream by sqrt(2 i).
"""

from dali_train.config import load_config

config = load_config("deit3-s.py").replace(
    model=dict(
        name="vit_small_patch16_rope_mixed_224",
        # The source's LayerScale, and its classifier, which timm's makes a thousand times smaller.
        kwargs=dict(drop_path_rate=0.0, init_values=1e-4, head_init_scale=1.0),
    ),
    optimizer=dict(weight_decay=0.03),
    run=dict(dir="runs/rope-deit3-s", epochs=400, published_top1=0.809),
)
