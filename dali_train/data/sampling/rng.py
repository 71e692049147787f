"""All random numbers of the data path, of dropout and of initial weights, as pure functions of what they are for.

The generator is Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a block
cipher that turns (key, counter) into random bits, without state. The key is (seed, purpose); the counter is (image,
draw number) or (step, k). So a draw depends neither on the rank that makes it nor on earlier draws. NumPy has the same
generator; `philox` is a vectorised form (a test compares the two), because one generator object per image would cost
more than all the arithmetic here.

All draws, and initial weights with model.init portable, are the same bits on every machine and with every version of
NumPy. Of its generators only the raw bits are used, because NumPy guarantees that these never change, which it does not
for `permutation`, `beta` or `standard_normal` (NEP 19). And the last bits of exp, log and sin depend on the processor's
instructions in torch, in NumPy and in the C library alike, so here only +, -, *, / and square roots of single numbers
are used, which IEEE 754 rounds correctly, and no sums over many numbers, whose order varies. All arithmetic is in
float64 and rounded to float32 once.
"""

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]
Float64s = NDArray[np.float64]

DRAWS_VERSION = 2
"""Part of each recipe. Raise it with a change after which a seed draws other numbers. In version 1 mixing, the noise of
erased boxes and of operators' levels, and crops were drawn with NumPy's functions."""


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
    CUTMIX = 11  # and whether it is used instead of Mixup
    NOISE = 12  # in erased boxes
    WEIGHTS = 13  # initial ones, with model.init portable; counted by draw
    MIXED = 14  # whether a micro-batch is mixed
    FILTER = 15  # by which an image is resized


def philox(seed: int, purpose: Purpose, block: UInt64s, low: UInt64s, high: UInt64s) -> UInt64s:
    """Return four random uint64 for each counter (block, low, high, 0), shape (len(low), 4).

    Row i equals the first four numbers of ``np.random.Philox(key=[seed, purpose], counter=[block[i] - 1, low[i],
    high[i], 0])``, which increments its counter before it draws.
    """
    key = np.array([[seed], [int(purpose)]], dtype=np.uint64)
    # Words 0 and 2, 1 and 3 of each counter.
    even = np.stack([block, high])
    odd = np.stack([low, np.zeros_like(low)])
    for _ in range(10):
        above, below = _multiply(even)
        even = above[::-1] ^ odd ^ key
        odd = below[::-1]
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
    about 90 pairs tie, which is negligible.
    """
    bits = np.uint64((count - 1).bit_length())
    keys: UInt64s = generator.random_raw(count)
    keys >>= bits
    keys <<= bits
    pieces = [slice(first, min(first + _CHUNK, count)) for first in range(0, count, _CHUNK)]
    for piece in pieces:  # in pieces, and in place: of 100 million numbers the keys alone take 800 MB
        keys[piece] |= np.arange(piece.start, piece.stop, dtype=np.uint64)
    keys.sort()
    numbers = keys.view(np.uint32)[:count]
    mask = (np.uint64(1) << bits) - np.uint64(1)
    for piece in pieces:  # no piece covers a key that is still to be read
        numbers[piece] = keys[piece] & mask
    keys.resize((count + 1) // 2, refcheck=False)  # the other half goes back to the system; only `numbers` refers to it
    return keys.view(np.uint32)[:count]


def torch_seed(seed: int, purpose: Purpose, *, step: int = 0, k: int = 0) -> int:
    """Return a seed for torch's generators (63 bits): for dropout in one micro-batch, or for the initial weights."""
    return int(philox_generator(seed, purpose, low=k, high=step).random_raw()) >> 1


# Philox4x64's multipliers and key increments, Table 2 of the paper.
_FACTORS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_32 = np.uint64(32)
_MASK32 = np.uint64((1 << 32) - 1)
_LOW_FACTORS = _FACTORS & _MASK32
_HIGH_FACTORS = _FACTORS >> _32


def _multiply(words: UInt64s) -> tuple[UInt64s, UInt64s]:
    """Return the high and the low 64 bits of ``_FACTORS * words``, from products of 32-bit halves."""
    low = words & _MASK32
    high = words >> _32
    low_high = _LOW_FACTORS * high
    middle = (_LOW_FACTORS * low >> _32) + (low_high & _MASK32) + _HIGH_FACTORS * low
    return _HIGH_FACTORS * high + (low_high >> _32) + (middle >> _32), _FACTORS * words


def uniform(
    seed: int, purpose: Purpose, block: NDArray[np.int64], *, low: NDArray[np.int64], high: NDArray[np.int64]
) -> Float64s:
    """Return four numbers in [0, 1) for each counter, shape (n, 4): the top 53 bits of each random integer."""
    raw = philox(seed, purpose, block.astype(np.uint64), low.astype(np.uint64), high.astype(np.uint64))
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniforms(generator: np.random.Philox, count: int) -> Float64s:
    """Return the next `count` numbers of `generator` as uniform ones between 0 and 1 exclusive, (count,)."""
    return ((generator.random_raw(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


_NUM_CANDIDATES = 8  # at a time, of which half or more are taken


def beta(generator: np.random.Philox, alpha: float) -> float:
    """Return a number of the distribution Beta(alpha, alpha), from the next numbers of `generator`.

    By rejection: Jöhnk's method up to alpha 1 ("Erzeugung von betaverteilten und gammaverteilten Zufallszahlen",
    Metrika 8, 1964), above that Cheng's algorithm BB without its shortcuts ("Generating beta variates with nonintegral
    shape parameters", Communications of the ACM 21, 1978).
    """
    candidates = _johnk if alpha <= 1 else _cheng
    while True:
        values, is_taken = candidates(alpha, uniforms(generator, 2 * _NUM_CANDIDATES).reshape(2, _NUM_CANDIDATES))
        if is_taken.any():
            return float(values[is_taken.argmax()])


def _johnk(alpha: float, pairs: Float64s) -> tuple[Float64s, NDArray[np.bool_]]:
    """Return candidates, made of `pairs` of uniform numbers, (2, n), and whether each is to be taken."""
    # Powers of 1 / alpha, and the share of the first in their sum. With a small alpha both may be below any float.
    first, second = logarithm(pairs) / max(alpha, 1e-300)
    powers = exponential(np.maximum([first, second], -_LARGEST_EXPONENT))
    values = 1 / (1 + exponential(np.clip(second - first, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)))
    return values, powers[0] + powers[1] <= 1


def _cheng(alpha: float, pairs: Float64s) -> tuple[Float64s, NDArray[np.bool_]]:
    """As `_johnk`."""
    first, rest, second = logarithm(np.stack([pairs[0], 1 - pairs[0], pairs[1]]))
    v = (first - rest) / np.sqrt(alpha)
    w = alpha * exponential(v)
    r = (alpha + np.sqrt(alpha)) * v - 2 * _LOG_2
    return w / (alpha + w), r + 2 * alpha * logarithm(2 * alpha / (alpha + w)) >= 2 * first + second


_CHUNK = 1 << 15  # numbers that are computed at a time, so that they stay in the processor's cache


def uniform_weights(seed: int, draw: int, count: int, low: float, high: float) -> NDArray[np.float32]:
    """Return `count` numbers, uniform between `low` and `high` exclusive, for draw number `draw` of a model: (count,).

    The bounds are excluded as float32 too: timm and torch turn numbers between -1 and 1 into normal ones, and a bound
    would become infinite.
    """
    first, last = np.float32(low), np.float32(high)
    inner = np.nextafter(first, last), np.nextafter(last, first)
    values = np.empty(count, dtype=np.float32)
    for part, numbers in _uniform_parts(seed, draw, count):
        values[part] = np.clip((low + numbers * (high - low)).astype(np.float32), *inner)
    return values


def normal_weights(seed: int, draw: int, count: int, mean: float, std: float) -> NDArray[np.float32]:
    """Return `count` normally distributed numbers for draw number `draw` of a model, shape (count,)."""
    values = np.empty(count, dtype=np.float32)
    for part, numbers in _uniform_parts(seed, draw, count):
        values[part] = mean + std * normal_quantile(numbers)
    return values


def inverse_erf(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the inverse of the error function at `values`, between -1 and 1 exclusive, in their shape."""
    flat = values.ravel()
    result = np.empty(values.size, dtype=np.float32)
    for start in range(0, flat.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        result[part] = normal_quantile((flat[part].astype(np.float64) + 1) * 0.5) * np.sqrt(0.5)
    return result.reshape(values.shape)


def _uniform_parts(seed: int, draw: int, count: int) -> Iterator[tuple[slice, Float64s]]:
    """Yield `count` numbers between 0 and 1 exclusive, in parts, each with its slice."""
    generator = philox_generator(seed, Purpose.WEIGHTS, low=draw, high=0)
    for start in range(0, count, _CHUNK):
        yield slice(start, start + _CHUNK), uniforms(generator, min(_CHUNK, count - start))


# Numerator and denominator of the three rational approximations of algorithm AS 241, PPND16 (Wichura, "The percentage
# points of the normal distribution", Applied Statistics 37, 1988), highest power last; accurate to 1e-16.
_CENTRAL = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
_TAIL = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
_FAR_TAIL = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip
_LOG_2 = 0.6931471805599453
# log 2 in two parts, of which the first has 11 zeros at its end: an integer below 1,024 times it is exact.
_LOG_2_HIGH = 0.6931471805598903
_LOG_2_LOW = 5.497923018708371e-14
_LARGEST_EXPONENT = 700.0  # of e, both ways, before float64 overflows or loses digits


def normal_quantile(probabilities: Float64s) -> Float64s:
    """Return the number below which a standard normal one lies with a probability, for each of `probabilities`, between
    0 and 1 exclusive, (n,)."""
    centred = probabilities - 0.5
    values = centred * _ratio(_CENTRAL, 0.180625 - centred * centred)
    outer = np.flatnonzero(np.abs(centred) > 0.425)
    depth = np.sqrt(-logarithm(np.minimum(probabilities[outer], 1 - probabilities[outer])))
    far = _ratio(_FAR_TAIL, depth - 5)
    values[outer] = np.copysign(np.where(depth <= 5, _ratio(_TAIL, depth - 1.6), far), centred[outer])
    return values


def logarithm(values: Float64s) -> Float64s:
    """Return the natural logarithm of positive, finite `values`, in their shape, to about 1e-16 of it.

    With x = m * 2**e and m from 1/sqrt(2) to sqrt(2), log m = 2 artanh(s) with s = (m - 1) / (m + 1) < 0.172, as a
    series in s**2.
    """
    mantissas, exponents = np.frexp(values)
    small = mantissas < np.sqrt(0.5)
    mantissas = np.where(small, 2 * mantissas, mantissas)
    exponents = exponents - small
    s = (mantissas - 1) / (mantissas + 1)
    return exponents * _LOG_2 + 2 * s * _polynomial([1 / (2 * power + 1) for power in range(12)], s * s)


def exponential(values: Float64s) -> Float64s:
    """Return e to the power of `values`, between -700 and 700, in their shape, to about 1e-15 of it.

    With x = p * log 2 + r and r from -0.35 to 0.35, e**x = 2**p * e**r, the latter as its Taylor series.
    """
    powers = np.rint(values / _LOG_2)
    rest = values - powers * _LOG_2_HIGH - powers * _LOG_2_LOW
    return np.ldexp(_polynomial(_TAYLOR, rest), powers.astype(np.int32))


_TAYLOR = [1 / math.factorial(power) for power in range(14)]


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: Float64s) -> Float64s:
    numerator, denominator = coefficients
    return _polynomial(numerator, x) / _polynomial(denominator, x)


def _polynomial(coefficients: Sequence[float], x: Float64s) -> Float64s:
    """Horner's method, whose products and sums are rounded one by one."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value *= x
        value += coefficient
    return value
