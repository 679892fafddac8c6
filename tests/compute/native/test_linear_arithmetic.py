"""Products of every weight format on ragged shapes and at the ends of float32, on every tier:
to the bit what linear.h states, or, on tiles, near it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import bf16, stated_product
from support.quantized import BLOCK_TYPES, Array, block_elements, random_rows

from trimaran.compute.native import _native

ISAS = _native.available_isas()
LAYOUTS = ("portable", "amx")  # for integers and for tiles: any machine can pack either
ROUNDED = ("bf16", "int8", "int4")
ACTIVATIONS = ("auto", "int8")
TINY, LEAST, SUBNORMAL = 1e-30, 1.2e-38, 1e-42
# Row by row: the largest magnitude.
SIZES = [0.0, 1e-45, SUBNORMAL, LEAST, 9.9e-31, TINY, 1e-12, 1.0, 1e4, 1e30]
# Halves hold the scales of most block types: the least of them, and the largest.
BLOCK_SCALES = [6e-8, 1e-6, 1e-2, 1.2e4]
FLOAT_SCALES = [0.0, SUBNORMAL, LEAST, TINY, 1e-3, 1.0, 2e4, 1e30]


def activations(rows: int, inputs: int, seed: int, most: float) -> Array:
    """Rows of every size up to `most`, with zeros of either sign, and whole rows of them."""
    rng = np.random.default_rng(seed)
    sizes = np.asarray([size for size in SIZES if size <= most])
    x = rng.uniform(-1, 1, (rows, inputs)) * rng.choice(sizes, (rows, 1))
    x[rng.random(x.shape) < 0.1] = 0.0
    x[rng.random(x.shape) < 0.05] *= SUBNORMAL  # far below what a step of 12 bits can tell
    x[rng.random(x.shape) < 0.05] = -0.0
    return x.astype(np.float32)


def float_weights(outputs: int, inputs: int, scale: float, seed: int) -> Array:
    """About `scale`, with zeros, outputs of nothing else, and groups of one value."""
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(outputs, inputs)) * scale).astype(np.float32)
    values[rng.random(values.shape) < 0.05] = 0.0
    values[rng.random(outputs) < 0.1] = 0.0
    values[:, :32][rng.random(outputs) < 0.1] = np.float32(-scale)
    return values


def pack(kind: str, outputs: int, inputs: int, scale: float, seed: int, isa: str) -> object:
    if kind in BLOCK_TYPES:
        raw = random_rows(kind, outputs, inputs, seed, scale)
        return _native.pack(kind, raw, inputs, None, "as-is", isa)
    raw = float_weights(outputs, inputs, scale, seed).view(np.uint8)
    return _native.pack("F32", raw, inputs, None, kind, isa)


def product(isa: str, packed: _native.PackedLinear, x: Array, activations: str = "auto") -> Array:
    out = np.full((len(x), packed.outputs), 7, np.float32)
    _native.linear(isa, packed, x, None, None, out, activations)
    return out


def check(isa: str, packed: _native.PackedLinear, x: Array, activations: str = "auto") -> None:
    y = product(isa, packed, x, activations)
    weights = np.empty((packed.outputs, packed.inputs), np.float32)
    packed.values(weights)
    if isa != "amx":
        np.testing.assert_array_equal(y.view(np.uint32), stated(isa, packed, x, activations))
        return
    # Tiles take subnormal inputs for zero, and make zeros of subnormal sums.
    rounded, wide = bf16(x).astype(np.float64), weights.astype(np.float64)
    lost = 4 * packed.inputs * 2.0**-126 * (1 + np.abs(wide).max() + np.abs(rounded).max())
    size = np.abs(rounded) @ np.abs(wide).T
    assert np.all(np.abs(y - rounded @ wide.T) <= 1e-5 * size + lost)


def stated(isa: str, packed: _native.PackedLinear, x: Array, activations: str) -> np.ndarray:
    return stated_product(isa, packed, x, activations).view(np.uint32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [*BLOCK_TYPES, *ROUNDED])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_ragged_shapes_and_the_ends_of_float32(isa: str, kind: str, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 70), "rows")
    outputs = data.draw(st.integers(1, 50), "outputs")
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    if kind in BLOCK_TYPES:
        inputs = block_elements(kind) * data.draw(st.integers(1, 3), "blocks")
        scale = data.draw(st.sampled_from(BLOCK_SCALES), "scale")
    else:
        inputs = data.draw(st.integers(1, 130), "inputs")
        scale = data.draw(st.sampled_from(FLOAT_SCALES), "scale")
    packed = pack(kind, outputs, inputs, scale, seed, isa)
    # No sum of products is beyond float32.
    bits = data.draw(st.sampled_from(ACTIVATIONS), "bits")
    check(isa, packed, activations(rows, inputs, seed, 1e4 if scale > 1.0 else 1e30), bits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [*BLOCK_TYPES, *ROUNDED])
def test_a_weight_that_is_no_number_hurts_only_its_output(isa: str, kind: str, bad: float) -> None:
    inputs, rows = 256, 5
    if kind in BLOCK_TYPES:
        raw = random_rows(kind, 20, inputs, seed=1)
        harmed = raw.copy()
        at = 208 if kind == "Q6_K" else 0
        harmed[7, at : at + 2] = np.asarray([bad], np.float16).view(np.uint8)
        pair = [_native.pack(kind, rows, inputs, None, "as-is", isa) for rows in (raw, harmed)]
    else:
        values = float_weights(20, inputs, 1.0, 1)
        harmed = values.copy()
        harmed[7, 40] = bad
        pair = [
            _native.pack("F32", rows.view(np.uint8), inputs, None, kind, isa)
            for rows in (values, harmed)
        ]
    x = np.random.default_rng(2).normal(size=(rows, inputs)).astype(np.float32)
    good, y = (product(isa, packed, x) for packed in pair)
    assert not np.isfinite(y[:, 7]).any()
    np.testing.assert_array_equal(np.delete(y, 7, axis=1), np.delete(good, 7, axis=1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", ["int8", "int4"])
@pytest.mark.parametrize("values", [[3.4e38, -3.4e38], [np.nan, 1.0], [1.0, np.nan], [np.inf, 1.0]])
def test_what_cannot_be_rounded_is_no_number(layout: str, target: str, values: list[float]) -> None:
    rows = np.zeros((2, 40), np.float32)
    rows[1, :2] = values
    packed = _native.pack("F32", rows.view(np.uint8), 40, None, target, layout)
    weights = np.empty_like(rows)
    packed.values(weights)
    assert not np.isfinite(weights[1, :2]).any()
    np.testing.assert_array_equal(weights[0], 0.0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [*BLOCK_TYPES, *ROUNDED])
@pytest.mark.parametrize("bits", ACTIVATIONS)
def test_every_number_of_rows(isa: str, kind: str, bits: str) -> None:
    """1 to 70, of which each has another mix of blocks of rows."""
    inputs = 256 if kind in BLOCK_TYPES else 250
    packed = pack(kind, 37, inputs, 0.01, 3, isa)
    x = activations(70, inputs, 5, 1e30)
    together = product(isa, packed, x, bits)
    check(isa, packed, x, bits)
    for rows in range(1, 70):
        np.testing.assert_array_equal(product(isa, packed, x[-rows:], bits), together[-rows:])


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, *ROUNDED])
@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_fused_tiers_agree_to_the_bit(kind: str, scale: float) -> None:
    fused = [isa for isa in ISAS if isa in ("avx2", "avx512")]
    inputs = 1792 if kind in BLOCK_TYPES else 1771
    packed = pack(kind, 45, inputs, scale, 1, "avx2")
    x = activations(19, inputs, 2, 1e30)
    for bits in ACTIVATIONS:
        results = [product(isa, packed, x, bits) for isa in fused]
        for other in results:
            np.testing.assert_array_equal(other.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_eight_bits_of_what_is_no_number_hurt_only_their_row(isa: str, bad: float) -> None:
    packed = pack("Q4_1", 20, 64, 0.01, 1, isa)
    x = activations(18, 64, 4, 1.0)
    good = product(isa, packed, x, "int8")
    x[7, 40] = bad
    y = product(isa, packed, x, "int8")
    assert not np.any(np.isfinite(y[7]))
    np.testing.assert_array_equal(np.delete(y, 7, axis=0), np.delete(good, 7, axis=0))


def test_activations_of_an_unknown_kind_are_refused() -> None:
    packed = pack("Q4_1", 20, 64, 0.01, 1, "portable")
    with pytest.raises(ValueError, match="activations is 'int4'; give auto or int8"):
        product("portable", packed, np.zeros((1, 64), np.float32), "int4")


@pytest.mark.parametrize("isa", LAYOUTS)
@pytest.mark.parametrize("target", ["int8", "int4"])
@settings(max_examples=25, deadline=None)
@given(
    outputs=st.integers(1, 20),
    inputs=st.integers(1, 130),
    scale=st.sampled_from(FLOAT_SCALES),
    seed=st.integers(0, 2**32 - 1),
)
def test_rounding_weights_of_any_size(
    isa: str, target: str, outputs: int, inputs: int, scale: float, seed: int
) -> None:
    """Half a level, and what halves or bf16 lose of scale and minimum; zeros stay zeros."""
    values = float_weights(outputs, inputs, scale, seed)
    packed = _native.pack("F32", values.view(np.uint8), inputs, None, target, isa)
    weights = np.empty_like(values)
    packed.values(weights)
    levels = 2 ** int(target[3:]) - 1
    # Tiles hold magnitudes below 2^-100 as zeros.
    lost = 2.0**-100 if isa == "amx" else 2.0**-149 * levels
    for begin in range(0, inputs, 32):
        group, got = values[:, begin : begin + 32], weights[:, begin : begin + 32]
        spread = group.max(axis=1).astype(np.float64) - group.min(axis=1)
        bound = spread / levels * 0.5 + np.abs(values).max() * 2.0**-7 + lost
        assert np.all(np.abs(got.astype(np.float64) - group) <= bound[:, None])
    np.testing.assert_array_equal(weights[~values.any(axis=1)], 0.0)
