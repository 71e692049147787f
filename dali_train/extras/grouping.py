"""A validation split that shares no group with the training split: frames of one film, pictures of one patient
(`--group-by`)."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dali_train.data.convert.sources import Images, SourceError
from dali_train.data.sampling.rng import shuffled
from dali_train.text import plural, printable, span

_STREAM = 0x4752_4F55_5053  # "GROUPS", apart from what else is drawn


def held_out_groups(images: Images, pattern: str, fraction: float, *, seed: int) -> NDArray[np.bool_]:
    """Choose whole groups of images, so that each class has about `fraction` of its images among them, and print how
    many.

    A group is taken if it brings the numbers of its classes nearer to what they should be. No class is taken whole.

    Args:
        pattern: a regular expression that is searched in each image's location below the source; what it matches, or
            its first group if it has one, names the image's group.
        seed: decides which of the groups come first.

    Returns:
        Which images are held out, (N,).

    Raises:
        SourceError: the pattern is none, there is an image that it does not match, all images are one group, or no
            group can be held out.
    """
    groups, number_of_image = np.unique(_keys(images, pattern), return_inverse=True)
    if len(groups) == 1:
        raise SourceError(
            f"--group-by {pattern}: all {len(images.labels):,} images are one group, {printable(groups[0])!r}: use a "
            "pattern whose match differs between groups"
        )
    members = np.split(np.argsort(number_of_image, kind="stable"), np.cumsum(np.bincount(number_of_image))[:-1])
    totals = np.bincount(images.strata)
    wanted = np.maximum(totals > 1, (totals * fraction).round())
    held_out = np.zeros(len(totals), np.int64)
    chosen = np.zeros(len(images.labels), np.bool_)
    num_groups = 0
    for group in shuffled(np.random.Philox(key=[seed, _STREAM]), len(groups)).tolist():
        classes, counts = np.unique(images.strata[members[group]], return_counts=True)
        after = held_out[classes] + counts
        leaves_some = (after < totals[classes]).all()
        if leaves_some and _deviation(after, wanted[classes]) < _deviation(held_out[classes], wanted[classes]):
            held_out[classes] = after
            chosen[members[group]] = True
            num_groups += 1
    if not num_groups:
        raise SourceError(
            f"--group-by {pattern}: each of the {len(groups):,} groups is too large to be held out, or all of a class: "
            "use a larger --validation-fraction, or smaller groups"
        )
    sizes = [len(group) for group in members]
    absent = int(((totals > 0) & (held_out == 0)).sum())
    print(
        f"--group-by: {len(groups):,} groups of {span(min(sizes), max(sizes))} images; {num_groups:,} are held out, "
        f"{chosen.sum():,} of {plural(len(chosen), 'image')}"
        + (f"; {plural(absent, 'class')} not, since no group could be" if absent else "")
    )
    return chosen


def _keys(images: Images, pattern: str) -> Sequence[str]:
    """Return the name of each image's group. Raises SourceError."""
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise SourceError(f"--group-by {pattern}: is no regular expression ({error}): correct it") from None
    names = [images.name(number) for number in range(len(images.labels))]
    found = [search(name) for name in names]
    missing = [name for name, match in zip(names, found, strict=True) if match is None]
    if missing:
        raise SourceError(
            f"--group-by {pattern}: does not match {len(missing):,} of {len(names):,} images, such as "
            f"{printable(missing[0])}: use a pattern that finds the group in each name"
        )
    return [match[1 if match.re.groups else 0] or "" for match in found if match is not None]


def _deviation(counts: NDArray[np.int64], wanted: NDArray[np.float64]) -> float:
    return float(np.abs(counts - wanted).sum())
