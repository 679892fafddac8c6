"""Who holds which block of the KV cache.

    free ──allocate──▶ held ──last release──▶ cached   if the prefix index stores it
      ▲                 │ ▲                     │ │
      └──last release───┘ └───────retain────────┘ │    (a prefix hit)
      └──────────────────evict────────────────────┘

Each block is in exactly one state: free + held + cached = all. A reference count is the
number of tables that hold the block; the index holds none, it only remembers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from trimaran.cache.prefix_index import PrefixIndex

FREE, CACHED, HELD, SHARED = range(4)


class BlockPool:
    """Reference counts of `num_blocks` blocks; every operation is O(1) a block."""

    def __init__(
        self,
        num_blocks: int,
        index: PrefixIndex,
        evicted: Callable[[int], None] | None = None,
    ) -> None:
        """`evicted` is called with each block that the index gives up, before it is handed
        out again."""
        self._evicted = evicted
        self.num_blocks = num_blocks
        self._index = index
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))  # taken from the end

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._index.num_unheld

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones, then cached ones."""
        return len(self._free) + self._index.num_unheld

    def references(self, block: int) -> int:
        """How many tables hold it."""
        return self._references[block]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, cached ones evicted where free ones don't
        suffice; or None, and nothing has changed, where there are fewer."""
        free = self._free
        if count <= len(free):
            cut = len(free) - count
            blocks = free[cut:]
            del free[cut:]
        elif count <= self.available:
            blocks = free[:]
            free.clear()
            blocks += [self._evict() for _ in range(count - len(blocks))]
        else:
            return None
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> int:
        block = self._index.evict()
        if self._evicted is not None:
            self._evicted(block)
        return block

    def retain(self, block: int) -> None:
        """Adds a reference to a held or cached block."""
        if self._references[block] == 0:
            self._index.held(block)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Takes a reference away; the last one leaves the block cached or free."""
        count = self._references[block] - 1
        if count < 0:
            raise AssertionError(f"block {block} is released, but nobody holds it")
        self._references[block] = count
        if count == 0:
            if block in self._index:
                self._index.unheld(block)
            else:
                self._free.append(block)

    def clear_index(self) -> None:
        """Forgets every stored prefix; cached blocks become free, held ones stay held."""
        self._free.extend(self._index.clear())

    def states(self) -> npt.NDArray[np.uint8]:
        """uint8 [num_blocks]: FREE, CACHED, HELD by one table, or SHARED by several. O(n)."""
        references = np.array(self._references, np.int64)
        states = np.full(self.num_blocks, CACHED, np.uint8)
        states[references == 1] = HELD
        states[references > 1] = SHARED
        states[self._free] = FREE
        return states

    def check(self, tables: Iterable[list[int]]) -> None:
        """Raises `AssertionError` unless `tables` are just the references counted here and
        every block is in one state."""
        self._index.check()
        holders = Counter(block for table in tables for block in table)
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is twice in the free list")
        unheld = 0
        for block, count in enumerate(self._references):
            if count != holders[block]:
                raise AssertionError(
                    f"block {block} counts {count} references, {holders[block]} tables hold it"
                )
            stored = block in self._index
            if (block in free) != (count == 0 and not stored):
                raise AssertionError(f"block {block} ({count} references) is wrongly (not) free")
            unheld += count == 0 and stored
        if unheld != self.num_cached:
            raise AssertionError(f"{unheld} cached blocks, the index says {self.num_cached}")
