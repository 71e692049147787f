"""What is drawn for an image's augmentation: which operators, how strong, and which box is erased.

A policy is groups one after the other; of each group an image gets one alternative, and an alternative is steps one
after the other. RandAugment is n groups of one-step alternatives; AutoAugment one group of two-step alternatives; color
jitter one group that has each order of three steps.

A level says how strong: 1 is the strong end of an operator's usual range, and its sign says in which direction, for
operators that have two. What operators do with a level, and with pixels, is in one table, in data/loading/augment.py.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dali_train.config import DataConfig
from dali_train.config.augment import AugmentSpec, parse_augment
from dali_train.data.sampling.draws import crop_boxes
from dali_train.data.sampling.rng import Purpose, philox_generator, uniform

IDENTITY = "Identity"

# timm's sets (Cubuk et al., "RandAugment", arXiv 1909.13719, as its author's TensorFlow code has it).
_RAND = (
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "Solarize",
    "SolarizeAdd",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateXRel",
    "TranslateYRel",
)
# big_vision's randaug(2, 10): translations in pixels, and Cutout.
_BIG_VISION = (
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "Solarize",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateX100",
    "TranslateY100",
    "SolarizeAdd",
    "Cutout40",
)
# ColossalAI's (examples/vit_b16_imagenet_data_parallel/dataloader/rand_augment.py): the same with shorter translations,
# another threshold, and shears that are given as 0.3 degrees, which moves no pixel by more than one.
_COLOSSALAI = (
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "Solarize200",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    IDENTITY,
    IDENTITY,
    "TranslateX40",
    "TranslateY40",
    "SolarizeAdd",
    "Cutout40",
)
_INCREASING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
# Müller and Hutter, "TrivialAugment", arXiv 2103.10158, the wide space.
_TRIVIAL = (
    IDENTITY,
    "ShearXWide",
    "ShearYWide",
    "TranslateX32",
    "TranslateY32",
    "RotateWide",
    "BrightnessWide",
    "ColorWide",
    "ContrastWide",
    "SharpnessWide",
    "PosterizeWide",
    "SolarizeIncreasing",
    "AutoContrast",
    "Equalize",
)
# Touvron et al., "DeiT III", arXiv 2204.07118.
_THREE = ("Grayscale", "Solarize128", "GaussianBlur")
_JITTER = ("BrightnessBy", "ContrastBy", "ColorBy")


@dataclass(frozen=True, kw_only=True)
class Step:
    operator: str
    probability: float = 1.0
    level: float = 1.0
    std: float = 0.0  # of normally distributed noise on the level; infinite: uniform from 0 to `level`
    max_level: float = 1.0


Alternative = tuple[Step, ...]


@dataclass(frozen=True)
class Policy:
    groups: tuple[tuple[Alternative, ...], ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the operators in use; the first one is the identity, which a step that is not applied gets."""
        used = (step.operator for group in self.groups for alternative in group for step in alternative)
        return tuple(dict.fromkeys([IDENTITY, *used]))

    @cached_property
    def num_steps(self) -> int:
        return sum(max(map(len, group)) for group in self.groups)


def policy_of(data: DataConfig) -> Policy:
    """Return what data.augment and data.color_jitter say. Without groups nothing is augmented."""
    spec = parse_augment(data.augment)
    groups = _groups(spec)
    if data.color_jitter > 0:
        steps = (Step(operator=name, level=data.color_jitter, std=np.inf) for name in _JITTER)
        groups = (*groups, tuple(itertools.permutations(steps)))
    return Policy(groups)


def _groups(spec: AugmentSpec) -> tuple[tuple[Alternative, ...], ...]:
    std = np.inf if spec.magnitude_std > 100 else spec.magnitude_std / 10
    if spec.policy == "rand":
        names = spec.operators or tuple(
            f"{name}Increasing" if spec.increasing and name in _INCREASING else name for name in _RAND
        )
        common = {
            "probability": spec.probability,
            "level": spec.magnitude / 10,
            "std": std,
            "max_level": spec.magnitude_max / 10,
        }
        return (tuple((Step(operator=name, **common),) for name in names),) * spec.num_layers
    if spec.policy in ("big-vision", "colossalai"):
        names = _BIG_VISION if spec.policy == "big-vision" else _COLOSSALAI
        # Two layers at full strength. The level of Cutout says where it is.
        return (tuple((Step(operator=name, std=np.inf if name == "Cutout40" else 0.0),) for name in names),) * 2
    if spec.policy == "trivial":
        return (tuple((Step(operator=name, std=np.inf),) for name in _TRIVIAL),)
    if spec.policy == "3-augment":
        return (tuple((Step(operator=name, std=np.inf),) for name in _THREE),)
    if spec.policy == "auto-imagenet":
        from timm.data.auto_augment import auto_augment_policy

        return (
            tuple(
                tuple(Step(operator=op.name, probability=op.prob, level=op.magnitude / 10, std=std) for op in pair)
                for pair in auto_augment_policy("original", hparams={})
            ),
        )
    if spec.policy == "auto-cifar10":
        from torchvision.transforms.autoaugment import AutoAugment, AutoAugmentPolicy

        return (
            tuple(
                tuple(
                    Step(operator=_CIFAR_NAMES.get(name, name), probability=p, level=(number or 0) / 9)
                    for name, p, number in pair
                )
                for pair in AutoAugment(AutoAugmentPolicy.CIFAR10).policies
            ),
        )
    return ()


# torchvision's names -> the rows with its ranges.
_CIFAR_NAMES = {
    "TranslateX": "TranslateXRel",
    "TranslateY": "TranslateYRel",
    "Posterize": "Posterize8",
    **{name: f"{name}Increasing" for name in ("Solarize", "Color", "Contrast", "Brightness", "Sharpness")},
}


def draw_operators(
    seed: int, policy: Policy, *, epochs: NDArray[np.int64], images: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return (operators, levels), each (n, policy.num_steps): numbers in policy.names, and how strong with a sign.

    Each step of each image has a counter of its own, and so has each choice among a group's alternatives.
    """
    count = len(images)
    operators = np.zeros((count, policy.num_steps), dtype=np.int32)
    levels = np.zeros((count, policy.num_steps), dtype=np.float32)
    if policy.num_steps == 0:
        return operators, levels
    num_counters = len(policy.groups) + policy.num_steps
    blocks = np.arange(1, num_counters + 1)
    draws = uniform(
        seed,
        Purpose.AUGMENT,
        np.tile(blocks, count),
        low=np.repeat(images, num_counters),
        high=np.repeat(epochs, num_counters),
    ).reshape(count, num_counters, 4)
    counter = column = 0
    for group in policy.groups:
        chosen = (draws[:, counter, 0] * len(group)).astype(np.int64)
        counter += 1
        for place in range(max(map(len, group))):
            table = _table(policy, group, place)[chosen]
            number, probability, level, std, highest = table.T
            whether, sign, first, second = draws[:, counter].T
            noise = std * np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)  # Box and Muller
            strength = np.where(np.isinf(std), level * first, level + np.where(np.isinf(std), 0, noise))
            strength = np.clip(strength, 0, highest)
            operators[:, column] = np.where(whether < probability, number, 0)
            levels[:, column] = np.where(sign < 0.5, strength, -strength)
            counter, column = counter + 1, column + 1
    return operators, levels


def _table(policy: Policy, group: tuple[Alternative, ...], place: int) -> NDArray[np.float64]:
    """Return a row for each alternative: operator's number, probability, level, std, highest level at `place`."""
    none = Step(operator=IDENTITY)
    steps = [alternative[place] if place < len(alternative) else none for alternative in group]
    return np.array([(policy.names.index(s.operator), s.probability, s.level, s.std, s.max_level) for s in steps])


def erased_boxes(
    seed: int, *, epochs: NDArray[np.int64], images: NDArray[np.int64], probability: float, size: int
) -> NDArray[np.int32]:
    """Return the box that is erased of each training image, (n, 4): top, left, height, width in pixels; all 0: none.

    Zhong et al., "Random erasing", arXiv 1708.04896, with timm's ranges: 2 % to a third of the area, aspects from 0.3
    to 1 / 0.3.
    """
    if probability == 0:
        return np.zeros((len(images), 4), dtype=np.int32)
    sides = np.full(len(images), size)
    boxes = crop_boxes(
        seed,
        epochs=epochs,
        images=images,
        heights=sides,
        widths=sides,
        area=(0.02, 1 / 3),
        aspect=(0.3, 1 / 0.3),
        purpose=Purpose.ERASE,
    )
    whether = uniform(seed, Purpose.ERASE, np.full_like(images, 11), low=images, high=epochs)[
        :, 0
    ]  # blocks to 10 are tries
    boxes[whether >= probability] = 0
    return boxes


def erasing_noise(data: DataConfig, *, step: int, k: int) -> NDArray[np.uint8]:
    """Return the pixels that a micro-batch's erased boxes show, (train_size, train_size, 3); (0, 0, 3): the mean.

    Normally distributed around the mean with the standard deviation of data.normalise, as in timm, but limited to what
    a pixel can be. One for all of its images: a box shows the part that it covers.
    """
    if data.random_erasing == 0 or data.random_erasing_fill == "mean":
        return np.zeros((0, 0, 3), dtype=np.uint8)
    generator = np.random.Generator(philox_generator(data.seed, Purpose.NOISE, low=k, high=step))
    noise = generator.standard_normal((data.train_size, data.train_size, 3), dtype=np.float32)
    pixels = noise * np.array(data.std, dtype=np.float32) + np.array(data.mean, dtype=np.float32)
    return pixels.round().clip(0, 255).astype(np.uint8)
