"""The classes of a mixture, and with several labels an image its sets of classes."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dali_train.config import DataConfig
from dali_train.data.dataset.label_kind import LabelKind
from dali_train.data.dataset.manifest import SETS_OF_CLASSES, Manifest
from dali_train.errors import ConfigError
from dali_train.text import plural


def class_names(data: DataConfig, root: Manifest, manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """Return the classes of a mixture: those of data.root, and with data.mix_classes union the others' behind them."""
    names = dict.fromkeys(root.class_names)
    if data.mix_classes == "union":
        for manifest in manifests:
            names |= dict.fromkeys(manifest.class_names)
    roots = [data.root, *(source for _, source, _ in data.mix)]
    for where, manifest in zip(roots, (root, *manifests), strict=True):
        its_names = manifest.class_names
        twice = [name for name, count in Counter(its_names).items() if count > 1]
        if twice:
            raise ConfigError(
                f"data.mix matches classes by name, and {len(twice)} of {where} are called alike, {twice[0]!r} the "
                "first: give each another name, with --class-names"
            )
    return tuple(names)


def class_numbers(data: DataConfig, manifests: Sequence[Manifest], names: Sequence[str]) -> list[NDArray[np.int32]]:
    """Return the class in the mixture of each class of each source, (its classes,).

    Args:
        manifests: of the sources.
        names: of the mixture's classes.

    Raises:
        ConfigError: a class has no counterpart, or data.mix_classes does not fit the source; the message names it.
    """
    numbers = {name: number for number, name in enumerate(names)}
    given = data.mix_classes if isinstance(data.mix_classes, dict) else {}
    sources = [name for name, _, _ in data.mix]
    for name in given:
        if name not in sources:
            raise ConfigError(f"data.mix_classes names {name!r}, which is none of data.mix: use {', '.join(sources)}")
    found = []
    for (name, root, _), manifest in zip(data.mix, manifests, strict=True):
        theirs = manifest.class_names
        targets = given.get(name, {})
        if isinstance(targets, dict):
            unknown = [one for one in targets if one not in theirs]
            if unknown:
                raise ConfigError(f"data.mix_classes {name}: {root} has no class {unknown[0]!r}: use its own names")
            targets = tuple(targets.get(one, one) for one in theirs)
        if len(targets) != len(theirs):
            raise ConfigError(
                f"data.mix_classes {name}: {plural(len(targets), 'class')} for the {len(theirs)} of {root}: name one "
                "of data.root for each of them, in their order"
            )
        for own, target in zip(theirs, targets, strict=True):
            if target not in numbers:
                said = "" if own == target else f", which data.mix_classes takes for {target!r},"
                raise ConfigError(
                    f"data.mix {name}: class {own!r} of {root}{said} is not among the {len(numbers)} of {data.root}: "
                    "set data.mix_classes to union, or name its counterpart there"
                )
        found.append(np.array([numbers[target] for target in targets], dtype=np.int32))
    return found


def united_sets(
    root: Manifest, manifests: Sequence[Manifest], numbers: Sequence[NDArray[np.int32]]
) -> tuple[LabelKind, list[NDArray[np.int32]]]:
    """Return the labels of the whole, which number sets of classes, and of each source the number there of each of its
    labels.

    Args:
        numbers: of each source the class in the mixture of each of its classes.
    """
    sets = _classes_of_labels(root)  # first: its labels keep their numbers
    known = {tuple(sorted(classes)): number for number, classes in enumerate(sets)}
    labels = []
    for manifest, classes_there in zip(manifests, numbers, strict=True):
        own = [tuple(sorted({int(classes_there[one]) for one in classes})) for classes in _classes_of_labels(manifest)]
        for classes in own:
            if classes not in known:
                known[classes] = len(sets)
                sets.append(classes)
        labels.append(np.array([known[classes] for classes in own], dtype=np.int32))
    return SETS_OF_CLASSES.load()(sets), labels


def _classes_of_labels(manifest: Manifest) -> list[tuple[int, ...]]:
    """Return the classes of each label."""
    return [manifest.label_kind.classes_of(label) for label in range(manifest.num_labels)]
