"""Near-duplicates by two perceptual hashes of 64 bits, which err about different images.

pHash: which of the 64 lowest frequencies of the image's cosine transform, shrunk to 32 x 32 grey values, exceed their
median (C. Zauner, Implementation and Benchmarking of Perceptual Image Hash Functions, 2010). dHash: which of 8 x 8
places is brighter than its left neighbour (N. Krawetz, "Kind of Like That", hackerfactor.com, 2013).

Two images are near-duplicates if both hashes differ in few bits. Hashes within `MOST_PHASH` bits of each other have,
among four words of 16 bits, one that differs in at most a quarter of these, so tables of words propose the pairs:
multi-index hashing (Norouzi, Punjani and Fleet, CVPR 2012). That takes n^2 / 1000 comparisons instead of n^2 / 2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.fft import dctn
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dali_train.data.dataset.image_file import BadImageError, check_size, decode_rgb, open_image
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.manifest import SPLITS, Manifest
from dali_train.data.dataset.storage import Storage, open_shards, read_stored
from dali_train.data.dataset.write_index import map_shards
from dali_train.data.progress import Progress
from dali_train.errors import DatasetError
from dali_train.extras.image_names import file_names
from dali_train.extras.pictures.predictions import write_table
from dali_train.text import aligned, plural

# docs/measurements/duplicates.md: copies that were resized and compressed again differ in at most 6 and 12 bits.
MOST_PHASH, MOST_DHASH = 6, 12
_PHASH_SIDE, _FREQUENCIES, _DHASH_SIDE = 32, 8, 8
_LEAST_CONTRAST = 2.0  # standard deviation of grey values up to 255: below it the bits are noise
_MANY = 0.1  # of the images: CIFAR-10 has 2 % that are near-duplicates, and digits 21 % that are not
_IMAGES_AT_ONCE = 256  # that a thread reads and hashes
_PAIRS_AT_ONCE = 1 << 20  # proposals that are compared together, which bounds memory
_WORD_BITS, _NUM_WORDS = 16, 4
_WORD = np.uint64((1 << _WORD_BITS) - 1)
_FLIPS = (0, *(1 << bit for bit in range(_WORD_BITS)))  # of a word: none, or one bit
_NUM_ONES = np.array([number.bit_count() for number in range(1 << _WORD_BITS)], np.uint8)

Hashes = NDArray[np.uint64]
"""pHash and dHash of each image, (N, 2)."""


@dataclass(frozen=True)
class Member:
    """An image of a group of near-duplicates."""

    split: str
    image: int
    label: str
    file: str  # empty: not known

    def __str__(self) -> str:
        return f"{self.split} image {self.image} ({self.label}) {self.file}".rstrip()


def duplicates(root: Path | str, *, num_shown: int, table: Path | None, workers: int) -> Iterator[str]:
    """Find the groups of near-duplicates in a dataset, and yield lines that describe them.

    Args:
        root: the dataset's directory or URL.
        num_shown: groups that are listed.
        table: a CSV file to write for data.exclude; None: none.

    Raises:
        DatasetError: the dataset is not here, or an image cannot be decoded.
    """
    manifest = Manifest.read(root)
    splits = [Split(root, name) for name in SPLITS if name in manifest.splits]
    hashed = [hash_split(split, workers) for split in splits]
    hashes = np.concatenate([part for part, _ in hashed])
    contrasts = np.concatenate([part for _, part in hashed])
    usable = np.flatnonzero(contrasts >= _LEAST_CONTRAST)
    if len(usable) < len(hashes):
        yield f"{plural(len(hashes) - len(usable), 'image')} of nearly one colour: not compared"
    groups = [usable[group] for group in groups_of(hashes[usable], workers)]
    named = sorted(_named(groups, splits), key=_interest)
    yield _summary(named, len(hashes))
    if sum(map(len, named)) > _MANY * len(hashes):
        yield "that is a large part: simple pictures of one kind, such as digits, are alike to these hashes"
    for group in named[:num_shown]:
        yield ""
        yield from aligned([(one.split, str(one.image), one.label, one.file) for one in group])
    if len(named) > num_shown:
        yield ""
        yield f"and {plural(len(named) - num_shown, 'group')} more: --groups N lists N"
    if table is not None:
        yield _write(table, named)


def hash_split(split: Split, workers: int) -> tuple[Hashes, NDArray[np.float32]]:
    """Return the hashes of each image of a split, (N, 2), and the standard deviations of their grey values, (N,).

    Raises:
        DatasetError: an image cannot be read or decoded.
    """
    hashes = np.zeros((len(split), 2), np.uint64)
    contrasts = np.zeros(len(split), np.float32)
    portions = np.array_split(np.arange(len(split)), -(-len(split) // _IMAGES_AT_ONCE))
    measure = partial(_measure, split, open_shards(split))
    with Progress(f"hashing {split.name}", total=len(split), unit="images") as progress:
        for portion, measured in zip(portions, map_shards(portions, measure, workers=workers), strict=True):
            hashes[portion], contrasts[portion] = measured
            progress.update(len(portion), num_bytes=int(split.rows["size"][portion].sum()))
    return hashes, contrasts


def _measure(split: Split, storage: Storage, images: NDArray[np.int64]) -> tuple[Hashes, NDArray[np.float32]]:
    square = np.zeros((len(images), _PHASH_SIDE, _PHASH_SIDE), np.float32)
    coarse = np.zeros((len(images), _DHASH_SIDE, _DHASH_SIDE + 1), np.float32)
    for position, stored in enumerate(read_stored(storage, split, images)):
        try:
            image = _grey(stored)
        except BadImageError as error:
            raise DatasetError(f"{split.describe(int(images[position]))} {error}") from error
        square[position] = _shrunk(image, _PHASH_SIDE, _PHASH_SIDE)
        coarse[position] = _shrunk(image, _DHASH_SIDE + 1, _DHASH_SIDE)
    return np.stack([phash(square), dhash(coarse)], axis=-1), square.std(axis=(1, 2))


def _grey(stored: NDArray[np.uint8]) -> Image.Image:
    """Return an image, as it is stored, in grey; a JPEG only as large as the hashes need. Raises BadImageError."""
    if stored.ndim == 3:  # raw
        return Image.fromarray(stored).convert("L")
    content = stored.tobytes()
    image = open_image(content)
    if image.format != "JPEG" or image.mode not in ("L", "RGB"):
        return decode_rgb(content).convert("L")
    check_size(image.height, image.width)
    try:
        image.draft("L", (2 * _PHASH_SIDE, 2 * _PHASH_SIDE))  # a third less time than all pixels
        return image.convert("L")
    except Exception:  # PIL's decoders raise nearly any kind on damaged files, for which the whole image has a sentence
        return decode_rgb(content).convert("L")


def _shrunk(image: Image.Image, width: int, height: int) -> NDArray[np.float32]:
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS), dtype=np.float32)


def phash(grey: NDArray[np.float32]) -> Hashes:
    """Return the pHash of each image, (N,), of grey values (N, 32, 32)."""
    low = dctn(grey, axes=(1, 2), norm="ortho")[:, :_FREQUENCIES, :_FREQUENCIES].reshape(len(grey), -1)
    medians = np.median(low[:, 1:], axis=1, keepdims=True)  # without the mean grey value, which would dominate
    return _packed(low > medians)


def dhash(grey: NDArray[np.float32]) -> Hashes:
    """Return the dHash of each image, (N,), of grey values (N, 8, 9)."""
    return _packed((grey[:, :, 1:] > grey[:, :, :-1]).reshape(len(grey), -1))


def _packed(bits: NDArray[np.bool_]) -> Hashes:
    """Return numbers with these bits, (N,) of (N, 64)."""
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]


def groups_of(hashes: Hashes, workers: int = 1) -> list[NDArray[np.int64]]:
    """Return the numbers of the images of each group of near-duplicates, by their hashes, (N, 2)."""
    distinct, members = np.unique(hashes, axis=0, return_inverse=True)  # equal ones cost no comparison
    words = range(_NUM_WORDS)
    pairs = np.concatenate(list(map_shards(words, partial(_close_pairs, distinct), workers=workers)))
    graph = coo_array((np.ones(len(pairs), np.bool_), (pairs[:, 0], pairs[:, 1])), shape=(len(distinct), len(distinct)))
    _, components = connected_components(graph, directed=False)
    group_of_image = components[members.reshape(-1)]
    order = np.argsort(group_of_image, kind="stable")
    ends = np.flatnonzero(np.diff(group_of_image[order])) + 1
    return [group for group in np.split(order, ends) if len(group) > 1]


def _close_pairs(hashes: Hashes, word: int) -> NDArray[np.int64]:
    """Return the pairs of near-duplicates, (pairs, 2), whose pHashes differ in at most one bit of a word."""
    values = (hashes[:, 0] >> np.uint64(_WORD_BITS * word) & _WORD).astype(np.int64)
    order = np.argsort(values, kind="stable")  # the table: images by their word
    starts = np.searchsorted(values[order], np.arange((1 << _WORD_BITS) + 1))
    found = [np.zeros((0, 2), np.int64)]
    for flip in _FLIPS:
        asked = values ^ flip
        counts = starts[asked + 1] - starts[asked]
        blocks = np.searchsorted(np.cumsum(counts), np.arange(_PAIRS_AT_ONCE, counts.sum(), _PAIRS_AT_ONCE))
        for images in np.split(np.arange(len(values)), blocks):
            numbers = counts[images]
            left = np.repeat(images, numbers)
            position = np.arange(len(left)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
            right = order[starts[asked[left]] + position]
            found.append(_near(hashes, left[left < right], right[left < right]))
    return np.concatenate(found)


def _near(hashes: Hashes, left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of the pairs, (pairs, 2), of which both hashes are close."""
    for kind, most in enumerate((MOST_PHASH, MOST_DHASH)):
        is_near = _distances(hashes[left, kind], hashes[right, kind]) <= most
        left = left[is_near]
        right = right[is_near]
    return np.stack([left, right], axis=-1)


def _distances(first: Hashes, second: Hashes) -> NDArray[np.uint8]:
    """Return the number of bits in which hashes differ, (N,)."""
    differing = first ^ second
    words = [differing >> np.uint64(_WORD_BITS * word) & _WORD for word in range(_NUM_WORDS)]
    return np.sum([_NUM_ONES[word] for word in words], axis=0, dtype=np.uint8)


def _named(groups: Sequence[NDArray[np.int64]], splits: Sequence[Split]) -> list[list[Member]]:
    """Return the members of groups, whose numbers go on from a split to the next."""
    members: dict[int, Member] = {}
    numbers = np.sort(np.concatenate([np.zeros(0, np.int64), *groups]))
    first = 0
    for split in splits:
        images = numbers[(numbers >= first) & (numbers < first + len(split))] - first
        labels = [split.label_text(label) for label in split.rows["label"][images].tolist()]
        for image, label, file in zip(images.tolist(), labels, file_names(split, images), strict=True):
            members[first + image] = Member(split.name, image, label, file)
        first += len(split)
    return [[members[number] for number in group.tolist()] for group in groups]


def _interest(group: Sequence[Member]) -> tuple[bool, bool]:
    """Return a key that puts groups in two splits first, and then those under two labels."""
    return not _differ(group, "split"), not _differ(group, "label")


def _differ(group: Sequence[Member], name: str) -> bool:
    return len({getattr(member, name) for member in group}) > 1


def _summary(groups: Sequence[Sequence[Member]], num_images: int) -> str:
    if not groups:
        return f"no near-duplicates among {num_images:,} images"
    across = sum(_differ(group, "split") for group in groups)
    disputed = sum(_differ(group, "label") for group in groups)
    return (
        f"{plural(len(groups), 'group')} of near-duplicates, {sum(map(len, groups)):,} of {num_images:,} images: "
        f"{across:,} in both splits, {disputed:,} under two labels"
    )


def _write(table: Path, groups: Sequence[Sequence[Member]]) -> str:
    """Write the list of training images that have a twin, and return a line about it."""
    rows = []
    for group in groups:
        held_out = [member for member in group if member.split != "train"]
        kept = (held_out or group)[0]
        twins = [member for member in group if member.split == "train" and member is not kept]
        rows += [[twin.image, twin.file, twin.label, str(kept)] for twin in twins]
    write_table(table, ["image", "file", "label", "same as"], rows)
    return f"{table}: {plural(len(rows), 'training image')}; without them trains --data.exclude {table}"
