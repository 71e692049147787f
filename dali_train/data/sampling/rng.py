"""All random numbers of the data path and of dropout, as pure functions of their position in training.

The generator is Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a block
cipher that turns (key, counter) into random bits, without state. The key is (seed, purpose); the counter is (epoch,
image) or (step, k). So a draw depends neither on the rank that makes it nor on earlier draws. NumPy has the same
generator; `philox` is a vectorised form (a test compares the two), because one generator object per image would cost
more than all the arithmetic here.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]


class Purpose(IntEnum):
    """The second half of the key: what the numbers are for. Never renumber, or old runs cannot be reproduced."""

    ORDER = 0
    CROP = 1
    FLIP = 2
    MIXUP = 3
    DROPOUT = 4
    INITIALISATION = 5
    BLOCKS = 6
    WINDOW = 7
    READER = 8  # the seeds of DALI's own reader and crops
    AUGMENT = 9
    ERASE = 10
    CUTMIX = 11  # and whether anything is mixed
    NOISE = 12  # in erased boxes
    WEIGHTS = 13  # initial ones, with model.init portable; counted by draw


def philox(seed: int, purpose: Purpose, block: UInt64s, low: UInt64s, high: UInt64s) -> UInt64s:
    """Return four random uint64 for each counter (block, low, high, 0), shape (len(low), 4).

    Row i equals the first four numbers of ``np.random.Philox(key=[seed, purpose], counter=[block[i] - 1, low[i],
    high[i], 0])``, which increments its counter before it draws.
    """
    key = np.array([[seed], [int(purpose)]], dtype=np.uint64)
    even, odd = np.stack([block, high]), np.stack([low, np.zeros_like(low)])  # words 0 and 2, 1 and 3 of each counter
    for _ in range(10):
        above, below = _multiply(even)
        even, odd = above[::-1] ^ odd ^ key, below[::-1]
        key += _WEYL
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=-1)


def philox_generator(seed: int, purpose: Purpose, *, low: int, high: int) -> np.random.Philox:
    """Return NumPy's own generator for one counter (low, high), for drawing many numbers."""
    words = np.array([seed, int(purpose), 0, low, high, 0], dtype=np.uint64)
    return np.random.Philox(key=words[:2], counter=words[2:])


def shuffled(generator: np.random.Philox, count: int) -> NDArray[np.uint32]:
    """Return ``range(count)`` in a uniformly random order, shape (count,).

    The numbers are sorted by random bits. The number itself fills the low bits, so that one vectorised sort of plain
    integers is enough and ties are broken the same way everywhere. For 14 million numbers 40 random bits are left:
    about 90 pairs tie, which is negligible. Only the generator's raw bits are used, because NumPy guarantees that these
    never change, which it does not for `permutation` (NEP 19).
    """
    bits = np.uint64((count - 1).bit_length())
    keys: UInt64s = generator.random_raw(count)
    keys >>= bits
    keys <<= bits
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << bits) - np.uint64(1)
    return keys.astype(np.uint32)


def torch_seed(seed: int, purpose: Purpose, *, step: int = 0, k: int = 0) -> int:
    """Return a seed for torch's generators (63 bits): for dropout in one micro-batch, or for the initial weights."""
    return int(philox_generator(seed, purpose, low=k, high=step).random_raw()) >> 1


# Philox4x64's multipliers and key increments, Table 2 of the paper.
_FACTORS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_32, _MASK32 = np.uint64(32), np.uint64((1 << 32) - 1)
_LOW_FACTORS, _HIGH_FACTORS = _FACTORS & _MASK32, _FACTORS >> _32


def _multiply(words: UInt64s) -> tuple[UInt64s, UInt64s]:
    """Return the high and the low 64 bits of ``_FACTORS * words``, from products of 32-bit halves."""
    low, high = words & _MASK32, words >> _32
    low_high = _LOW_FACTORS * high
    middle = (_LOW_FACTORS * low >> _32) + (low_high & _MASK32) + _HIGH_FACTORS * low
    return _HIGH_FACTORS * high + (low_high >> _32) + (middle >> _32), _FACTORS * words


def uniform(
    seed: int, purpose: Purpose, block: NDArray[np.int64], *, low: NDArray[np.int64], high: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return four numbers in [0, 1) for each counter, shape (n, 4): the top 53 bits of each random integer."""
    raw = philox(seed, purpose, block.astype(np.uint64), low.astype(np.uint64), high.astype(np.uint64))
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
