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
# These have fused multiply-add, and products in integers.
FUSED = [isa for isa in ISAS if isa in ("avx2", "avx512")]


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


def pack(
    type_name: str,
    rows: np.ndarray,
    inputs: int,
    target: str = "as-is",
    isa: str = "avx2",
    order: np.ndarray | None = None,
) -> _native.PackedLinear:
    return _native.pack(type_name, rows, inputs, order, target, isa)


def is_streamed(isa: str, target: str = "as-is") -> bool:
    """Whether codes become bf16 on their way to tiles (csrc/linear_stream.h)."""
    return isa == "amx" and target != "bf16"


def activations_as_multiplied(isa: str, target: str, x: Array) -> np.ndarray:
    """What a product takes for `x`."""
    if isa == "amx" or target == "bf16":
        return bf16(x).astype(np.float64)
    return rounded_activations(x)


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
    packed = pack(type_name, rows, 2 * block_elements(type_name))
    np.testing.assert_array_equal(packed_values(packed), dequantized(type_name, rows))


@pytest.mark.skipif("amx" not in ISAS, reason="only CPUs with AMX have this layout")
@pytest.mark.parametrize("type_name", BLOCK_TYPES)
@settings(max_examples=20, deadline=None)
@given(
    outputs=st.integers(1, 40),
    blocks=st.integers(1, 3),
    scale=st.sampled_from([1e-6, 0.01, 50.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_streamed_values_are_near_those_of_the_file(
    type_name: str, outputs: int, blocks: int, scale: float, seed: int
) -> None:
    inputs = blocks * block_elements(type_name)
    raw = random_rows(type_name, outputs, inputs, seed, scale)
    values = packed_values(pack(type_name, raw, inputs, isa="amx"))
    exact = dequantized(type_name, raw)
    # Half a unit of bf16, slope and offset in 11 bits each, and what is lost of small
    # magnitudes beside an output's largest.
    group = 16 if type_name == "Q6_K" else 32
    largest_of_group = np.abs(exact.reshape(outputs, -1, group)).max(axis=2).repeat(group, axis=1)
    largest_of_output = np.abs(exact).max(axis=1, keepdims=True)
    bound = np.abs(exact) * 2**-8 + largest_of_group * 2**-9 + largest_of_output * 2**-14
    assert np.all(np.abs(values - exact) <= bound)
    np.testing.assert_array_equal(values[~exact.any(axis=1)], 0.0)


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
def test_product_of_codes(
    isa: str, type_name: str, rows: int, outputs: int, blocks: int, scale: float, seed: int
) -> None:
    inputs = blocks * block_elements(type_name)
    raw = random_rows(type_name, outputs, inputs, seed, scale)
    packed = pack(type_name, raw, inputs, isa=isa)
    weights = packed_values(packed).astype(np.float64)
    x = activations(rows, inputs, seed)
    rounded = activations_as_multiplied(isa, "as-is", x)
    assert close(linear(isa, packed, x), rounded @ weights.T, rounded, weights)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
@pytest.mark.parametrize("inputs", [256, 1792])
def test_integer_products_are_equal_bit_by_bit(type_name: str, inputs: int) -> None:
    """Whatever the instruction set, the number of rows and their company."""
    raw = random_rows(type_name, 40, inputs, seed=11)
    packed = pack(type_name, raw, inputs)
    x = activations(70, inputs, seed=5)
    expected = linear("avx2", packed, x)
    for isa in FUSED:
        np.testing.assert_array_equal(linear(isa, packed, x), expected)
        for begin, end in ((0, 1), (1, 3), (3, 8), (8, 17), (8, 20), (20, 53), (5, 70), (0, 29)):
            np.testing.assert_array_equal(linear(isa, packed, x[begin:end]), expected[begin:end])


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1"])
def test_extreme_codes_and_activations_stay_exact(type_name: str) -> None:
    """Sums at the ends of their range, of each plane and each code of a pair of outputs."""
    inputs, outputs = 64, 34
    raw = random_rows(type_name, outputs, inputs, seed=1)
    codes = raw.reshape(outputs, inputs // 32, -1)[:, :, -16:]
    codes[:] = np.array([0x00, 0xFF, 0x0F, 0xF0, 0x88, 0x77])[np.arange(outputs) % 6, None, None]
    codes[32:] = codes[1::-1]
    codes[18:24] = codes[17:11:-1]  # other pairs of codes sixteen outputs apart
    packed = pack(type_name, raw, inputs)
    # The high plane and the low one of each: 2032 = 127 * 16 + 0, 2024 = 127 * 16 - 8, ...
    numbers = [2032, 2024, 2023, 2008, 1, 7, 8, -7, -8, -9, -2024, -2025, -2032, 15, -16, 23]
    x = np.repeat(np.array(numbers, np.float32)[:, None], inputs, axis=1)
    x[:, 0] = 2032  # so that the others are as they are
    x[8:, 33::2] *= -1
    expected = linear("portable", packed, x).astype(np.float64)
    exact = x.astype(np.float64) @ packed_values(packed).astype(np.float64).T
    assert close(expected.astype(np.float32), exact, x, packed_values(packed))
    for isa in FUSED:
        y = linear(isa, packed, x)
        assert close(y, exact, x, packed_values(packed))
        np.testing.assert_array_equal(y, linear("avx2", packed, x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K", "bf16", "int8", "int4"])
@pytest.mark.parametrize("inputs", [256, 1792])  # within one slab of tiles, and beyond
def test_rows_do_not_depend_on_their_company(isa: str, kind: str, inputs: int) -> None:
    values = np.random.default_rng(2).normal(size=(35, inputs)).astype(np.float32)
    packed = (
        pack(kind, random_rows(kind, 35, inputs), inputs, isa=isa)
        if kind.startswith("Q")
        else pack("F32", float_rows(values, "F32"), inputs, kind, isa)
    )
    x = activations(300, inputs, seed=1)
    together = linear(isa, packed, x)
    for begin, end in ((0, 1), (1, 2), (2, 5), (5, 22), (22, 59), (20, 83), (40, 300)):
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
    packed = pack(type_name, raw, inputs, isa=isa)
    weights = bf16(np.asarray(values, np.float32))
    np.testing.assert_array_equal(packed_values(packed), weights)
    x = activations(rows, inputs, seed)
    rounded = bf16(x).astype(np.float64)
    exact = rounded @ weights.astype(np.float64).T
    assert close(linear(isa, packed, x), exact, rounded, weights)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("target", ["int8", "int4"])
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 50),
    inputs=st.integers(1, 130),
    scale=st.sampled_from([1e-9, 1.0, 1e7]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rounding_here(
    isa: str, target: str, rows: int, outputs: int, inputs: int, scale: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(outputs, inputs)) * scale).astype(np.float32)
    packed = pack("F32", float_rows(values, "F32"), inputs, target, isa)
    weights = packed_values(packed)
    levels = 2 ** int(target[3:]) - 1
    for begin in range(0, inputs, 32):
        group = slice(begin, begin + 32)
        low, high = values[:, group].min(axis=1), values[:, group].max(axis=1)
        # Half a level, and the rounding of scale and minimum to halves, or of all to bf16.
        bound = (high - low) / levels * 0.5 + np.abs(values).max() * 2**-7
        assert np.all(np.abs(weights[:, group] - values[:, group]) <= bound[:, None])
    x = activations(rows, inputs, seed)
    rounded = activations_as_multiplied(isa, target, x)
    exact = rounded @ weights.astype(np.float64).T
    # Terms with minima cancel: they are summed apart.
    size = np.abs(rounded) @ (np.abs(values).max() * np.ones_like(weights)).T
    assert np.all(np.abs(linear(isa, packed, x) - exact) <= 1e-5 * size)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("target", ["as-is", "bf16"])
def test_bias_and_residual(isa: str, target: str) -> None:
    rng = np.random.default_rng(0)
    packed = pack("Q4_0", random_rows("Q4_0", 37, 64), 64, target, isa)
    x = activations(19, 64, seed=4)
    bias = rng.normal(size=37).astype(np.float32)
    residual = rng.normal(size=(19, 37)).astype(np.float32)
    plain = linear(isa, packed, x)
    np.testing.assert_array_equal(linear(isa, packed, x, bias), plain + bias)
    np.testing.assert_array_equal(linear(isa, packed, x, bias, residual), residual + (plain + bias))
    np.testing.assert_array_equal(linear(isa, packed, x, None, residual), residual + plain)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("target", ["as-is", "bf16", "int8"])
def test_rows_are_reordered(target: str, isa: str) -> None:
    raw = random_rows("Q4_1", 24, 64)
    order = np.random.default_rng(0).permutation(24)
    reordered = packed_values(pack("Q4_1", raw, 64, target, isa, order))
    directly = packed_values(pack("Q4_1", raw[order], 64, target, isa))
    np.testing.assert_array_equal(reordered, directly)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_number_hurts_only_itself(isa: str, bad: float) -> None:
    packed = pack("Q4_1", random_rows("Q4_1", 20, 64), 64, isa=isa)
    x = activations(18, 64, seed=4)
    good = linear(isa, packed, x)
    x[7, 40] = bad
    y = linear(isa, packed, x)
    assert not np.any(np.isfinite(y[7]))
    np.testing.assert_array_equal(np.delete(y, 7, axis=0), np.delete(good, 7, axis=0))


@pytest.mark.parametrize("isa", ISAS)
def test_tiny_rows_count_as_zero(isa: str) -> None:
    packed = pack("Q8_0", random_rows("Q8_0", 20, 64), 64, isa=isa)
    x = np.full((3, 64), 1e-31, np.float32)
    x[2] = np.float32(1e-45)
    np.testing.assert_allclose(linear(isa, packed, x), np.zeros((3, 20)), atol=1e-27)


def test_unsound_sources_are_refused() -> None:
    rows = random_rows("Q4_0", 4, 64)
    with pytest.raises(ValueError, match="no packing of type IQ1_S"):
        pack("IQ1_S", rows, 64)
    with pytest.raises(ValueError, match="96 elements of Q4_0"):
        pack("Q4_0", rows, 96)
    with pytest.raises(ValueError, match="no such row"):
        pack("Q4_0", rows, 64, order=np.array([0, 1, 2, 4]))
    with pytest.raises(ValueError, match="give as-is, bf16, int8 or int4"):
        pack("Q4_0", rows, 64, "int3")


@pytest.mark.skipif("amx" not in ISAS, reason="only CPUs with AMX have this layout")
def test_weights_of_another_layout_are_refused() -> None:
    rows = random_rows("Q4_0", 4, 64)
    with pytest.raises(ValueError, match="packed for another instruction set than avx2"):
        linear("avx2", pack("Q4_0", rows, 64, isa="amx"), np.zeros((1, 64), np.float32))
