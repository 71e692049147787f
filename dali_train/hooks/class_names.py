"""Readable class names."""

import re
from collections import Counter

from timm.data import ImageNetInfo

from dali_train.hooks.records import RunStart


def class_names(record: RunStart) -> tuple[str, ...]:
    """Return a unique name per class: the dataset's, with WordNet ids replaced by words; without names, the labels."""
    names = record.class_names or tuple(str(number) for number in range(record.num_classes))
    return _in_words(names) if all(re.fullmatch(r"n\d{8}", name) for name in names) else names


def _in_words(synsets: tuple[str, ...]) -> tuple[str, ...]:
    """Return "tench" for "n01440764". Words of several classes (crane, maillot) get the number too."""
    info, words = ImageNetInfo(), []  # knows the 21,841 synsets of ImageNet-21k as well
    for name in synsets:
        try:
            words.append(info.label_name_to_description(name).split(",")[0])
        except KeyError:
            words.append(name)
    counts = Counter(words)
    return tuple(word if counts[word] == 1 else f"{word} ({name})" for word, name in zip(words, synsets, strict=True))
