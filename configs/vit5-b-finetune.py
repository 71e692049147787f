"""ViT-5-B, fine-tuned at 224 pixels from the averaged weights of vit5-b.py.

    dali-train export runs/vit5-b --format timm
    torchrun --nproc-per-node 8 -m dali_train train --config configs/vit5-b-finetune.py --data.root DATASET \
        --batch.micro_batch 64

Published: top-1 84.2 % after these 20 epochs, 85.4 % at 384 pixels: --data.train_size 384 --data.eval_size 384
--data.eval_resize_to 384 --model.kwargs.img_size 384 (wangf3014/ViT-5, README.md at b7b0796).

The recipe is that of deit3-b-finetune.py: the published command gives the same settings.
"""

from dali_train.config import load_config

config = load_config("deit3-b-finetune.py").replace(
    model=dict(
        name="dali_vit5_base_patch16",
        kwargs=dict(img_size=224, drop_path_rate=0.25),
        weights="runs/vit5-b/export/timm/model.safetensors",
    ),
    precision=dict(dtype="bf16"),
    run=dict(dir="runs/vit5-b-finetune", published_top1=0.842),
)
