"""The native attention kernels against float64, and the bits they must not change."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.compute.native import _native

Float32 = npt.NDArray[np.float32]
UInt16 = npt.NDArray[np.uint16]

ISAS = _native.available_isas()
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)
# float32 kernels; with tiles each weight is rounded to bf16, by 2^-9 of itself at most.
ERROR = {"portable": 1e-5, "avx2": 1e-5, "avx512": 1e-5, "amx": 6e-3}
NAN, HUGE = 0x7FC0, 0x7F00


def to_bf16(x: Float32) -> UInt16:
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: UInt16) -> Float32:
    return (x.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Piece:
    """Rows `past .. past + new` of a sequence, computed in one step."""

    sequence: int
    past: int
    new: int


class World:
    """Random q, k and v of some sequences, and steps over them."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, dim: int, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.lengths, self.heads, self.kv_heads, self.dim = lengths, heads, kv_heads, dim
        self.scale = dim**-0.5

        def draw(count: int) -> list[Float32]:
            return [
                rng.standard_normal((n, count, dim), dtype=np.float32) * np.float32(1.5)
                for n in lengths
            ]

        self.q, self.k, self.v = draw(heads), draw(kv_heads), draw(kv_heads)
        self.leader: dict[int, tuple[int, int]] = {}

    def share(self, tokens: int, leader: int, *others: int) -> None:
        """The first `tokens` of the leader are those of the others too, in the same blocks."""
        for s in others:
            self.k[s][:tokens] = self.k[leader][:tokens]
            self.v[s][:tokens] = self.v[leader][:tokens]
            self.leader[s] = (leader, tokens)

    def step(
        self,
        isa: str,
        pieces: list[Piece],
        block_size: int = 16,
        threads: int = 1,
        fill: int = NAN,
        tiles: npt.NDArray[np.uint8] | None = None,
        grouped: bool = True,
    ) -> list[Float32]:
        """Attention of each piece, [new, heads, dim], by one step over a cache whose slots
        hold `fill` wherever none of the sequence's tokens lies. With `tiles` it is written
        there, in bf16, and the result is NaN."""
        counts = [-(-(p.past + p.new) // block_size) for p in pieces]
        blocks = np.random.default_rng(len(pieces)).permutation(sum(counts) + 2)
        tables = np.full((len(pieces), max(counts) + 1), -1, np.int32)
        k_shape = (len(blocks), self.kv_heads, self.dim // 2, block_size, 2)
        v_shape = (len(blocks), self.kv_heads, block_size // 2, self.dim, 2)
        k_cache, v_cache = np.full(k_shape, fill, np.uint16), np.full(v_shape, fill, np.uint16)
        taken = 0
        for s, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
            tables[s, :count] = blocks[taken : taken + count]
            taken += count
            leader, tokens = self.leader.get(piece.sequence, (None, 0))
            for t, other in enumerate(pieces[:s]):
                if leader == other.sequence:
                    tables[s, : tokens // block_size] = tables[t, : tokens // block_size]
            keys = to_bf16(self.k[piece.sequence][: piece.past])
            values = to_bf16(self.v[piece.sequence][: piece.past])
            for position in range(piece.past):
                block, slot = tables[s, position // block_size], position % block_size
                k_cache[block, :, :, slot] = keys[position].reshape(self.kv_heads, -1, 2)
                v_cache[block, :, slot // 2, :, slot % 2] = values[position]
        rows = [(s, position) for s, p in enumerate(pieces) for position in positions_of(p)]
        positions = np.asarray([position for _, position in rows], np.int32)
        slots = [
            tables[s, position // block_size] * block_size + position % block_size
            for s, position in rows
        ]

        def rows_of(arrays: list[Float32]) -> Float32:
            return np.concatenate([arrays[p.sequence][positions_of(p)] for p in pieces])

        q = rows_of(self.q)
        out = np.full_like(q, np.nan)
        starts = np.cumsum([0] + [p.new for p in pieces], dtype=np.int32)
        _native.attend(
            isa=isa,
            threads=threads,
            q=q,
            k=rows_of(self.k),
            v=rows_of(self.v),
            k_cache=k_cache,
            v_cache=v_cache,
            positions=positions,
            slots=np.asarray(slots, np.int32),
            row_starts=starts,
            contexts=np.asarray([p.past + p.new for p in pieces], np.int32),
            block_tables=tables,
            scale=self.scale,
            out=out,
            out_bf16=tiles,
            grouped=grouped,
        )
        return [out[begin:end] for begin, end in pairwise(starts)]

    def exact(self, piece: Piece) -> npt.NDArray[np.float64]:
        """The same in float64, on K and V rounded to bf16."""
        end = piece.past + piece.new
        group = self.heads // self.kv_heads
        keys = from_bf16(to_bf16(self.k[piece.sequence][:end])).astype(np.float64)
        values = from_bf16(to_bf16(self.v[piece.sequence][:end])).astype(np.float64)
        queries = self.q[piece.sequence][piece.past : end].astype(np.float64)
        scores = np.einsum("thd,jhd->htj", queries, keys.repeat(group, axis=1)) * self.scale
        hidden = np.arange(end)[None] > np.arange(piece.past, end)[:, None]
        scores[:, hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("htj,jhd->thd", weights, values.repeat(group, axis=1))


def positions_of(piece: Piece) -> range:
    return range(piece.past, piece.past + piece.new)


def bits(x: Float32) -> bytes:
    return np.ascontiguousarray(x).tobytes()


# A batch of every kind: decodes around the edges of pages, subtiles and chunks, prompts
# that cross them, and chunks of prompts.
RAGGED = [
    Piece(0, 0, 1),
    Piece(1, 15, 1),
    Piece(2, 16, 1),
    Piece(3, 255, 1),
    Piece(4, 256, 1),
    Piece(5, 0, 70),
    Piece(6, 250, 13),
    Piece(7, 511, 2),
    Piece(8, 100, 201),
    Piece(9, 600, 1),
]
SHAPES = [(9, 3, 64), (14, 2, 64), (4, 4, 16), (8, 1, 32), (6, 2, 80), (2, 2, 128), (3, 1, 256)]


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


@st.composite
def batches(draw: st.DrawFn) -> tuple[World, list[Piece]]:
    heads, kv_heads, dim = draw(st.sampled_from([(9, 3, 64), (7, 1, 32), (2, 2, 48), (8, 1, 16)]))
    lengths = draw(st.lists(st.integers(1, 620), min_size=1, max_size=4))
    pieces = []
    for s, length in enumerate(lengths):
        new = draw(st.one_of(st.just(1), st.integers(1, min(length, 150))))
        pieces.append(Piece(s, length - min(new, length), min(new, length)))
    return World(lengths, heads, kv_heads, dim, draw(st.integers(0, 99))), pieces


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
