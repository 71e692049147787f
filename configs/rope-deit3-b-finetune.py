"""DeiT III-B with RoPE-Mixed, fine-tuned at 224 pixels from the weights of rope-deit3-b.py.

    dali-train export runs/rope-deit3-b --format timm
    torchrun --nproc-per-node 8 -m dali_train train --config configs/rope-deit3-b-finetune.py --data.root DATASET \
        --batch.micro_batch 64

Published: top-1 83.8 % after these 20 epochs, where the same recipe without rotations has 83.4 % (naver-ai/rope-vit
ce85c2e). The settings are those of deit3-b-finetune.py.
"""

from dali_train.config import load_config

config = load_config("deit3-b-finetune.py").replace(
    model=dict(
        name="vit_base_patch16_rope_mixed_224",
        kwargs=dict(drop_path_rate=0.2),
        weights="runs/rope-deit3-b/export/timm/model.safetensors",
    ),
    run=dict(dir="runs/rope-deit3-b-finetune"),
)
