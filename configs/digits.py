from dali_train.config import *

config = Config(
    data=DataConfig(
        root="runs/digits/dataset", train_size=32, eval_size=32, eval_resize_to=32, crop_area=(0.5, 1.0), horizontal_flip=0.0
    ),
    model=ModelConfig(
        name="vit_tiny_patch16_224",
        kwargs=dict(img_size=32, patch_size=8, embed_dim=96, depth=4, num_heads=3, pos_drop_rate=0.1, proj_drop_rate=0.1),
    ),
    optimizer=OptimizerConfig(lr=2e-2, weight_decay=0.1, bias_correction=False, exclude_vectors=False),
    schedule=ScheduleConfig(warmup_epochs=8),
    batch=BatchConfig(global_batch=128, micro_batch=32),
    mixup=MixupConfig(alpha=0.2),
    run=RunConfig(dir="runs/digits", epochs=40, eval_every_epochs=5),
)
