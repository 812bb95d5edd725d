"""Random numbers of a seed for backends without torch: the same as torch's generator on the CPU gives.

A seed is therefore the same model, with the same noise, on every backend, and for PyTorch nothing changes.
torch seeds the classic mt19937 with the low 32 bits; what is made of its words is written here in NumPy, and
agrees up to rounding in float32. The order of calls matters, as it does there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from trm.arrays import BoolArray, Float32Array, FloatArray, WordArray

# Standard deviation of a standard normal truncated to [-2, 2]; dividing by it restores the requested one.
TRUNCATED_STD: Final = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))
DECODER_STD = 0.02  # as in GPT-2; what adds to the residual stream starts smaller by sqrt(2 layers)
AT_A_TIME = 2**20  # words, so that drawing a large matrix takes little memory beside it
_BLOCK = 16  # normal numbers that are made together, the first half with the second


class Draws:
    """The numbers that `torch.Generator().manual_seed(seed)` gives through the same sequence of calls."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.MT19937()
        np.random.RandomState(self._bits).seed(seed & 0xFFFFFFFF)
        self._second: float | None = None  # of a pair of normal numbers, for the next short array

    def truncated_normal(self, *shape: int, std: float) -> Float32Array:
        """Draw from a normal truncated at two of its standard deviations, scaled to have `std` afterwards."""
        bound = math.erf(math.sqrt(2))

        def part(size: int) -> FloatArray:
            uniform = self._uniform(size) * np.float32(2 * bound) - np.float32(bound)
            return np.clip(_normal_quantile(uniform.astype(np.float64) / 2), -2, 2) * (std / TRUNCATED_STD)

        return _filled(shape, part)

    def normal(self, *shape: int) -> Float32Array:
        """Draw what `torch.randn` draws in float32."""
        size = math.prod(shape)
        if size < _BLOCK:
            return np.array([self._one_normal() for _ in range(size)], dtype=np.float32).reshape(shape)
        flat = _filled((size,), lambda count: _box_muller(self._uniform(count)))
        if size % _BLOCK:  # then the last numbers do not fill a block, and a whole one is drawn again
            flat[-_BLOCK:] = _box_muller(self._uniform(_BLOCK))
        return flat.reshape(shape)

    def bernoulli(self, *shape: int, share: float) -> BoolArray:
        """Draw ones with this probability, where `torch.rand` in float64 draws a smaller number."""
        return (self._doubles(math.prod(shape)) < share).reshape(shape)

    def _uniform(self, size: int) -> Float32Array:
        """Return numbers from [0, 1) with 24 random bits."""
        words = self._bits.random_raw(size) & np.uint64(2**24 - 1)
        return words.astype(np.float32) * np.float32(2.0**-24)

    def _doubles(self, size: int) -> FloatArray:
        """Return numbers from [0, 1) with 53 random bits, of two words each."""
        pairs: WordArray = self._bits.random_raw(2 * size).reshape(size, 2)
        words = (pairs[:, 0] << np.uint64(32) | pairs[:, 1]) & np.uint64(2**53 - 1)
        doubles: FloatArray = words.astype(np.float64) * 2.0**-53
        return doubles

    def _one_normal(self) -> float:
        if self._second is not None:
            second, self._second = self._second, None
            return second
        turn, length = self._doubles(2).tolist()
        radius = math.sqrt(-2 * math.log1p(-length))
        self._second = radius * math.sin(2 * math.pi * turn)
        return radius * math.cos(2 * math.pi * turn)


def _filled(shape: tuple[int, ...], part: Callable[[int], FloatArray | Float32Array]) -> Float32Array:
    """Return an array that is computed some numbers at a time, in their order."""
    flat = np.empty(math.prod(shape), dtype=np.float32)
    for start in range(0, len(flat), AT_A_TIME):
        here = flat[start : start + AT_A_TIME]
        here[:] = part(len(here))
    return flat.reshape(shape)


def _box_muller(uniform: Float32Array) -> Float32Array:
    """Turn each complete block of uniform numbers into normal ones, in the precision that torch uses."""
    normal = uniform.copy()
    complete = len(uniform) - len(uniform) % _BLOCK
    blocks = uniform[:complete].reshape(-1, 2, _BLOCK // 2)
    radius = np.sqrt(-2 * np.log(1 - blocks[:, 0]))
    angle = np.float32(2 * math.pi) * blocks[:, 1]
    normal[:complete] = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1).reshape(-1)
    return normal


# Wichura, 1988, algorithm AS 241 (PPND16): 16 digits. Coefficients of ascending powers.
_CENTRE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
_TAIL = (
    (1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
     1.27045825245236838258, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.7454501427834140764e-4),
    (1.0, 2.05319162663775882187, 1.67638483018380384940, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.475938084995344946e-4, 1.0507500716444168432e-9),
)  # fmt: skip


def _normal_quantile(centred: FloatArray) -> FloatArray:
    """Return where a standard normal has probability 1/2 + `centred` to its left."""
    in_centre = np.abs(centred) <= 0.425
    quantile = np.empty_like(centred)
    near = centred[in_centre]
    quantile[in_centre] = near * _ratio(_CENTRE, 0.180625 - near * near)
    far = centred[~in_centre]
    distance = np.sqrt(-np.log(0.5 - np.abs(far)))
    quantile[~in_centre] = np.copysign(_ratio(_TAIL, distance - 1.6), far)
    return quantile


def _ratio(polynomials: tuple[tuple[float, ...], tuple[float, ...]], x: FloatArray) -> FloatArray:
    over, under = (np.polynomial.polynomial.polyval(x, each) for each in polynomials)
    ratio: FloatArray = over / under
    return ratio
