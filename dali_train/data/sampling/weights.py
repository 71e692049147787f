"""Random numbers for initial weights that are the same bits on every machine.

torch's generator is a sequence, but its kernels turn it into numbers differently with and without vector instructions,
and the last bits of exp, log and sin depend on the processor's instructions in torch, in NumPy and in the C library
alike. Here only +, -, *, / and square roots of single numbers are used, which IEEE 754 rounds correctly, and no sums
over many numbers, whose order varies. All arithmetic is in float64 and rounded to float32 once.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dali_train.data.sampling.rng import Purpose, philox_generator

Float64s = NDArray[np.float64]
_CHUNK = 1 << 15  # numbers that are computed at a time, so that they stay in the processor's cache


def uniform_weights(seed: int, draw: int, count: int, low: float, high: float) -> NDArray[np.float32]:
    """Return `count` numbers, uniform between `low` and `high` exclusive, for draw number `draw` of a model: (count,).

    The bounds are excluded as float32 too: timm and torch turn numbers between -1 and 1 into normal ones, and a bound
    would become infinite.
    """
    first, last = np.float32(low), np.float32(high)
    inner = np.nextafter(first, last), np.nextafter(last, first)
    values = np.empty(count, dtype=np.float32)
    for part, shares in _shares(seed, draw, count):
        values[part] = np.clip((low + shares * (high - low)).astype(np.float32), *inner)
    return values


def normal_weights(seed: int, draw: int, count: int, mean: float, std: float) -> NDArray[np.float32]:
    """Return `count` normally distributed numbers for draw number `draw` of a model, shape (count,)."""
    values = np.empty(count, dtype=np.float32)
    for part, shares in _shares(seed, draw, count):
        values[part] = mean + std * normal_quantile(shares)
    return values


def inverse_erf(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the inverse of the error function at `values`, between -1 and 1 exclusive, in their shape."""
    flat, result = values.ravel(), np.empty(values.size, dtype=np.float32)
    for start in range(0, flat.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        result[part] = normal_quantile((flat[part].astype(np.float64) + 1) * 0.5) * np.sqrt(0.5)
    return result.reshape(values.shape)


def _shares(seed: int, draw: int, count: int) -> Iterator[tuple[slice, Float64s]]:
    """Yield `count` numbers between 0 and 1 exclusive, in parts, each with its slice."""
    generator = philox_generator(seed, Purpose.WEIGHTS, low=draw, high=0)
    for start in range(0, count, _CHUNK):
        raw = generator.random_raw(min(_CHUNK, count - start)) >> np.uint64(12)
        yield slice(start, start + _CHUNK), (raw.astype(np.float64) + 0.5) * 2.0**-52


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


def normal_quantile(shares: Float64s) -> Float64s:
    """Return the number below which a share of the standard normal distribution lies, for each of `shares`, between 0
    and 1 exclusive, (n,)."""
    centred = shares - 0.5
    values = centred * _ratio(_CENTRAL, 0.180625 - centred * centred)
    outer = np.flatnonzero(np.abs(centred) > 0.425)
    depth = np.sqrt(-logarithm(np.minimum(shares[outer], 1 - shares[outer])))
    far = _ratio(_FAR_TAIL, depth - 5)
    values[outer] = np.copysign(np.where(depth <= 5, _ratio(_TAIL, depth - 1.6), far), centred[outer])
    return values


def logarithm(values: Float64s) -> Float64s:
    """Return the natural logarithm of positive, finite `values`, (n,), to about 1e-16 of it.

    With x = m * 2**e and m from 1/sqrt(2) to sqrt(2), log m = 2 artanh(s) with s = (m - 1) / (m + 1) < 0.172, as a
    series in s**2.
    """
    mantissas, exponents = np.frexp(values)
    small = mantissas < np.sqrt(0.5)
    mantissas, exponents = np.where(small, 2 * mantissas, mantissas), exponents - small
    s = (mantissas - 1) / (mantissas + 1)
    return exponents * _LOG_2 + 2 * s * _polynomial([1 / (2 * power + 1) for power in range(12)], s * s)


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
