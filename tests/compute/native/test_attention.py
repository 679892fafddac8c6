"""The native attention kernels against float64, and the bits they must not change."""

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
    Piece,
    World,
    batches,
    bits,
    from_bf16,
    to_bf16,
)

from trimaran.compute.native import _native

ISAS = _native.available_isas()
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)
# float32 kernels; with tiles each weight is rounded to bf16, by 2^-9 of itself at most.
ERROR = {"portable": 1e-5, "avx2": 1e-5, "avx512": 1e-5, "amx": 6e-3}


@EVERY_ISA
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_against_float64(isa: str, heads: int, kv_heads: int, dim: int) -> None:
    world = World([p.past + p.new for p in RAGGED], heads, kv_heads, dim)
    for piece, out in zip(RAGGED, world.step(isa, RAGGED), strict=True):
        error = np.abs(out - world.exact(piece)).max()
        assert error < ERROR[isa], piece


@EVERY_ISA
def test_one_far_ahead(isa: str) -> None:
    """Scores of very different size: the softmax neither overflows nor loses its peak."""
    world = World([400], 4, 2, 64)
    world.k[0][::7] *= 40
    piece = Piece(0, 0, 400)
    (out,) = world.step(isa, [piece])
    assert np.abs(out - world.exact(piece)).max() < 50 * ERROR[isa]


@EVERY_ISA
@given(batch=batches(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_bits_do_not_depend_on_the_batch(
    isa: str, batch: tuple[World, list[Piece]], data: st.DataObject
) -> None:
    world, pieces = batch
    together = world.step(isa, pieces)
    block_size = data.draw(st.sampled_from([4, 8, 16, 32]), "block size")
    threads = data.draw(st.integers(1, 3), "threads")
    fill = data.draw(st.sampled_from([0, NAN, HUGE, HUGE | 0x8000]), "unused slots")
    order = data.draw(st.permutations(range(len(pieces))), "order")
    again = world.step(isa, [pieces[i] for i in order], block_size, threads, fill)
    for i, out in zip(order, again, strict=True):
        assert bits(out) == bits(together[i])
    # Alone, and in two steps instead of one.
    piece, whole = pieces[order[0]], together[order[0]]
    cut = data.draw(st.integers(0, piece.new - 1), "cut")
    parts = [Piece(piece.sequence, piece.past, cut)] if cut else []
    parts.append(Piece(piece.sequence, piece.past + cut, piece.new - cut))
    alone = [world.step(isa, [part], block_size, threads, fill)[0] for part in parts]
    assert bits(np.concatenate(alone)) == bits(whole)


@EVERY_ISA
@pytest.mark.parametrize("threads", [2, 5])
def test_bits_do_not_depend_on_the_threads(isa: str, threads: int) -> None:
    """Long contexts of few sequences: chunks run on different threads and are merged."""
    world = World([2500, 1300], 6, 2, 32)
    pieces = [Piece(0, 2499, 1), Piece(1, 1200, 100)]
    for ours, theirs in zip(
        world.step(isa, pieces), world.step(isa, pieces, threads=threads), strict=True
    ):
        assert bits(ours) == bits(theirs)


@pytest.mark.skipif("avx512" not in ISAS, reason="needs AVX-512")
def test_fused_tiers_agree_to_the_bit() -> None:
    world = World([p.past + p.new for p in RAGGED], 6, 2, 64)
    for ours, theirs in zip(world.step("avx2", RAGGED), world.step("avx512", RAGGED), strict=True):
        assert bits(ours) == bits(theirs)


@EVERY_ISA
@pytest.mark.parametrize(
    ("heads", "kv_heads", "threads", "block_size"), [(9, 3, 1, 16), (2, 2, 2, 4), (40, 1, 3, 32)]
)
def test_shared_pages_change_no_bit(
    isa: str, heads: int, kv_heads: int, threads: int, block_size: int
) -> None:
    """Prefixes that are shared by some at first and by fewer later, by rows of prompts and of
    decodes, up to the end of a chunk, within one, and by the whole of a sequence."""
    lengths = [1030, 1100, 800, 1024, 700, 769, 300, 900, 513, 800, 780]
    world = World(lengths, heads, kv_heads, 32)
    world.share(1024, 0, 1, 3)
    world.share(512, 0, 2, 4, 5, 8)
    world.share(256, 6, 7)
    world.share(768, 2, 9, 10)  # of which 512 are those of the first
    new = [1, 1, 1, 1, 9, 1, 40, 1, 1, 120, 2]
    pieces = [
        Piece(s, length - n, n) for s, (length, n) in enumerate(zip(lengths, new, strict=True))
    ]
    alone = world.step(isa, pieces, block_size, grouped=False)
    together = world.step(isa, pieces, block_size, threads)
    for piece, ours, expected in zip(pieces, together, alone, strict=True):
        assert bits(ours) == bits(expected), piece


@EVERY_ISA
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (3, 1, 16), (5, 5, 48)])
@pytest.mark.parametrize("threads", [1, 3])
def test_rounded_for_the_next_layer(
    isa: str, heads: int, kv_heads: int, dim: int, threads: int
) -> None:
    world = World([p.past + p.new for p in RAGGED], heads, kv_heads, dim)
    rows = np.concatenate(world.step(isa, RAGGED))
    steps = -(-heads * dim // 32)
    tiles = np.full((-(-len(rows) // 16), steps, 16, 64), 0xA5, np.uint8)
    plain = world.step(isa, RAGGED, threads=threads, tiles=tiles)
    assert all(np.isnan(out).all() for out in plain), "wrote float32 too"
    rounded = tiles.view(np.uint16).swapaxes(1, 2).reshape(-1, steps * 32)
    assert np.array_equal(rounded[: len(rows), : heads * dim], to_bf16(rows.reshape(len(rows), -1)))
    assert not rounded[: len(rows), heads * dim :].any(), "padding isn't zero"
    assert (rounded[len(rows) :] == 0xA5A5).all(), "wrote rows that don't exist"


@EVERY_ISA
def test_a_nan_stays_in_its_sequence(isa: str) -> None:
    world = World([300, 40, 300], 4, 2, 32)
    pieces = [Piece(0, 299, 1), Piece(1, 39, 1), Piece(2, 200, 100)]
    clean = world.step(isa, pieces)
    world.k[1][20] = np.nan
    world.v[1][20] = np.inf
    dirty = world.step(isa, pieces)
    assert bits(clean[0]) == bits(dirty[0])
    assert bits(clean[2]) == bits(dirty[2])
    assert np.isnan(dirty[1]).any()


@EVERY_ISA
@given(
    values=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32),
    slot=st.integers(0, 31),
)
@settings(max_examples=50, deadline=None)
def test_keys_and_values_are_rounded_to_even(isa: str, values: list[int], slot: int) -> None:
    raw = np.asarray(values, np.uint32).view(np.float32)
    k_cache = np.zeros((2, 1, 8, 16, 2), np.uint16)
    v_cache = np.zeros((2, 1, 8, 16, 2), np.uint16)
    row = np.asarray([slot % 16], np.int32)
    _native.attend(
        isa=isa,
        threads=1,
        q=np.zeros((1, 1, 16), np.float32),
        k=raw[:16].reshape(1, 1, 16),
        v=raw[16:].reshape(1, 1, 16),
        k_cache=k_cache,
        v_cache=v_cache,
        positions=row,
        slots=np.asarray([slot], np.int32),
        row_starts=np.asarray([0, 1], np.int32),
        contexts=row + 1,
        block_tables=np.asarray([[slot // 16]], np.int32),
        scale=0.25,
        out=np.zeros((1, 1, 16), np.float32),
    )
    block, offset = divmod(slot, 16)
    written = np.concatenate(
        [k_cache[block, 0, :, offset].reshape(-1), v_cache[block, 0, offset // 2, :, offset % 2]]
    )
    nan = np.isnan(raw)
    assert np.array_equal(written[~nan], to_bf16(raw[~nan]))
    assert np.isnan(from_bf16(written[nan])).all()
    k_cache[block, 0, :, offset] = v_cache[block, 0, offset // 2, :, offset % 2] = 0
    assert not k_cache.any(), "wrote beside the slot"
    assert not v_cache.any(), "wrote beside the slot"


def test_blocks_are_copied_whole() -> None:
    cache = np.random.default_rng(0).integers(0, 2**16, (4, 2, 8, 16, 2)).astype(np.uint16)
    expected = cache.copy()
    expected[3] = expected[1]
    _native.copy_block(cache, 1, 3)
    assert np.array_equal(cache, expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "message"),
    [
        (3, 2, 32, 16, "multiple of the number of KV heads"),
        (2, 2, 24, 16, "head_dim must be a multiple of 16"),
        (2, 2, 272, 16, "head_dim must be a multiple of 16, at most 256"),
        (2, 2, 32, 12, "block_size must be"),
    ],
)
def test_other_shapes_are_refused(
    heads: int, kv_heads: int, dim: int, block_size: int, message: str
) -> None:
    world = World([1], heads, kv_heads, dim)
    with pytest.raises(ValueError, match=message):
        world.step("portable", [Piece(0, 0, 1)], block_size)
