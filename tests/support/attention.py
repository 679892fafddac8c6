"""Random attention over a paged cache, by one step of the native kernels or in float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from trimaran.compute.native import _native

Float32 = npt.NDArray[np.float32]
UInt16 = npt.NDArray[np.uint16]
UInt8 = npt.NDArray[np.uint8]
Int8 = npt.NDArray[np.int8]

NAN, HUGE = 0x7FC0, 0x7F00


def to_bf16(x: Float32) -> UInt16:
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: UInt16) -> Float32:
    return (x.astype(np.uint32) << 16).view(np.float32)


def to_int8(x: Float32) -> tuple[Int8, Float32]:
    """Codes and scales of the vectors along the last axis, as an int8 cache holds them."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    largest = np.where(largest < 1e-30, np.float32(0), largest)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(largest > 0, np.rint(x * (np.float32(127) / largest)), 0)
    return codes.astype(np.int8), (largest / np.float32(127))[..., 0].astype(np.float32)


def rounded(x: Float32, kv: str) -> npt.NDArray[np.float64]:
    """`x` as a cache holds it."""
    if kv == "bf16":
        return from_bf16(to_bf16(x)).astype(np.float64)
    codes, scales = to_int8(x)
    return codes.astype(np.float64) * scales[..., None]


class Pages:
    """K and V of one layer, every slot filled with a 16-bit word."""

    def __init__(
        self, kv: str, blocks: int, kv_heads: int, dim: int, block_size: int, fill: int
    ) -> None:
        self.kv, self.dim, self.block_size = kv, dim, block_size
        shape = (blocks, kv_heads, 1, block_size, dim // 2 + 2)
        k_shape = v_shape = shape
        if kv == "bf16":
            k_shape = (blocks, kv_heads, dim // 2, block_size, 2)
            v_shape = (blocks, kv_heads, block_size // 2, dim, 2)
        self.k, self.v = np.full(k_shape, fill, np.uint16), np.full(v_shape, fill, np.uint16)

    def views(self) -> tuple[Int8, Float32, Int8, Float32]:
        """Of an int8 cache: codes of K [blocks, kv_heads, dim / 4, block_size, 4], scales
        [blocks, kv_heads, block_size], codes of V [blocks, kv_heads, block_size / 4, dim, 4],
        scales."""
        heads, codes = self.k.shape[:2], self.dim * self.block_size
        k, v = (x.view(np.int8).reshape(*heads, -1) for x in (self.k, self.v))
        return (
            k[..., :codes].reshape(*heads, self.dim // 4, self.block_size, 4),
            k[..., codes:].view(np.float32),
            v[..., :codes].reshape(*heads, self.block_size // 4, self.dim, 4),
            v[..., codes:].view(np.float32),
        )

    def write(self, block: int, slot: int, key: Float32, value: Float32) -> None:
        """K and V of one position, [kv_heads, dim]."""
        heads = len(key)
        if self.kv == "bf16":
            self.k[block, :, :, slot] = to_bf16(key).reshape(heads, -1, 2)
            self.v[block, :, slot // 2, :, slot % 2] = to_bf16(value)
            return
        k, k_scales, v, v_scales = self.views()
        codes, k_scales[block, :, slot] = to_int8(key)
        k[block, :, :, slot] = codes.reshape(heads, -1, 4)
        v[block, :, slot // 4, :, slot % 4], v_scales[block, :, slot] = to_int8(value)


@dataclass(frozen=True)
class Piece:
    """Rows `past .. past + new` of a sequence, computed in one step."""

    sequence: int
    past: int
    new: int


class World:
    """Random q, k and v of some sequences, and steps over them."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        seed: int = 0,
        window: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.lengths, self.heads, self.kv_heads, self.dim = lengths, heads, kv_heads, dim
        self.scale, self.window = dim**-0.5, window

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
        tiles: UInt8 | None = None,
        grouped: bool = True,
        kv: str = "bf16",
    ) -> list[Float32]:
        """Attention of each piece, [new, heads, dim], by one step over a cache whose slots
        hold `fill` wherever none of the sequence's tokens lies. With `tiles` it is written
        there, in bf16, and the result is NaN."""
        counts = [-(-(p.past + p.new) // block_size) for p in pieces]
        blocks = np.random.default_rng(len(pieces)).permutation(sum(counts) + 2)
        tables = np.full((len(pieces), max(counts) + 1), -1, np.int32)
        pages = Pages(kv, len(blocks), self.kv_heads, self.dim, block_size, fill)
        taken = 0
        for s, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
            tables[s, :count] = blocks[taken : taken + count]
            taken += count
            leader, tokens = self.leader.get(piece.sequence, (None, 0))
            for t, other in enumerate(pieces[:s]):
                if leader == other.sequence:
                    tables[s, : tokens // block_size] = tables[t, : tokens // block_size]
            # Blocks before the window of the first row are gone: nobody's, or a foreign one's
            # that holds `fill`.
            first = max(0, piece.past - self.window + 1) if self.window else 0
            tables[s, : first // block_size] = [-1, blocks[-1], blocks[-2]][s % 3]
            for position in range(first // block_size * block_size, piece.past):
                pages.write(
                    tables[s, position // block_size],
                    position % block_size,
                    self.k[piece.sequence][position],
                    self.v[piece.sequence][position],
                )
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
            k_cache=pages.k,
            v_cache=pages.v,
            positions=positions,
            slots=np.asarray(slots, np.int32),
            row_starts=starts,
            contexts=np.asarray([p.past + p.new for p in pieces], np.int32),
            block_tables=tables,
            scale=self.scale,
            out=out,
            out_bf16=tiles,
            grouped=grouped,
            kv=kv,
            window=self.window,
        )
        return [out[begin:end] for begin, end in pairwise(starts)]

    def exact(self, piece: Piece, kv: str = "bf16") -> npt.NDArray[np.float64]:
        """The same in float64, on K and V rounded as the cache holds them."""
        end = piece.past + piece.new
        group = self.heads // self.kv_heads
        keys = rounded(self.k[piece.sequence][:end], kv)
        values = rounded(self.v[piece.sequence][:end], kv)
        queries = self.q[piece.sequence][piece.past : end].astype(np.float64)
        scores = np.einsum("thd,jhd->htj", queries, keys.repeat(group, axis=1)) * self.scale
        rows, columns = np.arange(piece.past, end)[:, None], np.arange(end)[None]
        hidden = columns > rows
        if self.window:
            hidden |= columns <= rows - self.window
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


@st.composite
def batches(draw: st.DrawFn, windows: bool = False) -> tuple[World, list[Piece]]:
    heads, kv_heads, dim = draw(st.sampled_from([(9, 3, 64), (7, 1, 32), (2, 2, 48), (8, 1, 16)]))
    lengths = draw(st.lists(st.integers(1, 620), min_size=1, max_size=4))
    pieces = []
    for s, length in enumerate(lengths):
        new = draw(st.one_of(st.just(1), st.integers(1, min(length, 150))))
        pieces.append(Piece(s, length - min(new, length), min(new, length)))
    window = draw(st.integers(1, 300)) if windows else 0
    return World(lengths, heads, kv_heads, dim, draw(st.integers(0, 99)), window), pieces
