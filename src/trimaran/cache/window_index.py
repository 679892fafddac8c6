"""An index of full blocks of which only those within a window of a prefix are needed.

Layers that see W positions need, to go on after n tokens, the blocks of the last W - 1 of them
alone; those before may be gone. So a block can't be found by way of the block before it, and
its name is a digest of everything up to its end:

    digest(i) = BLAKE2b-128(digest(i - 1), tokens of block i),  digest(-1) = of the namespace

Two prefixes with one digest would have to be looked for 2^64 times; they are taken for equal.

Cost: O(block size) a block to match or insert, O(log n) to evict the one that goes first (see
`EvictionOrder`; none continues another here).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from trimaran.cache.eviction import EvictionOrder
from trimaran.core.namespace import Namespace

Digest = bytes


def first_digest(namespace: Namespace) -> Digest:
    """The digest before the first block of all prefixes in a namespace."""
    return namespace.digest()


def block_digests(first: Digest, tokens: Sequence[int], start: int, size: int) -> list[Digest]:
    """Of each full block of `tokens` from `start` on; `first` is that of what comes before."""
    digests = []
    for begin in range(start, len(tokens) - size + 1, size):
        content = array("q", tokens[begin : begin + size]).tobytes()
        first = hashlib.blake2b(first + content, digest_size=16).digest()
        digests.append(first)
    return digests


class WindowIndex:
    """Blocks by digest; what `BlockPool` asks of an index, and `find` and `insert`."""

    def __init__(self) -> None:
        self._blocks: dict[Digest, int] = {}
        self._digests: dict[int, Digest] = {}
        self._order = EvictionOrder()

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def num_unheld(self) -> int:
        """Stored blocks that nobody holds."""
        return len(self._order)

    def find(self, digest: Digest) -> int | None:
        """The block of that digest."""
        return self._blocks.get(digest)

    def insert(self, digest: Digest, block: int) -> int:
        """Stores a held block; the one that stands for the digest, perhaps an older one."""
        stands = self._blocks.setdefault(digest, block)
        if stands == block:
            self._digests[block] = digest
        return stands

    def keep(self, block: int, priority: int, until: float | None) -> None:
        """Sets the eviction priority of a stored block until a time; None is for good."""
        self._order.keep(block, priority, until)

    def at(self, now: float) -> None:
        """It is `now`, seconds on the clock by which priorities run out."""
        self._order.at(now)

    def held(self, block: int) -> None:
        """A stored block has got its first holder."""
        self._order.held(block)

    def unheld(self, block: int) -> None:
        """A stored block has lost its last holder."""
        self._order.unheld(block, leaf=True)

    def evict(self) -> int:
        """Takes out and returns the unheld block that goes first. There must be one."""
        block = self._order.pop()
        del self._blocks[self._digests.pop(block)]
        return block

    def clear(self) -> list[int]:
        """Takes out everything; returns the blocks that were unheld."""
        self._blocks.clear()
        self._digests.clear()
        return self._order.clear()

    def check(self) -> None:
        """Raises `AssertionError` where the structure contradicts itself."""
        stored = set(self._digests)
        if {block: digest for digest, block in self._blocks.items()} != self._digests:
            raise AssertionError("window index: blocks and digests differ")
        self._order.check({block for block in stored if block in self._order}, stored)
