"""Attention over a window: against float64, and the bits it must not change.

Blocks before the window of a step's first row are -1 in the block table, or foreign blocks full
of NaN: whoever reads them is found out.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import HUGE, NAN, RAGGED, SHAPES, Piece, World, batches, bits

from trimaran.compute.native import _native

ISAS = _native.available_isas()
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)
EVERY_KV = pytest.mark.parametrize("kv", ["bf16", "int8"])
ERROR = {"portable": 1e-5, "avx2": 1e-5, "avx512": 1e-5, "amx": 6e-3}
LENGTHS = [p.past + p.new for p in RAGGED]


@EVERY_ISA
@EVERY_KV
@pytest.mark.parametrize("window", [1, 16, 100, 257, 512])
def test_against_float64(isa: str, kv: str, window: int) -> None:
    heads, kv_heads, dim = SHAPES[window % len(SHAPES)]
    world = World(LENGTHS, heads, kv_heads, dim, window=window)
    outs = world.step(isa, RAGGED, (4, 16, 32)[window % 3], kv=kv)
    for piece, out in zip(RAGGED, outs, strict=True):
        error = np.abs(out - world.exact(piece, kv)).max()
        assert error < (ERROR[isa] if kv == "bf16" else 1e-3), piece


@EVERY_ISA
@EVERY_KV
def test_a_window_that_sees_all_changes_no_bit(isa: str, kv: str) -> None:
    whole = World(LENGTHS, 6, 2, 64).step(isa, RAGGED, kv=kv)
    windowed = World(LENGTHS, 6, 2, 64, window=max(LENGTHS)).step(isa, RAGGED, kv=kv)
    for ours, expected in zip(windowed, whole, strict=True):
        assert bits(ours) == bits(expected)


@EVERY_ISA
@EVERY_KV
@given(batch=batches(windows=True), data=st.data())
@settings(max_examples=15, deadline=None)
def test_bits_do_not_depend_on_the_batch(
    isa: str, kv: str, batch: tuple[World, list[Piece]], data: st.DataObject
) -> None:
    world, pieces = batch
    together = world.step(isa, pieces, kv=kv)
    block_size = data.draw(st.sampled_from([4, 8, 16, 32]), "block size")
    threads = data.draw(st.integers(1, 3), "threads")
    fill = data.draw(st.sampled_from([0, NAN, HUGE, HUGE | 0x8000]), "unused slots")
    order = data.draw(st.permutations(range(len(pieces))), "order")
    again = world.step(isa, [pieces[i] for i in order], block_size, threads, fill, kv=kv)
    for i, out in zip(order, again, strict=True):
        assert bits(out) == bits(together[i])
    # Alone, and in two steps instead of one: the second finds fewer blocks.
    piece, whole = pieces[order[0]], together[order[0]]
    cut = data.draw(st.integers(0, piece.new - 1), "cut")
    parts = [Piece(piece.sequence, piece.past, cut)] if cut else []
    parts.append(Piece(piece.sequence, piece.past + cut, piece.new - cut))
    alone = [world.step(isa, [part], block_size, threads, fill, kv=kv)[0] for part in parts]
    assert bits(np.concatenate(alone)) == bits(whole)


@EVERY_ISA
@EVERY_KV
@pytest.mark.parametrize("window", [300, 1000])
@pytest.mark.parametrize("threads", [2, 5])
def test_bits_do_not_depend_on_the_threads(isa: str, kv: str, window: int, threads: int) -> None:
    """Chunks run on different threads and are merged, from where each row's window begins."""
    world = World([2500, 1300, 700], 6, 2, 32, window=window)
    pieces = [Piece(0, 2499, 1), Piece(1, 1000, 300), Piece(2, 0, 700)]
    for ours, theirs in zip(
        world.step(isa, pieces, kv=kv), world.step(isa, pieces, threads=threads, kv=kv), strict=True
    ):
        assert bits(ours) == bits(theirs)


@EVERY_KV
def test_fused_tiers_agree_to_the_bit(kv: str) -> None:
    fused = [isa for isa in ISAS if isa != "portable" and (kv == "int8" or isa != "amx")]
    world = World(LENGTHS, 6, 2, 64, window=200)
    results = [world.step(isa, RAGGED, kv=kv) for isa in fused]
    for other in results[1:]:
        for ours, theirs in zip(other, results[0], strict=True):
            assert bits(ours) == bits(theirs)


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window must not be negative"):
        World([1], 1, 1, 16, window=-1).step("portable", [Piece(0, 0, 1)])
