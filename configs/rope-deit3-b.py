"""DeiT III-B with RoPE-Mixed, 400 epochs at 192 pixels; rope-deit3-b-finetune.py follows. See rope-deit3-s.py.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/rope-deit3-b.py --data.root DATASET \
        --batch.micro_batch 256

Published: top-1 83.8 % after the fine-tune at 224 pixels (naver-ai/rope-vit ce85c2e).
"""

from dali_train.config import load_config

config = (
    load_config("rope-deit3-s.py")
    .replace(
        data=dict(train_size=192, eval_size=192, eval_resize_to=192),
        model=dict(name="vit_base_patch16_rope_mixed_224"),
        optimizer=dict(lr=3e-3),
        run=dict(dir="runs/rope-deit3-b", published_top1=None),
    )
    .replace({"model.kwargs.img_size": 192, "model.kwargs.drop_path_rate": 0.1})
)
