"""ViT-B/16 as in vit-b16-randaugment.py, with DALI's own RandAugment with 2 layers at magnitude 10.

    torchrun --nproc-per-node 4 -m dali_train train --config configs/vit-b16-randaugment-dali.py --data.root DATASET

No accuracy was published: DALI has had nvidia.dali.auto_aug since 2023, the source is of January 2022.
Nobody has run this file to the end.

DALI's magnitudes end at 30, so 10 is a third of the strength: 3.333 of 10 here, with DALI's 14 operators.
"""

from pathlib import Path

from dali_train.config import load_config

OPERATORS = (
    "TranslateX100",
    "TranslateY100",
    "ShearX",
    "ShearY",
    "Rotate",
    "BrightnessIncreasing",
    "ContrastIncreasing",
    "ColorIncreasing",
    "SharpnessIncreasing",
    "Posterize8",
    "SolarizeIncreasing",
    "Equalize",
    "AutoContrast",
    "Identity",
)

base = load_config(Path(__file__).with_name("vit-b16-randaugment.py"))
config = base.replace(
    {"data.augment": f"rand-m3.333-n2-p1-t{'+'.join(OPERATORS)}", "run.dir": "runs/vit-b16-randaugment-dali"}
)
