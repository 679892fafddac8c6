"""Linear layers of every weight format on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quantized import (
    BLOCK_TYPES,
    Array,
    block_elements,
    dequantized,
    random_rows,
    rounded_activations,
)

from trimaran.compute.native import _native

ISAS = _native.available_isas()
FUSED = [isa for isa in ISAS if isa != "portable"]  # these have fused multiply-add


def linear(
    isa: str,
    packed: _native.PackedLinear,
    x: Array,
    bias: Array | None = None,
    residual: Array | None = None,
) -> Array:
    out = np.full((len(x), packed.outputs), 7, np.float32)
    _native.linear(isa, packed, x, bias, residual, out)
    return out


def packed_values(packed: _native.PackedLinear) -> Array:
    values = np.empty((packed.outputs, packed.inputs), np.float32)
    packed.values(values)
    return values


def float_rows(values: Array, type_name: str) -> np.ndarray:
    if type_name == "F32":
        return values.view(np.uint8)
    if type_name == "F16":
        return values.astype(np.float16).view(np.uint8)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def bf16(values: Array) -> Array:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def activations(rows: int, inputs: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, inputs)).astype(np.float32)
    x *= 10.0 ** rng.integers(-3, 4, (rows, 1))
    x[rng.random(x.shape) < 0.1] = 0
    if rows > 2:
        x[1] = 0
        x[2, 0] *= 1000  # an outlier
    return np.ascontiguousarray(x, np.float32)


def close(y: Array, exact: np.ndarray, x: np.ndarray, w: np.ndarray) -> bool:
    """Within a few roundings of float32 of the terms that were summed."""
    size = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    return bool(np.all(np.abs(y - exact) <= 1e-5 * size + 1e-30))


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_packed_values_are_those_of_the_file(type_name: str) -> None:
    rows = random_rows(type_name, 21, 2 * block_elements(type_name), seed=3)
    packed = _native.pack(type_name, rows, 2 * block_elements(type_name), None, "as-is")
    np.testing.assert_array_equal(packed_values(packed), dequantized(type_name, rows))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", BLOCK_TYPES)
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 50),
    blocks=st.integers(1, 3),
    scale=st.sampled_from([1e-6, 0.01, 50.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_integer_product(
    isa: str, type_name: str, rows: int, outputs: int, blocks: int, scale: float, seed: int
) -> None:
    inputs = blocks * block_elements(type_name)
    raw = random_rows(type_name, outputs, inputs, seed, scale)
    packed = _native.pack(type_name, raw, inputs, None, "as-is")
    weights = dequantized(type_name, raw).astype(np.float64)
    x = activations(rows, inputs, seed)
    rounded = rounded_activations(x)
    assert close(linear(isa, packed, x), rounded @ weights.T, rounded, weights)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
@pytest.mark.parametrize("inputs", [256, 1792])  # within one slab of tiles, and beyond
def test_integer_products_are_equal_bit_by_bit(type_name: str, inputs: int) -> None:
    """Whatever the instruction set, the number of rows and their company."""
    raw = random_rows(type_name, 40, inputs, seed=11)
    packed = _native.pack(type_name, raw, inputs, None, "as-is")
    x = activations(70, inputs, seed=5)
    expected = linear("avx2", packed, x)
    for isa in FUSED:
        np.testing.assert_array_equal(linear(isa, packed, x), expected)
        for begin, end in ((0, 1), (1, 3), (3, 8), (8, 17), (8, 20), (20, 53), (5, 70)):
            np.testing.assert_array_equal(linear(isa, packed, x[begin:end]), expected[begin:end])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "bf16", "int8"])
def test_rows_do_not_depend_on_their_company(isa: str, kind: str) -> None:
    values = np.random.default_rng(2).normal(size=(35, 96)).astype(np.float32)
    packed = (
        _native.pack("F32", float_rows(values, "F32"), 96, None, kind)
        if kind in ("bf16", "int8")
        else _native.pack(kind, random_rows(kind, 35, 96), 96, None, "as-is")
    )
    x = activations(300, 96, seed=1)
    together = linear(isa, packed, x)
    for begin, end in ((0, 1), (1, 2), (2, 5), (5, 22), (22, 39), (40, 300)):
        np.testing.assert_array_equal(linear(isa, packed, x[begin:end]), together[begin:end])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 50),
    inputs=st.integers(1, 130),
    seed=st.integers(0, 2**32 - 1),
)
def test_bf16_product(
    isa: str, type_name: str, rows: int, outputs: int, inputs: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(outputs, inputs)).astype(np.float32)
    values = {"F32": values, "F16": values.astype(np.float16), "BF16": bf16(values)}[type_name]
    raw = float_rows(np.asarray(values, np.float32), type_name)
    packed = _native.pack(type_name, raw, inputs, None, "as-is")
    weights = bf16(np.asarray(values, np.float32))
    np.testing.assert_array_equal(packed_values(packed), weights)
    x = activations(rows, inputs, seed)
    rounded = bf16(x).astype(np.float64)
    exact = rounded @ weights.astype(np.float64).T
    assert close(linear(isa, packed, x), exact, rounded, weights)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 50),
    inputs=st.integers(1, 130),
    scale=st.sampled_from([1e-9, 1.0, 1e7]),
    seed=st.integers(0, 2**32 - 1),
)
def test_int8(isa: str, rows: int, outputs: int, inputs: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(outputs, inputs)) * scale).astype(np.float32)
    packed = _native.pack("F32", float_rows(values, "F32"), inputs, None, "int8")
    weights = packed_values(packed)
    for begin in range(0, inputs, 32):
        group = slice(begin, begin + 32)
        low, high = values[:, group].min(axis=1), values[:, group].max(axis=1)
        # Half a level, and the rounding of scale and minimum to halves.
        level = (high - low) / 255
        bound = level * (0.5 + 255 * 2**-11) + np.abs(low) * 2**-11 + np.abs(values).max() * 2**-10
        assert np.all(np.abs(weights[:, group] - values[:, group]) <= bound[:, None])
    x = activations(rows, inputs, seed)
    rounded = rounded_activations(x)
    exact = rounded @ weights.astype(np.float64).T
    # Terms with minima cancel: they are summed apart.
    size = np.abs(rounded) @ (np.abs(values).max() * np.ones_like(weights)).T
    assert np.all(np.abs(linear(isa, packed, x) - exact) <= 1e-5 * size)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("target", ["as-is", "bf16"])
def test_bias_and_residual(isa: str, target: str) -> None:
    rng = np.random.default_rng(0)
    packed = _native.pack("Q4_0", random_rows("Q4_0", 37, 64), 64, None, target)
    x = activations(19, 64, seed=4)
    bias = rng.normal(size=37).astype(np.float32)
    residual = rng.normal(size=(19, 37)).astype(np.float32)
    plain = linear(isa, packed, x)
    np.testing.assert_array_equal(linear(isa, packed, x, bias), plain + bias)
    np.testing.assert_array_equal(linear(isa, packed, x, bias, residual), residual + (plain + bias))
    np.testing.assert_array_equal(linear(isa, packed, x, None, residual), residual + plain)


@pytest.mark.parametrize("target", ["as-is", "bf16", "int8"])
def test_rows_are_reordered(target: str) -> None:
    raw = random_rows("Q4_1", 24, 64)
    order = np.random.default_rng(0).permutation(24)
    reordered = packed_values(_native.pack("Q4_1", raw, 64, order, target))
    directly = packed_values(_native.pack("Q4_1", raw[order], 64, None, target))
    np.testing.assert_array_equal(reordered, directly)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_number_hurts_only_itself(isa: str, bad: float) -> None:
    packed = _native.pack("Q4_1", random_rows("Q4_1", 20, 64), 64, None, "as-is")
    x = activations(18, 64, seed=4)
    good = linear(isa, packed, x)
    x[7, 40] = bad
    y = linear(isa, packed, x)
    assert np.all(np.isnan(y[7]))
    np.testing.assert_array_equal(np.delete(y, 7, axis=0), np.delete(good, 7, axis=0))


@pytest.mark.parametrize("isa", ISAS)
def test_tiny_rows_count_as_zero(isa: str) -> None:
    packed = _native.pack("Q8_0", random_rows("Q8_0", 20, 64), 64, None, "as-is")
    x = np.full((3, 64), 1e-31, np.float32)
    x[2] = np.float32(1e-45)
    np.testing.assert_array_equal(linear(isa, packed, x), np.zeros((3, 20), np.float32))


def test_unsound_sources_are_refused() -> None:
    rows = random_rows("Q4_0", 4, 64)
    with pytest.raises(ValueError, match="no packing of type IQ1_S"):
        _native.pack("IQ1_S", rows, 64, None, "as-is")
    with pytest.raises(ValueError, match="96 elements of Q4_0"):
        _native.pack("Q4_0", rows, 96, None, "as-is")
    with pytest.raises(ValueError, match="no such row"):
        _native.pack("Q4_0", rows, 64, np.array([0, 1, 2, 4]), "as-is")
    with pytest.raises(ValueError, match="give as-is, bf16 or int8"):
        _native.pack("Q4_0", rows, 64, None, "int4")
