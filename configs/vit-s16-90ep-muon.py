"""ViT-S/16 on ImageNet-1k for 90 epochs with Muon, on the same samples as vit-s16-90ep.py, with archibox's rates.

    torchrun --nproc-per-node 8 -m dali_train train --config configs/vit-s16-90ep-muon.py --data.root DATASET \
        --batch.micro_batch 128

No accuracy is published: archibox (jxiong21029/archibox fdc5bb8, archibox/ropend/imagenet_classification.py) trains a
ViT-B/16 of its own for 90 epochs in batches of 1,024 and shows curves. The control is vit-s16-90ep.py: 76.5 %. By
estimate 9 to 10 hours of an H100: the 9 of the control, and by their count Muon's products are 0.2 TFLOP a step on
every rank, beside 3.5 of the model's on each of 8.

Images, crops, augmentation, Mixup, order and initial weights are the control's, bit for bit. Rates, momentum, decay
and schedule are archibox's: Muon at 0.03 for matrices, AdamW at 0.001 for the rest, constant for 70 epochs, then
linear to 0, without a warmup and without clipping. What differs from archibox: the fused matrix of queries, keys and
values is orthogonalised as one, AdamW has Nesterov's momentum too, and timm's coefficients of Polar Express differ in
the third digit.
"""

from dali_train.config import load_config

config = load_config("vit-s16-90ep.py").replace(
    optimizer=dict(
        name="nmuon",
        lr=0.03,
        kwargs=dict(
            momentum=0.95,
            ns_coefficients="polar_express",
            safety_factor=1.01,
            adjust_lr_fn="original",
            fallback_lr_scale=0.001 / 0.03,
        ),
        weight_decay=0.01,
        betas=(0.9, 0.95),
        exclude_vectors=False,
        clip_grad_norm=None,
    ),
    schedule=dict(name="warmup-stable-decay", warmup_epochs=0, warmup_lr=None, decay_epochs=20),
    run=dict(dir="runs/vit-s16-90ep-muon", published_top1=None),
)
