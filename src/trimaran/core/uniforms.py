"""Random numbers that depend on a sequence's seed and the position of the token alone."""

from __future__ import annotations

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014): a bijection of 64-bit integers that scatters neighbours."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def derive_seed(seed: int, index: int) -> int:
    """A seed for the `index`-th stream of `seed`: uint64."""
    return mix((mix(seed & _MASK) + (index + 1) * _GOLDEN) & _MASK)


def uniform(seed: int, position: int) -> float:
    """In [0, 1) with 53 bits: the draw of stream `seed` at `position`."""
    return (mix((seed + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53
