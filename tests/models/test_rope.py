"""Rotary frequencies against the definitions of the papers and of Llama 3.1."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimaran.models.rope import Llama3Scaling, RopeSpec


@given(half=st.integers(1, 64), theta=st.floats(10, 1e7), factor=st.floats(1, 64))
def test_plain_and_linear(half: int, theta: float, factor: float) -> None:
    freqs = RopeSpec(dim=2 * half, theta=theta, linear_factor=factor).frequencies()
    expected = [theta ** (-2 * i / (2 * half)) / factor for i in range(half)]
    np.testing.assert_allclose(freqs, expected, rtol=1e-12)


def llama3(freq: float, scaling: Llama3Scaling) -> float:
    """One frequency by the three cases of Meta's description."""
    wavelength = 2 * math.pi / freq
    if wavelength < scaling.original_context / scaling.high_freq_factor:
        return freq
    if wavelength > scaling.original_context / scaling.low_freq_factor:
        return freq / scaling.factor
    share = scaling.original_context / wavelength - scaling.low_freq_factor
    share /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - share) * freq / scaling.factor + share * freq


@given(
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1, 64),
    low=st.floats(0.5, 2),
    span=st.floats(0.5, 8),
    context=st.integers(128, 1 << 17),
)
def test_llama3(theta: float, factor: float, low: float, span: float, context: int) -> None:
    scaling = Llama3Scaling(factor, low, low + span, context)
    freqs = RopeSpec(dim=128, theta=theta, llama3=scaling).frequencies()
    plain = RopeSpec(dim=128, theta=theta).frequencies()
    np.testing.assert_allclose(freqs, [llama3(freq, scaling) for freq in plain], rtol=1e-9)


def test_divisors_express_llama3() -> None:
    """GGUF stores the scaling as a divisor a frequency; both ways are the same rotation."""
    scaled = RopeSpec(dim=64, theta=5e5, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    plain = RopeSpec(dim=64, theta=5e5)
    divisors = tuple(plain.frequencies() / scaled.frequencies())
    stored = RopeSpec(dim=64, theta=5e5, divisors=divisors)
    np.testing.assert_allclose(stored.frequencies(), scaled.frequencies(), rtol=1e-12)


def test_tables() -> None:
    spec = RopeSpec(dim=8, theta=100.0)
    cos, sin = spec.tables(50)
    assert cos.shape == sin.shape == (50, 4)
    assert cos.dtype == sin.dtype == np.float32
    for position in (0, 1, 49):
        angles = position * spec.frequencies()
        np.testing.assert_array_equal(cos[position], np.cos(angles).astype(np.float32))
        np.testing.assert_array_equal(sin[position], np.sin(angles).astype(np.float32))
