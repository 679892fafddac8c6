"""Attention over an int8 cache against float64, and the bits it must not change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import (
    HUGE,
    NAN,
    RAGGED,
    SHAPES,
    Float32,
    Pages,
    Piece,
    World,
    batches,
    bits,
    to_int8,
)

from trimaran.compute.native import _native

ISAS = _native.available_isas()
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)
FUSED = [isa for isa in ISAS if isa != "portable"]
# Queries and weights have 15 bits.
ERROR = 1e-3


def step(world: World, isa: str, pieces: list[Piece], *args: int, **options: int) -> list[Float32]:
    return world.step(isa, pieces, *args, kv="int8", **options)


@EVERY_ISA
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_against_float64(isa: str, heads: int, kv_heads: int, dim: int) -> None:
    world = World([p.past + p.new for p in RAGGED], heads, kv_heads, dim)
    for piece, out in zip(RAGGED, step(world, isa, RAGGED), strict=True):
        error = np.abs(out - world.exact(piece, "int8")).max()
        assert error < ERROR, piece


@EVERY_ISA
def test_one_far_ahead(isa: str) -> None:
    """Scores and values of very different size."""
    world = World([400], 4, 2, 64)
    world.k[0][::7] *= 10
    world.v[0][::5] *= 100
    world.v[0][1::5] = 0
    piece = Piece(0, 0, 400)
    (out,) = step(world, isa, [piece])
    exact = world.exact(piece, "int8")
    assert np.abs(out - exact).max() < 2 * ERROR * np.abs(exact).max()


@EVERY_ISA
def test_nothing_but_zeros(isa: str) -> None:
    world = World([300], 4, 2, 32)
    for x in (world.q[0], world.k[0], world.v[0]):
        x[:] = 0
    (out,) = step(world, isa, [Piece(0, 0, 300)])
    assert not out.any()


@EVERY_ISA
@given(batch=batches(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_bits_do_not_depend_on_the_batch(
    isa: str, batch: tuple[World, list[Piece]], data: st.DataObject
) -> None:
    world, pieces = batch
    together = step(world, isa, pieces)
    block_size = data.draw(st.sampled_from([4, 8, 16, 32]), "block size")
    threads = data.draw(st.integers(1, 3), "threads")
    fill = data.draw(st.sampled_from([0, NAN, HUGE, HUGE | 0x8000, 0xFFFF]), "unused slots")
    order = data.draw(st.permutations(range(len(pieces))), "order")
    again = step(world, isa, [pieces[i] for i in order], block_size, threads, fill)
    for i, out in zip(order, again, strict=True):
        assert bits(out) == bits(together[i])
    # Alone, and in two steps instead of one.
    piece, whole = pieces[order[0]], together[order[0]]
    cut = data.draw(st.integers(0, piece.new - 1), "cut")
    parts = [Piece(piece.sequence, piece.past, cut)] if cut else []
    parts.append(Piece(piece.sequence, piece.past + cut, piece.new - cut))
    alone = [step(world, isa, [part], block_size, threads, fill)[0] for part in parts]
    assert bits(np.concatenate(alone)) == bits(whole)


@EVERY_ISA
@pytest.mark.parametrize("threads", [2, 5])
def test_bits_do_not_depend_on_the_threads(isa: str, threads: int) -> None:
    world = World([2500, 1300], 6, 2, 32)
    pieces = [Piece(0, 2499, 1), Piece(1, 1200, 100)]
    for ours, theirs in zip(
        step(world, isa, pieces), step(world, isa, pieces, threads=threads), strict=True
    ):
        assert bits(ours) == bits(theirs)


@pytest.mark.skipif("avx512" not in ISAS, reason="needs AVX-512")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (9, 1, 80), (3, 3, 16)])
def test_fused_tiers_agree_to_the_bit(heads: int, kv_heads: int, dim: int) -> None:
    """Vectors of 16 and of 32 bytes, and tiles: what they sum is exact."""
    world = World([p.past + p.new for p in RAGGED], heads, kv_heads, dim)
    expected = step(world, "avx2", RAGGED)
    for isa in FUSED:
        for ours, theirs in zip(step(world, isa, RAGGED), expected, strict=True):
            assert bits(ours) == bits(theirs), isa


@EVERY_ISA
@pytest.mark.parametrize(
    ("heads", "kv_heads", "threads", "block_size"), [(9, 3, 1, 16), (2, 2, 2, 4), (40, 1, 3, 32)]
)
def test_shared_pages_change_no_bit(
    isa: str, heads: int, kv_heads: int, threads: int, block_size: int
) -> None:
    lengths = [1030, 800, 1024, 769, 300, 900]
    world = World(lengths, heads, kv_heads, 32)
    world.share(768, 0, 1, 2)
    world.share(512, 0, 3)
    world.share(256, 0, 4, 5)
    new = [1, 1, 9, 1, 40, 1]
    pieces = [
        Piece(s, length - n, n) for s, (length, n) in enumerate(zip(lengths, new, strict=True))
    ]
    alone = step(world, isa, pieces, block_size, grouped=False)
    together = step(world, isa, pieces, block_size, threads)
    for piece, ours, expected in zip(pieces, together, alone, strict=True):
        assert bits(ours) == bits(expected), piece


@EVERY_ISA
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_what_is_not_finite_stays_in_its_rows(isa: str, part: str, bad: float) -> None:
    """It reaches the rows that see it, and neither other sequences nor earlier rows."""
    world = World([300, 40, 300], 4, 2, 32)
    pieces = [Piece(0, 299, 1), Piece(1, 0, 40), Piece(2, 200, 100)]
    clean = step(world, isa, pieces)
    getattr(world, part)[1][20, :, 3] = bad
    dirty = step(world, isa, pieces)
    assert bits(clean[0]) == bits(dirty[0])
    assert bits(clean[2]) == bits(dirty[2])
    assert bits(clean[1][:20]) == bits(dirty[1][:20])
    seen = dirty[1][20:21] if part == "q" else dirty[1][20:]
    assert np.isnan(seen).all()


@EVERY_ISA
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32).map(
        lambda values: values[:32]
    ),
    slot=st.integers(0, 31),
)
@settings(max_examples=50, deadline=None)
def test_keys_and_values_are_rounded_to_even(isa: str, values: list[float], slot: int) -> None:
    raw = np.asarray(values, np.float32)
    raw[np.abs(raw) < 1e-30] = 0
    pages = Pages("int8", 2, 1, 16, 16, 0)
    row = np.asarray([slot % 16], np.int32)
    _native.attend(
        isa=isa,
        threads=1,
        q=np.zeros((1, 1, 16), np.float32),
        k=raw[:16].reshape(1, 1, 16),
        v=raw[16:].reshape(1, 1, 16),
        k_cache=pages.k,
        v_cache=pages.v,
        positions=row,
        slots=np.asarray([slot], np.int32),
        row_starts=np.asarray([0, 1], np.int32),
        contexts=row + 1,
        block_tables=np.asarray([[slot // 16]], np.int32),
        scale=0.25,
        out=np.zeros((1, 1, 16), np.float32),
        kv="int8",
    )
    expected = Pages("int8", 2, 1, 16, 16, 0)
    expected.write(slot // 16, slot % 16, raw[:16].reshape(1, 16), raw[16:].reshape(1, 16))
    assert np.array_equal(pages.k, expected.k)
    assert np.array_equal(pages.v, expected.v)


def test_codes_are_symmetric() -> None:
    codes, scales = to_int8(np.asarray([[-2.0, 1.0, 2.0, 0.0]], np.float32))
    assert codes.tolist() == [[-127, 64, 127, 0]]
    assert scales == np.float32(2) / np.float32(127)
