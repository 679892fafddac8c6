"""Attention over either cache on ragged pieces and at the ends of float32, on every tier."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import SHAPES, Piece, World, bits

from trimaran.compute.native import _native

ISAS = _native.available_isas()
FUSED = [isa for isa in ISAS if isa in ("avx2", "avx512")]
ZERO, SUBNORMAL, TINY, HUGE = 0.0, 1e-42, 1e-29, 1e30
# A share of the largest value: float32 or tiles, and queries and weights in 15 bits, which
# are the less exact the larger the scores.
ERROR = {"bf16": {"amx": 8e-3}, "int8": {}}
# An int8 cache counts magnitudes below 1e-30 as zero, and products of weights with scales of
# values: those are the values' largest by 127. Tiles make zeros below 2^-126.
LEAST = {"bf16": 1e-35, "int8": 2e-28}

case = st.fixed_dictionaries(
    {
        "shape": st.sampled_from(SHAPES),
        "new": st.integers(1, 70),
        "past": st.sampled_from([0, 1, 15, 16, 17, 185, 186, 255, 256, 257]),
        # of queries and keys: what they score stays within a softmax's reach
        "sizes": st.sampled_from(
            [
                (1, 1),
                (HUGE, TINY),
                (TINY, HUGE),
                (1, SUBNORMAL),
                (SUBNORMAL, 1),
                (ZERO, 1),
                (1, ZERO),
            ]
        ),
        "values": st.lists(
            st.sampled_from([ZERO, SUBNORMAL, 1.2e-38, TINY, 1e-27, 1.0, HUGE]),
            min_size=1,
            max_size=3,
        ),
        "seed": st.integers(0, 99),
    }
)


def world_of(case: dict) -> tuple[World, Piece]:
    """One sequence; its values are of all the sizes drawn, position by position."""
    length = case["past"] + case["new"]
    world = World([length], *case["shape"], case["seed"])
    query, key = case["sizes"]
    rng = np.random.default_rng(case["seed"])
    world.q[0] *= np.float32(query)
    world.k[0] *= np.float32(key)
    world.v[0] *= rng.choice(np.asarray(case["values"], np.float32), (length, 1, 1))
    world.v[0][rng.random(world.v[0].shape) < 0.1] = -0.0
    return world, Piece(0, case["past"], case["new"])


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15, deadline=None)
@given(case=case)
def test_against_float64(isa: str, kv: str, case: dict) -> None:
    world, piece = world_of(case)
    (out,) = world.step(isa, [piece], kv=kv)
    largest = np.abs(world.v[0]).max()
    scores = max(1.0, case["sizes"][0] * case["sizes"][1])
    share = ERROR[kv].get(isa, 3e-4 * scores if kv == "int8" else 1e-5)
    bound = share * largest + LEAST[kv]
    assert np.abs(out - world.exact(piece, kv)).max() <= bound


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@settings(max_examples=15, deadline=None)
@given(case=case)
def test_fused_tiers_agree_to_the_bit(kv: str, case: dict) -> None:
    world, piece = world_of(case)
    exact = [isa for isa in ISAS if isa != "portable"] if kv == "int8" else FUSED
    results = {isa: bits(world.step(isa, [piece], kv=kv)[0]) for isa in exact}
    assert len(set(results.values())) <= 1, results.keys()


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("isa", ISAS)
def test_every_number_of_rows(isa: str, kv: str) -> None:
    """1 to 70 new rows of the same sequence, after as many as there are left."""
    world = World([300], 6, 2, 48)
    whole = world.step(isa, [Piece(0, 0, 300)], kv=kv)[0]
    for new in range(1, 71):
        (out,) = world.step(isa, [Piece(0, 300 - new, new)], kv=kv)
        assert bits(out) == bits(whole[-new:]), new


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("isa", ISAS)
def test_scores_beyond_float32_stay_in_their_rows(isa: str, kv: str) -> None:
    world = World([300, 290], 4, 2, 32)
    pieces = [Piece(0, 200, 100), Piece(1, 289, 1)]
    clean = world.step(isa, pieces, kv=kv)
    world.q[0][250] *= np.float32(1e30)
    world.k[0][250] *= np.float32(1e30)
    harmed = world.step(isa, pieces, kv=kv)
    assert bits(clean[1]) == bits(harmed[1])
    assert bits(clean[0][:50]) == bits(harmed[0][:50])
    # Later rows see a key of 1e30: its score is finite, and takes all the weight or none.
    assert np.isfinite(harmed[0][51:]).all()
