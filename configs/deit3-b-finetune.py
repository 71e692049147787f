"""DeiT III-B, fine-tuned at 224 pixels from the weights of deit3-b.py.

    dali-train export runs/deit3-b --format timm
    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit3-b-finetune.py --data.root DATASET \
        --batch.micro_batch 64

Published: top-1 83.8 % after these 20 epochs (facebookresearch/deit, README_revenge.md).

All settings are those of README_revenge.md's command and of main.py's defaults. The lowest rate is main.py's default,
1e-5, which is the peak of this fine-tune too: after the warmup the rate is constant.
"""

from dali_train.config import load_config

config = load_config("deit3-s.py").replace(
    data=dict(augment="rand-m9-mstd0.5-inc1", color_jitter=0.0, repeats=1),
    model=dict(
        name="deit3_base_patch16_224",
        kwargs=dict(img_size=224, drop_path_rate=0.2),
        weights="runs/deit3-b/export/timm/model.safetensors",
    ),
    loss=dict(name="cross-entropy", target_threshold=None, label_smoothing=0.1),
    optimizer=dict(name="adamw", lr=1e-5, weight_decay=0.1, clip_grad_norm=None),
    batch=dict(global_batch=512, micro_batch=4),
    run=dict(dir="runs/deit3-b-finetune", epochs=20, published_top1=0.838),
)
