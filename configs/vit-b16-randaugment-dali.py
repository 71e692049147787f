"""ViT-B/16 as in vit-b16-randaugment.py, with DALI's own RandAugment with 2 layers at magnitude 10.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/vit-b16-randaugment-dali.py --data.root DATASET

No accuracy was published: DALI has had nvidia.dali.auto_aug since 2023, the source is of January 2022.

DALI's magnitudes end at 30, so 10 is a third of the strength: 3.333 of 10 here, with DALI's 14 operators.
"""

from dali_train.config import load_config

OPERATORS = (
    "TranslateX100 TranslateY100 ShearX ShearY Rotate BrightnessIncreasing ContrastIncreasing ColorIncreasing "
    "SharpnessIncreasing Posterize8 SolarizeIncreasing Equalize AutoContrast Identity"
)

config = load_config("vit-b16-randaugment.py").replace(
    data=dict(augment=f"rand-m3.333-n2-p1-t{OPERATORS.replace(' ', '+')}"),
    run=dict(dir="runs/vit-b16-randaugment-dali"),
)
