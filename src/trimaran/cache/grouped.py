"""The KV cache of a model whose layers don't all see equally far back.

    layers that see all        KVCacheManager        a block for each block_size positions
    layers that see W          WindowGroup           those of the last W positions alone
    layers that see W'         WindowGroup           ...

Each group has blocks of its own, in memory of its own: the sizes are settled at start. A prefix
is found where all groups have what they need of it. Each group may only shorten the candidate
that it is given, so asking them in turn until none does ends, at the longest common hit
(a decreasing fixed point).
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trimaran.cache.block_table import Rows
from trimaran.cache.manager import CacheUsage, KVCacheManager
from trimaran.cache.prefix_index import Match, PrefixIndex
from trimaran.cache.window_group import WindowGroup
from trimaran.core.request import Sequence

Int32 = npt.NDArray[np.int32]


class GroupedKVCache(KVCacheManager):
    """A `KVCacheManager` for the layers that see all, and a `WindowGroup` for each window.

    Where no layer sees all, the manager itself only keeps account of positions: no memory
    stands behind its blocks, and the first window's tables take their place in a step's plan.

    Args:
        num_blocks: of the layers that see all; 0 where there are none.
        windows: (window, blocks) of the others, by window.
        block_size: tokens in a block.
        max_tokens: tokens that all sequences together have at most, for a cache without
            layers that see all.
        most_rows: tokens in a step, at most.
        prefix_cache: whether equal prefixes are found and shared.
        index: of the layers that see all.
    """

    def __init__(
        self,
        num_blocks: int,
        windows: Row[tuple[int, int]],
        block_size: int,
        *,
        max_tokens: int,
        most_rows: int,
        prefix_cache: bool = True,
        index: PrefixIndex | None = None,
    ) -> None:
        counted = num_blocks or -(-max_tokens // block_size) + sum(count for _, count in windows)
        super().__init__(counted, block_size, prefix_cache, index=index)
        self.groups = tuple(
            WindowGroup(window, count, block_size, prefix_cache, most_rows)
            for window, count in windows
        )
        self._counts_only = num_blocks == 0
        self.more = self.groups[1:] if self._counts_only else self.groups

    def at(self, now: float) -> None:
        super().at(now)
        for group in self.groups:
            group.at(now)

    # ------------------------------------------------------------------ sequences

    def match(self, sequence: Sequence) -> Match:
        found = super().match(sequence)
        while True:
            tokens = found.tokens
            for group in self.groups:
                tokens = group.hit(sequence, tokens)
            if tokens == found.tokens:
                return found
            found = self.match_up_to(sequence, tokens)

    def admit(self, sequence: Sequence, match: Match, up_to: int, rows: int | None = None) -> bool:
        start = match.tokens
        if any(group.lacks(sequence, start, up_to, rows) for group in self.groups):
            return False
        if not super().admit(sequence, match, up_to):
            return False
        for group in self.groups:
            self._expect_row(sequence, group.admit(sequence, start, up_to, rows))
        return True

    def allocate(self, sequence: Sequence, up_to: int) -> bool:
        if any(group.needs(sequence, up_to) > group.pool.available for group in self.groups):
            return False
        if not super().allocate(sequence, up_to):
            return False
        for group in self.groups:
            group.allocate(sequence, up_to)
        return True

    def allocate_next(self, rows: Rows, computed: Int32) -> bool:
        return False  # groups are short of blocks at different times: one by one

    def commit(self, sequence: Sequence, computed: int) -> None:
        super().commit(sequence, computed)
        for group in self.groups:
            group.commit(sequence, computed)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        super().fork(parent, child)
        for group in self.groups:
            self._expect_row(child, group.fork(parent, child))

    def release(self, sequence: Sequence, *, sound: bool = True) -> None:
        super().release(sequence, sound=sound)
        for group in self.groups:
            group.release(sequence)

    # ------------------------------------------------------------------ for a step's plan

    def short(self, rows: Rows, ends: Int32) -> Rows:
        short = self._matrix.writable[rows] < ends
        for group in self.groups:
            short |= group.matrix.writable[rows] < ends
        return short.nonzero()[0]

    def tables(self, rows: Rows, width: int) -> Int32:
        if self._counts_only:
            return self.groups[0].tables(rows, width)
        return super().tables(rows, width)

    def take_copies(self) -> list[tuple[int, int]]:
        copies = super().take_copies()
        return self.groups[0].take_copies() if self._counts_only else copies

    # ------------------------------------------------------------------ state

    def usage(self) -> CacheUsage:
        """Blocks of all groups together, whatever their size; hits are those of all."""
        pools = [group.pool for group in self.groups]
        pools += [] if self._counts_only else [self.pool]
        return replace(
            super().usage(),
            total=sum(pool.num_blocks for pool in pools),
            free=sum(pool.num_free for pool in pools),
            held=sum(pool.num_held for pool in pools),
            cached=sum(pool.num_cached for pool in pools),
        )

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        for group in self.groups:
            group.reset()

    def check(self) -> None:
        super().check()
        for group in self.groups:
            group.check()
            for sequence in self._tables:
                self._expect_row(sequence, group.row(sequence))

    def _expect_row(self, sequence: Sequence, row: int) -> None:
        if row != self.row(sequence):
            raise AssertionError(f"{sequence.id} has another row in another group")
