"""DeiT III-B, fine-tuned at 224 pixels from the weights of deit3-b.py.

    dali-train export runs/deit3-b --format timm
    torchrun --nproc-per-node 8 -m dali_train train --config configs/deit3-b-finetune.py --data.root DATASET \
        --batch.micro_batch 64

Published: top-1 83.8 % after these 20 epochs (facebookresearch/deit, README_revenge.md).
Nobody has run this file to the end.

All settings are those of README_revenge.md's command and of main.py's defaults. The lowest rate is main.py's default,
1e-5, which is the peak of this fine-tune too: after the warmup the rate is constant.
"""

from pathlib import Path

from dali_train.config import load_config

base = load_config(Path(__file__).with_name("deit3-b.py"))
config = base.replace(
    {
        "data.train_size": 224,
        "data.eval_size": 224,
        "data.eval_resize_to": 224,
        "data.augment": "rand-m9-mstd0.5-inc1",
        "data.color_jitter": 0.0,
        "data.repeats": 1,
        "data.split_repeats": False,
        "model.kwargs.img_size": 224,
        "model.weights": "runs/deit3-b/export/timm/model.safetensors",
        "loss.name": "cross-entropy",
        "loss.target_threshold": None,
        "loss.label_smoothing": 0.1,
        "optimizer.name": "adamw",
        "optimizer.lr": 1e-5,
        "optimizer.weight_decay": 0.1,
        "optimizer.clip_grad_norm": None,
        "batch.global_batch": 512,
        "batch.micro_batch": 4,
        "run.epochs": 20,
        "run.dir": "runs/deit3-b-finetune",
        "run.published_top1": 0.838,
    }
)
