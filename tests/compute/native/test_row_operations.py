"""Operations on single rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.compute.native import _native

ISAS = _native.available_isas()
Array = np.ndarray

LEAST = 2.0**-126  # below it exponentials are 0
rows = st.tuples(
    st.integers(1, 100),
    st.sampled_from([0.0, 1e-42, 1.2e-38, 1e-30, 1e-3, 1.0, 40.0, 1e15, 1e30]),
    st.integers(0, 2**32 - 1),
)


def normal(row: tuple[int, float, int], salt: int = 0) -> Array:
    width, scale, seed = row
    rng = np.random.default_rng([seed, salt])
    x = rng.normal(size=width) * scale
    x[rng.random(width) < 0.1] = -0.0
    return x.astype(np.float32)


def equal_where_fused(results: dict[str, Array]) -> bool:
    first, *others = [y for isa, y in results.items() if isa != "portable"] or [None]
    return all(np.array_equal(first, y) for y in others)


@settings(max_examples=40, deadline=None)
@given(rows)
def test_rms_norm(row: tuple[int, float, int]) -> None:
    x, weight = normal(row), normal((row[0], 1.0, row[2]), 1)
    wide = x.astype(np.float64)
    mean = np.mean(wide**2)
    with np.errstate(over="ignore"):  # as float32 has it: beyond 1e19 a norm is infinite
        inverse = 1 / np.sqrt(mean + 1e-5) if np.isfinite(np.float32(mean * len(x))) else 0.0
    expected = wide * inverse * weight
    results = {}
    for isa in ISAS:
        out = np.empty_like(x)
        _native.rms_norm(isa, x, weight, 1e-5, out)
        np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-42)
        results[isa] = out
    assert equal_where_fused(results)


@settings(max_examples=40, deadline=None)
@given(rows)
def test_silu_mul(row: tuple[int, float, int]) -> None:
    gate, up = normal(row), normal(row, 1)
    gate[0] = -200.0  # the exponential would overflow
    wide, far = gate.astype(np.float64), np.abs(gate.astype(np.float64) * up)
    with np.errstate(over="ignore"):
        expected = (wide / (1 + np.exp(-wide)) * up).astype(np.float32)
    results = {}
    for isa in ISAS:
        out = np.empty_like(gate)
        _native.silu_mul(isa, gate, up, out)
        near = np.isfinite(expected)
        np.testing.assert_array_equal(out[~near], expected[~near])
        error = np.abs(out[near].astype(np.float64) - expected[near])
        assert np.all(error <= 8e-5 * np.abs(expected[near]) + LEAST * far[near] + 1e-42)
        results[isa] = out
    assert equal_where_fused(results)


@settings(max_examples=40, deadline=None)
@given(rows)
def test_gelu_mul(row: tuple[int, float, int]) -> None:
    gate, up = normal(row), normal(row, 1)
    gate[0] = -200.0  # the cube is large
    wide = gate.astype(np.float64)
    inner = np.clip(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3), -300, None)
    # 1 + tanh(z) without the cancellation where z is far below 0
    expected = wide / (1 + np.exp(-2 * inner)) * up
    results = {}
    with np.errstate(over="ignore"):
        for isa in ISAS:
            out = np.empty_like(gate)
            _native.gelu_mul(isa, gate, up, out)
            # An exponent of z is rounded relative to z: 2^-23 z of the result.
            tolerance = np.abs(expected) * (2e-6 * 40 + 1e-6 * np.abs(inner)) + 1e-30
            near = np.isfinite(expected.astype(np.float32))  # beyond that it is infinite
            np.testing.assert_array_equal(out[~near], expected[~near].astype(np.float32))
            assert (np.abs(out[near] - expected[near]) <= tolerance[near]).all()
            results[isa] = out
    assert equal_where_fused(results)


@settings(max_examples=40, deadline=None)
@given(rows)
def test_add(row: tuple[int, float, int]) -> None:
    a, b = normal(row), normal(row, 1)
    for isa in ISAS:
        out = np.empty_like(a)
        _native.add(isa, a, b, out)
        np.testing.assert_array_equal(out.view(np.uint32), (a + b).view(np.uint32))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 8),
    st.integers(1, 3),
    st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e30]),
    st.integers(0, 2**32 - 1),
)
def test_rope(half: int, rest: int, heads: int, scale: float, seed: int) -> None:
    """The first 2 * half elements of each head turn, the others stay."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(heads, 2 * half + rest)) * scale).astype(np.float32)
    angles = rng.normal(size=half) * 100
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[:, :half], x[:, half : 2 * half]
    expected = x.copy()
    expected[:, :half] = first * cosines - second * sines
    expected[:, half : 2 * half] = second * cosines + first * sines
    for isa in ISAS:
        turned = x.copy()
        _native.rope(isa, turned, cosines, sines)
        np.testing.assert_array_equal(turned, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_not_a_number_stays_in_its_element(isa: str) -> None:
    gate = np.linspace(-3, 3, 37, dtype=np.float32)
    gate[5] = np.nan
    out = np.empty_like(gate)
    _native.silu_mul(isa, gate, np.ones_like(gate), out)
    assert np.flatnonzero(np.isnan(out)).tolist() == [5]


def test_instruction_sets() -> None:
    assert ISAS[0] == "portable"
    for isa in ISAS:
        _native.check_isa(isa)
    with pytest.raises(ValueError, match="give amx, avx512, avx2 or portable"):
        _native.check_isa("mmx")
