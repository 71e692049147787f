"""Draws for an image's augmentation: its operators, their strengths, and the erased box.

A policy is a sequence of groups. Each image gets one alternative of every group, or none if the group has a probability
below 1, and an alternative is a sequence of steps. RandAugment is n groups of one-step alternatives; AutoAugment is one
group of two-step alternatives; color jitter is one group with every order of three steps.

A level is the strength of an operator: 1 is the strong end of its usual range, and the sign is the direction, for
operators that have two. The operators themselves are in one table, in data/loading/augment.py.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from dali_train.config import DataConfig
from dali_train.config.augment_spec import AugmentSpec, parse_augment
from dali_train.data.sampling.draws import DrawInput, crop_boxes
from dali_train.data.sampling.rng import Purpose, normal_quantile, philox_generator, uniform

IDENTITY = "Identity"

# Cubuk et al., "RandAugment", arXiv 1909.13719, as its author's TensorFlow code and timm have it, in their order; some
# are stronger the larger the magnitude only in timm's increasing set (inc1).
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
_CAN_INCREASE = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
# big_vision's randaug(2, 10), two layers at full strength: translations in pixels, and behind these Cutout. There the
# threshold of Solarize is 256 in 8 bits, so 0, and every pixel is inverted (google-research/big_vision#110).
_BIG_VISION = (
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "SolarizeIncreasing",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateX100",
    "TranslateY100",
    "SolarizeAdd",
)
# ColossalAI's (examples/vit_b16_imagenet_data_parallel/dataloader/rand_augment.py): the same with shorter translations,
# another threshold, and shears that are given as 0.3 degrees, which moves no pixel by more than one.
_IN_COLOSSALAI = {
    "SolarizeIncreasing": "Solarize200",
    "ShearX": IDENTITY,
    "ShearY": IDENTITY,
    "TranslateX100": "TranslateX40",
    "TranslateY100": "TranslateY40",
}
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
# Cubuk et al., "AutoAugment", arXiv 1805.09501, tables 9 and 7: in each row two operators with their probabilities and
# levels, as timm ("original") and torchvision have them. Levels of operators without one are 0.
_AUTO_IMAGENET = """
PosterizeOriginal 0.4 8  Rotate 0.6 9
Solarize 0.6 5  AutoContrast 0.6 5
Equalize 0.8 8  Equalize 0.6 3
PosterizeOriginal 0.6 7  PosterizeOriginal 0.6 6
Equalize 0.4 7  Solarize 0.2 4
Equalize 0.4 4  Rotate 0.8 8
Solarize 0.6 3  Equalize 0.6 7
PosterizeOriginal 0.8 5  Equalize 1 2
Rotate 0.2 3  Solarize 0.6 8
Equalize 0.6 8  PosterizeOriginal 0.4 6
Rotate 0.8 8  Color 0.4 0
Rotate 0.4 9  Equalize 0.6 2
Equalize 0 7  Equalize 0.8 8
Invert 0.6 4  Equalize 1 8
Color 0.6 4  Contrast 1 8
Rotate 0.8 8  Color 1 2
Color 0.8 8  Solarize 0.8 7
Sharpness 0.4 7  Invert 0.6 8
ShearX 0.6 5  Equalize 1 9
Color 0.4 0  Equalize 0.6 3
Equalize 0.4 7  Solarize 0.2 4
Solarize 0.6 5  AutoContrast 0.6 5
Invert 0.6 4  Equalize 1 8
Color 0.6 4  Contrast 1 8
Equalize 0.8 8  Equalize 0.6 3
"""
_AUTO_CIFAR10 = """
Invert 0.1 0  ContrastIncreasing 0.2 6
Rotate 0.7 2  TranslateXRel 0.3 9
SharpnessIncreasing 0.8 1  SharpnessIncreasing 0.9 3
ShearY 0.5 8  TranslateYRel 0.7 9
AutoContrast 0.5 0  Equalize 0.9 0
ShearY 0.2 7  Posterize8 0.3 7
ColorIncreasing 0.4 3  BrightnessIncreasing 0.6 7
SharpnessIncreasing 0.3 9  BrightnessIncreasing 0.7 9
Equalize 0.6 0  Equalize 0.5 0
ContrastIncreasing 0.6 7  SharpnessIncreasing 0.6 5
ColorIncreasing 0.7 7  TranslateXRel 0.5 8
Equalize 0.3 0  AutoContrast 0.4 0
TranslateYRel 0.4 3  SharpnessIncreasing 0.2 6
BrightnessIncreasing 0.9 6  ColorIncreasing 0.2 8
SolarizeIncreasing 0.5 2  Invert 0 0
Equalize 0.2 0  AutoContrast 0.6 0
Equalize 0.2 0  Equalize 0.6 0
ColorIncreasing 0.9 9  Equalize 0.6 0
AutoContrast 0.8 0  SolarizeIncreasing 0.2 8
BrightnessIncreasing 0.1 3  ColorIncreasing 0.7 0
SolarizeIncreasing 0.4 5  AutoContrast 0.9 0
TranslateYRel 0.9 9  TranslateYRel 0.7 9
AutoContrast 0.9 0  SolarizeIncreasing 0.8 3
Equalize 0.8 0  Invert 0.1 0
TranslateYRel 0.7 9  AutoContrast 0.9 0
"""
_JITTER = ("BrightnessBy", "ContrastBy", "ColorBy")
_HUE = "HueBy"


@dataclass(frozen=True, kw_only=True)
class Step:
    operator: str
    probability: float = 1.0
    level: float = 1.0
    std: float = 0.0  # of normally distributed noise on the level; infinite: uniform from 0 to `level`
    max_level: float = 1.0


Alternative = tuple[Step, ...]


@dataclass(frozen=True)
class Group:
    alternatives: tuple[Alternative, ...]
    probability: float = 1.0  # of applying one of them

    @cached_property
    def num_steps(self) -> int:
        return max(map(len, self.alternatives))


@dataclass(frozen=True)
class Policy:
    groups: tuple[Group, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the operators in use; the first one is the identity, for steps that are not applied."""
        return tuple(dict.fromkeys([IDENTITY, *(step.operator for step in self._steps)]))

    @cached_property
    def num_steps(self) -> int:
        return sum(group.num_steps for group in self.groups)

    @cached_property
    def has_noise(self) -> bool:
        """Whether any level is normally distributed."""
        return any(0 < step.std < np.inf for step in self._steps)

    @property
    def _steps(self) -> Iterator[Step]:
        """The steps of all alternatives of all groups."""
        return (step for group in self.groups for alternative in group.alternatives for step in alternative)


def policy_of(data: DataConfig) -> Policy:
    """Return the policy of data.augment, of both jitters, data.grayscale and data.gaussian_blur, in timm's order. A
    policy without groups augments nothing."""
    groups = list(_groups(parse_augment(data.augment)))
    levels = {**dict.fromkeys(_JITTER, data.color_jitter), _HUE: data.hue_jitter}
    if steps := [Step(operator=name, level=level, std=np.inf) for name, level in levels.items() if level > 0]:
        groups.append(Group(tuple(itertools.permutations(steps)), data.color_jitter_probability))
    for name, probability in (("Grayscale", data.grayscale), ("GaussianBlur", data.gaussian_blur)):
        if probability > 0:
            groups.append(Group(((Step(operator=name, std=np.inf),),), probability))
    return Policy(tuple(groups))


def _groups(spec: AugmentSpec) -> tuple[Group, ...]:
    std = np.inf if spec.magnitude_std > 100 else spec.magnitude_std / 10
    if spec.policy == "rand":
        increasing = _CAN_INCREASE if spec.increasing else ()
        names = spec.operators or [f"{name}Increasing" if name in increasing else name for name in _RAND]
        level, most = spec.magnitude / 10, spec.magnitude_max / 10
        group = _one_of(names, probability=spec.probability, level=level, std=std, max_level=most)
        return (group,) * spec.num_layers
    if spec.policy in ("big-vision", "colossalai"):
        differs = _IN_COLOSSALAI if spec.policy == "colossalai" else {}
        steps = [Step(operator=differs.get(name, name)) for name in _BIG_VISION]
        cutout = Step(operator="Cutout40", std=np.inf)  # its level says where it is
        return (Group(tuple((step,) for step in (*steps, cutout))),) * 2
    if spec.policy in ("trivial", "3-augment"):
        return (_one_of(_TRIVIAL if spec.policy == "trivial" else _THREE, std=np.inf),)
    if spec.policy == "auto-imagenet":
        return (_pairs(_AUTO_IMAGENET, strongest=10, std=std),)
    if spec.policy == "auto-cifar10":
        return (_pairs(_AUTO_CIFAR10, strongest=9),)
    return ()


def _one_of(names: Iterable[str], **settings: float) -> Group:
    return Group(tuple((Step(operator=name, **settings),) for name in names))


def _pairs(table: str, *, strongest: int, std: float = 0.0) -> Group:
    """Return the policy of a table whose level `strongest` is the strong end of each operator's range."""
    rows = [line.split() for line in table.splitlines() if line]
    return Group(
        tuple(
            tuple(
                Step(operator=operator, probability=float(probability), level=int(level) / strongest, std=std)
                for operator, probability, level in (row[:3], row[3:])
            )
            for row in rows
        )
    )


def draw_operators(seed: int, policy: Policy, images: DrawInput) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return (operators, levels), each (n, policy.num_steps): indices into policy.names, and signed strengths.

    Each step of each image has its own counter, and so has each choice among a group's alternatives.
    """
    count = len(images.numbers)
    operators = np.zeros((count, policy.num_steps), dtype=np.int32)
    levels = np.zeros((count, policy.num_steps), dtype=np.float32)
    if policy.num_steps == 0:
        return operators, levels
    num_counters = len(policy.groups) + policy.num_steps  # each gives four numbers
    blocks = np.arange(1, num_counters + 1)
    low, high = np.repeat(images.numbers, num_counters), np.repeat(images.draw_numbers, num_counters)
    draws = uniform(seed, Purpose.AUGMENT, np.tile(blocks, count), low=low, high=high).reshape(count, num_counters, 4)
    uniforms = draws[:, :, 2]
    normals = np.zeros_like(uniforms)
    if policy.has_noise:
        # Zero has no quantile: half of the smallest other number instead.
        normals = normal_quantile(np.maximum(uniforms.ravel(), 2.0**-54)).reshape(uniforms.shape)
    counter = column = 0
    for group in policy.groups:
        chosen = (draws[:, counter, 0] * len(group.alternatives)).astype(np.int64)
        applies = draws[:, counter, 1] < group.probability
        counter += 1
        for number in range(group.num_steps):
            table = _table(policy, group, number)[chosen]
            operator, probability, level, std, highest = table.T
            is_uniform = np.isinf(std)
            noise = np.where(is_uniform, 0, std) * normals[:, counter]
            strength = np.where(is_uniform, level * uniforms[:, counter], level + noise)
            strength = np.clip(strength, 0, highest)
            operators[:, column] = np.where(applies & (draws[:, counter, 0] < probability), operator, 0)
            levels[:, column] = np.where(draws[:, counter, 1] < 0.5, strength, -strength)
            counter, column = counter + 1, column + 1
    return operators, levels


def _table(policy: Policy, group: Group, number: int) -> NDArray[np.float64]:
    """Return a row for each alternative: operator's number, probability, level, std, highest level of step `number`."""
    none = Step(operator=IDENTITY)
    steps = [alternative[number] if number < len(alternative) else none for alternative in group.alternatives]
    return np.array([(policy.names.index(s.operator), s.probability, s.level, s.std, s.max_level) for s in steps])


def erased_boxes(seed: int, images: DrawInput, *, probability: float, size: int) -> NDArray[np.int32]:
    """Return the box to erase from each training image, (n, 4): top, left, height, width in pixels; all 0: none.

    Zhong et al., "Random erasing", arXiv 1708.04896, with timm's ranges: 2 % to a third of the area, aspects from 0.3
    to 1 / 0.3.
    """
    if probability == 0:
        return np.zeros((len(images.numbers), 4), dtype=np.int32)
    sides = np.full(len(images.numbers), size)
    squares = replace(images, heights=sides, widths=sides)
    boxes = crop_boxes(seed, squares, area=(0.02, 1 / 3), aspect=(0.3, 1 / 0.3), purpose=Purpose.ERASE)
    block = np.full_like(images.numbers, 11)  # blocks 1 to 10 are the attempts
    draws = uniform(seed, Purpose.ERASE, block, low=images.numbers, high=images.draw_numbers)
    boxes[draws[:, 0] >= probability] = 0
    return boxes


def erasing_noise(data: DataConfig, *, step: int, k: int) -> NDArray[np.uint8]:
    """Return the noise for a micro-batch's erased boxes, (train_size, train_size, 3); (0, 0, 3): use the mean color.

    Normally distributed with the mean and standard deviation of data.normalise, as in timm, but clipped to valid pixel
    values. All images of the micro-batch share it: a box shows the part of the noise under it.
    """
    if data.random_erasing == 0 or data.random_erasing_fill == "mean":
        return np.zeros((0, 0, 3), dtype=np.uint8)
    side = data.train_size
    generator = philox_generator(data.seed, Purpose.NOISE, low=k, high=step)
    words = generator.random_raw(-(-side * side * 3 // 4)).astype("<u8").view("<u2")  # four in each number
    words = words[: side * side * 3].reshape(side, side, 3)
    tables = _noise_pixels(data.mean, data.std)
    return np.stack([table[words[..., channel]] for channel, table in enumerate(tables)], axis=-1)


@cache
def _noise_pixels(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[NDArray[np.uint8], ...]:
    """Return each channel's pixel values at 65,536 equally probable places of its normal distribution, (65536,)."""
    quantiles = normal_quantile((np.arange(1 << 16) + 0.5) / (1 << 16))
    values = (quantiles * one_std + one_mean for one_mean, one_std in zip(mean, std, strict=True))
    return tuple(one.round().clip(0, 255).astype(np.uint8) for one in values)
