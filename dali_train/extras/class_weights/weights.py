"""How much each class counts in the loss: by its number of training images, or as the config says.

All weights are a function of the labels in the index and of the config, so they are the same on all ranks and in every
micro-batch. A loss is divided by its number of images (and, where it is a mean over classes, of classes), never by the
sum of weights: the mean over a step's micro-batches is then that over its images, however they are split.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dali_train.config import LossConfig
from dali_train.errors import ConfigError
from dali_train.extras.class_weights import ByClass
from dali_train.text import plural, printable
from dali_train.training.loss import TrainingClasses

_MOST_SHOWN = 12  # classes in a line of `plan`


def weights_of(config: LossConfig, classes: TrainingClasses) -> dict[str, NDArray[np.float64]]:
    """Return the losses' arguments ``class_weights`` and ``positive_weights``, (classes,) each, as far as they are set.

    Raises:
        ConfigError: a class that has a weight does not exist, or has two.
    """
    weights = {}
    if isinstance(config.class_weights, tuple):
        weights["class_weights"] = _listed("loss.class_weights", config.class_weights, classes)
    elif config.class_weights != "none":
        weights["class_weights"] = _from_counts(config, config.class_weights, classes)
    if isinstance(config.positive_weight, tuple):
        weights["positive_weights"] = _listed("loss.positive_weight", config.positive_weight, classes)
    elif config.positive_weight == "balanced":
        weights["positive_weights"] = _negatives_per_positive(classes)
    return weights


def _from_counts(config: LossConfig, method: str, classes: TrainingClasses) -> NDArray[np.float64]:
    """Return weights whose mean is 1: over the images with cross-entropy, where an image has the weight of its class,
    and with binary losses, where it has a term for each class, over the classes. Classes without images have 1."""
    present = classes.counts > 0
    counts = np.maximum(classes.counts, 1).astype(np.float64)
    if method == "balanced":
        rarity = 1 / counts
    else:  # Cui et al., "Class-Balanced Loss Based on Effective Number of Samples", arXiv 1901.05555, equation 4
        beta = float(method.removeprefix("effective-"))
        rarity = (1 - beta) / (1 - beta**counts)
    shares = counts if config.name == "cross-entropy" else np.ones_like(counts)
    mean = np.average(rarity[present], weights=shares[present])
    return np.where(present, rarity / mean, 1.0)


def _negatives_per_positive(classes: TrainingClasses) -> NDArray[np.float64]:
    """Return the images without each class by those with it; 1 for a class that none or all have."""
    negatives = classes.num_images - classes.counts
    can_be_balanced = (classes.counts > 0) & (negatives > 0)
    return np.where(can_be_balanced, negatives / np.maximum(classes.counts, 1), 1.0)


def _listed(setting: str, pairs: ByClass, classes: TrainingClasses) -> NDArray[np.float64]:
    weights = np.ones(len(classes.counts))
    known = {str(number): number for number in range(len(weights))}
    known |= {name: number for number, name in enumerate(classes.names)}
    seen = set()
    for name, weight in pairs:
        number = known.get(name)
        if number is None:
            raise ConfigError(
                f"{setting} names {printable(name)}, but there is no such name among the {len(weights)} classes: use "
                f"one of data.root's dataset.json, or a number from 0 to {len(weights) - 1}"
            )
        if number in seen:
            raise ConfigError(f"{setting} names class {number} twice: give each class one weight")
        seen.add(number)
        weights[number] = weight
    return weights


def describe_weights(weights: NDArray[np.float64], classes: TrainingClasses) -> str:
    """Return each class with its weight and its images; of many classes those with the smallest and largest weights."""
    order = range(len(weights))
    if len(weights) <= _MOST_SHOWN:
        return ", ".join(_each(order, weights, classes))
    by_weight = np.argsort(weights, kind="stable").tolist()
    few = _MOST_SHOWN // 4
    lowest = ", ".join(_each(by_weight[:few], weights, classes))
    highest = ", ".join(_each(by_weight[-few:], weights, classes))
    return f"{lowest} ... {highest}"


def _each(numbers: Sequence[int], weights: NDArray[np.float64], classes: TrainingClasses) -> Iterator[str]:
    for position, number in enumerate(numbers):
        name = printable(classes.names[number]) if classes.names else str(number)
        count = int(classes.counts[number])
        images = plural(count, "image") if position == 0 else str(count)
        yield f"{name} {weights[number]:.4g} ({images})"
