"""ImageNet (ILSVRC 2012) as it is published, two tar archives and the development kit; and ImageNet-21k.

The training archive is a tar of one tar per synset. The validation archive is a flat tar, and only the development kit
knows its labels, as ILSVRC ids; its ``meta.mat`` has each id's synset. Labels here are positions in the sorted list
of synsets, as in every pretrained model: not the ILSVRC ids.
"""

import io
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeGuard

import numpy as np

from dali_train.data.convert.archives import Archive, Directory, FilesByName
from dali_train.data.convert.sources import Image, ImageFiles, Images, SourceError, Sources, hold_out, kept_listing
from dali_train.data.dataset.manifest import SplitName
from dali_train.data.dataset.passed_over import PassedOver
from dali_train.extras.formats.listing import Listed, list_splits, open_plain
from dali_train.files import sha256

_SYNSET_ARCHIVE = re.compile(r"(n\d{8})\.tar$")
_SYNSET_IMAGE = re.compile(r"(n\d{8})_[^/]+\.JPEG$", re.IGNORECASE)
_OFFICIAL = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz")
_LISTED_AT_ONCE = 16  # archives of synsets
_VALIDATION_IMAGE = re.compile(r"_val_(\d{8})\.JPEG$", re.IGNORECASE)


def imagenet(
    train: Path | None, validation: Path | None, devkit: Path | None, *, kept_in: Path | None = None
) -> Sources:
    """Return the splits whose archives are given, and the synsets in the order of the labels.

    Args:
        kept_in: the directory for the listings, see `kept_listing`.

    Raises:
        SourceError: an archive that is not ImageNet's, or does not fit the development kit.
    """
    if train is None and validation is None:
        raise SourceError("nothing to convert: give --train-archive FILE, --validation-archive FILE, or both")
    if validation is not None and devkit is None:
        raise SourceError("--validation-archive needs --devkit ILSVRC2012_devkit_t12.tar.gz, which holds its labels")
    synset_of_id, validation_ids = _read_devkit(devkit) if devkit is not None else ({}, [])
    sources: dict[SplitName, Images] = {}
    synsets = sorted(synset_of_id.values())
    if train is not None:
        archive = Archive(train)
        synsets_there = {_synset(member) for member in archive.list()}
        if not synsets_there:
            raise SourceError(f"{train}: an archive without members: not ImageNet's training archive")
        unknown = sorted(synsets_there - set(synsets)) if devkit is not None else []
        if unknown:
            raise SourceError(
                f"{train}: {', '.join(unknown[:5])} ({len(unknown)} synsets) are not in {devkit}: take the devkit of "
                "the same year"
            )
        synsets = synsets or sorted(synsets_there)
        sources["train"] = Images(
            ImageFiles(partial(_training_images, archive, synsets), archive.read),
            train,
            kept=kept_listing(kept_in, "train", train, devkit),
        )
    if validation is not None and devkit is not None:
        label_of = {synset: label for label, synset in enumerate(synsets)}
        labels = [label_of[synset_of_id[number]] for number in validation_ids]
        archive = Archive(validation)
        sources["validation"] = Images(
            ImageFiles(partial(_validation_images, archive, labels), archive.read),
            validation,
            kept=kept_listing(kept_in, "validation", validation, devkit, train),
            labels_from={devkit: sha256(devkit)},
        )
    return sources, synsets


def official_archives(source: Path, *, kept_in: Path | None = None) -> Sources:
    """Return the splits whose official archives are in a directory, or that of one archive, as `imagenet` does."""
    directory = source.parent if source.is_file() else source
    train, validation, devkit = (path if path.exists() else None for path in map(directory.joinpath, _OFFICIAL))
    if source.is_file():
        train, validation = (path if path == source else None for path in (train, validation))
    if validation is not None and devkit is None:
        raise SourceError(f"{validation}: its labels are in {_OFFICIAL[2]}: put that file beside it")
    return imagenet(train, validation, devkit, kept_in=kept_in)


def imagenet21k(
    source: Path,
    *,
    validation_fraction: float | None,
    seed: int,
    group_by: str | None = None,
    kept_in: Path | None = None,
) -> Sources:
    """Return the splits of ImageNet-21k as of winter 2021, a tar per synset in a directory or a tar, and the synsets.

    Raises:
        SourceError: a tar of something else.
    """
    if source.is_file():
        splits, synsets = imagenet(source, None, None, kept_in=kept_in)
        return hold_out(splits, validation_fraction, seed=seed, group_by=group_by), synsets
    files = Directory(source).list() if source.exists() else ()
    synsets = sorted({match[1] for member in files if (match := _SYNSET_ARCHIVE.search(member.name))})
    label_of = {synset: label for label, synset in enumerate(synsets)}

    def list_synset(path: Path) -> Listed:
        match = _SYNSET_ARCHIVE.fullmatch(path.name)
        if match is None:
            raise SourceError(f"{path}: is not SYNSET.tar, such as n01440764.tar: move it out of --source")
        return _images_of(open_plain(path).walk(), match[1], label_of[match[1]], str(path))

    splits = list_splits(source, ".tar", list_synset)
    return hold_out(splits, validation_fraction, seed=seed, group_by=group_by), synsets


def _synset(member: Image) -> str:
    match = _SYNSET_ARCHIVE.search(member.name) or _SYNSET_IMAGE.search(member.name)
    if match is None:
        raise SourceError(
            f"{member.location}: neither SYNSET.tar, such as n01440764.tar, nor SYNSET_name.JPEG: "
            "--train-archive is ImageNet's ILSVRC2012_img_train.tar"
        )
    return match[1]


def _training_images(archive: Archive, synsets: list[str]) -> Iterator[Image | PassedOver]:
    label_of = {synset: label for label, synset in enumerate(synsets)}
    # A header is read alone: from a file server 1.28 million, one after the other, are 10 minutes of waiting.
    with ThreadPoolExecutor(_LISTED_AT_ONCE) as pool:
        members = archive.walk()
        while group := [*islice(members, 2 * _LISTED_AT_ONCE)]:
            listings = [pool.submit(list, archive.walk(outer)) if _is_archive(outer) else None for outer in group]
            for outer, listing in zip(group, listings, strict=True):
                if isinstance(outer, PassedOver):
                    yield outer
                    continue
                synset = _synset(outer)
                images: Listed = [outer] if listing is None else listing.result()
                yield from _images_of(images, synset, label_of[synset], outer.location)


def _is_archive(outer: Image | PassedOver) -> TypeGuard[Image]:
    """Return whether this is the archive of a synset; some copies hold the images themselves instead."""
    return isinstance(outer, Image) and _SYNSET_ARCHIVE.search(outer.name) is not None


def _images_of(entries: Listed, synset: str, label: int, location: str) -> Iterator[Image | PassedOver]:
    for image in entries:
        if isinstance(image, PassedOver):
            yield image
            continue
        match = _SYNSET_IMAGE.search(image.name)
        if match is None or match[1] != synset:
            raise SourceError(f"{location}: holds {image.name!r}, expected {synset}_NUMBER.JPEG")
        yield image._replace(label=label)


def _validation_images(archive: Archive, labels: Sequence[int]) -> Iterator[Image | PassedOver]:
    """`labels` by the number in the name, which counts from 1."""
    seen: set[int] = set()
    for image in archive.walk():
        if isinstance(image, PassedOver):
            yield image
            continue
        match = _VALIDATION_IMAGE.search(image.name)
        if match is None:
            raise SourceError(
                f"{image.location}: expected ILSVRC2012_val_NUMBER.JPEG: --validation-archive is ILSVRC2012_img_val.tar"
            )
        number = int(match[1])
        if not 1 <= number <= len(labels) or number in seen:
            problem = (
                "appears twice" if number in seen else f"is not one of the devkit's {len(labels)} validation images"
            )
            raise SourceError(f"{image.location}: {problem}: archive and devkit do not belong together")
        seen.add(number)
        yield image._replace(label=labels[number - 1])
    if len(seen) != len(labels):
        raise SourceError(
            f"{archive.path}: {len(seen)} images, the devkit has {len(labels)} labels: this is the wrong "
            "archive, or it is truncated"
        )


def _read_devkit(path: Path) -> tuple[dict[int, str], list[int]]:
    """Return the synset of each ILSVRC id whose synset has images itself, and the id of each validation image."""
    archive = Archive(path)
    files = FilesByName(archive)
    meta, truth = files["meta.mat"], files["ILSVRC2012_validation_ground_truth.txt"]
    synset_of_id = _read_meta(archive.read(meta), meta.location)
    try:
        ids = [int(line) for line in archive.read(truth).split()]
    except ValueError as error:
        raise SourceError(f"{truth.location}: expected one ILSVRC id per line ({error})") from error
    unknown = sorted(set(ids) - set(synset_of_id))
    if unknown:
        raise SourceError(
            f"{truth.location}: ILSVRC ids {unknown[:5]} are not among the {len(synset_of_id)} synsets of meta.mat"
        )
    return synset_of_id, ids


def _read_meta(content: bytes, location: str) -> dict[int, str]:
    """Return the table ``synsets`` of a MATLAB file: a row per synset, of which those with children hold no images.

    scipy reads level 5 files as numbers, text and structs and unpickles nothing, so the file cannot run code.
    """
    from scipy.io import loadmat

    try:
        table = loadmat(io.BytesIO(content), squeeze_me=True, variable_names=["synsets"])["synsets"]
        rows = [(int(row["ILSVRC2012_ID"]), str(row["WNID"]), int(row["num_children"])) for row in np.atleast_1d(table)]
    except Exception as error:  # nearly any kind on damaged files
        raise SourceError(f"{location}: not the devkit's table of synsets, or damaged ({error})") from error
    return {number: synset for number, synset, num_children in rows if num_children == 0}
