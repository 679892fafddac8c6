"""Which unheld block of an index is given up next.

    held ──unheld──▶ resting ──last continuation gone──▶ leaf ──pop──▶ free
      ▲                 │                                 │
      └──────held───────┴──────────────held───────────────┘

Only leaves can go: blocks that nobody holds and no stored block continues. Of the leaves
the one of the lowest priority goes first, and of equal ones the least recently used. So
priority and the order of a prefix combine thus: a block stays at least as long as what
continues it, whatever its own priority, and a high priority at the end of a prefix protects
all of the prefix. A block whose tokens another stored block holds too is spent, and goes
before all others.

Cost: O(log n) for each block that becomes a leaf, stops to be one, or is popped, and for
each priority that is set or runs out. The heaps drop entries lazily: one that doesn't count
any more is passed over when it comes up, and a heap more than half of such is made anew.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from trimaran.core.retention import DEFAULT_PRIORITY

_SPENT = -1  # below every priority
_SLACK = 64  # stale entries that don't matter


class _Rank(NamedTuple):
    """A leaf's place in the order; the first goes first."""

    priority: int
    use: int  # grows with each use, so that no two leaves are equal
    block: int


class _Wish(NamedTuple):
    """A priority that isn't the default."""

    priority: int
    until: float | None


class EvictionOrder:
    """The unheld blocks of one index, and the leaves among them in order."""

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}  # unheld block -> when it was last used
        self._leaves: dict[int, _Rank] = {}
        self._heap: list[_Rank] = []
        self._wishes: dict[int, _Wish] = {}  # also of held blocks
        self._ends: list[tuple[float, int]] = []  # when wishes run out
        self._spent: set[int] = set()
        self._count = 0
        self._now = 0.0

    def __len__(self) -> int:
        """Unheld blocks."""
        return len(self._uses)

    def __contains__(self, block: int) -> bool:
        """Whether it is stored and unheld."""
        return block in self._uses

    def unheld(self, block: int, leaf: bool) -> None:
        """The last holder has let go of a stored block: it was used just now.

        Args:
            leaf: no stored block continues it.
        """
        self._count += 1
        self._uses[block] = self._count
        if leaf:
            self.leaf(block)

    def held(self, block: int) -> None:
        """An unheld block has got a holder."""
        del self._uses[block]
        self._leaves.pop(block, None)

    def leaf(self, block: int) -> None:
        """An unheld block has become a leaf, or has another priority."""
        priority = _SPENT if block in self._spent else self.priority(block)
        rank = self._leaves[block] = _Rank(priority, self._uses[block], block)
        heapq.heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._leaves) + _SLACK:
            self._heap = list(self._leaves.values())
            heapq.heapify(self._heap)

    def touch(self, block: int) -> None:
        """A block was used without being held; one that is held is passed over."""
        if block in self._uses:
            self.unheld(block, block in self._leaves)

    def spend(self, block: int) -> None:
        """Another stored block holds the tokens of `block` too."""
        self._spent.add(block)
        if block in self._leaves:
            self.leaf(block)

    def keep(self, block: int, priority: int, until: float | None) -> None:
        """Sets the priority of a stored block until a time; None is for good."""
        if priority == DEFAULT_PRIORITY:
            self._wishes.pop(block, None)
        else:
            self._wishes[block] = _Wish(priority, until)
            if until is not None:
                self._await(block, until)
        if block in self._leaves:
            self.leaf(block)

    def priority(self, block: int) -> int:
        """Of a stored block, now."""
        wish = self._wishes.get(block)
        return DEFAULT_PRIORITY if wish is None else wish.priority

    def at(self, now: float) -> None:
        """It is `now`: priorities that have run out are the default again."""
        self._now = now
        while self._ends and self._ends[0][0] <= now:
            _, block = heapq.heappop(self._ends)
            wish = self._wishes.get(block)
            if wish is not None and wish.until is not None and wish.until <= now:
                del self._wishes[block]
                if block in self._leaves:
                    self.leaf(block)

    def pop(self) -> int:
        """Takes out the leaf that goes first. There must be an unheld block."""
        while True:
            rank = heapq.heappop(self._heap)
            if self._leaves.get(rank.block) == rank:
                break
        block = rank.block
        del self._leaves[block], self._uses[block]
        self._wishes.pop(block, None)
        self._spent.discard(block)
        return block

    def clear(self) -> list[int]:
        """Takes out everything; returns the unheld blocks."""
        unheld = list(self._uses)
        for part in (self._uses, self._leaves, self._heap, self._wishes, self._ends, self._spent):
            part.clear()
        return unheld

    def check(self, leaves: set[int], stored: set[int]) -> None:
        """Raises `AssertionError` where it contradicts itself or its index.

        Args:
            leaves: unheld stored blocks that no stored one continues, as the index sees it.
            stored: all blocks of the index.
        """
        _require(self._leaves.keys() == leaves, "the leaves are those of the index")
        _require(leaves <= self._uses.keys() <= stored, "what is unheld is stored")
        _require(self._wishes.keys() <= stored, "only stored blocks have a priority")
        _require(self._spent <= stored, "only stored blocks are spent")
        heap = set(self._heap)
        for block, rank in self._leaves.items():
            priority = _SPENT if block in self._spent else self.priority(block)
            _require(rank in heap, f"leaf {block} is in the heap")
            _require(rank == (priority, self._uses[block], block), f"leaf {block} has its rank")
        for block, wish in self._wishes.items():
            if wish.until is not None:
                _require(wish.until > self._now, f"the priority of {block} has not run out")
                _require((wish.until, block) in self._ends, f"the end for {block} is awaited")

    def _await(self, block: int, until: float) -> None:
        heapq.heappush(self._ends, (until, block))
        if len(self._ends) > 2 * len(self._wishes) + _SLACK:
            self._ends = [
                (wish.until, number)
                for number, wish in self._wishes.items()
                if wish.until is not None
            ]
            heapq.heapify(self._ends)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"eviction order: it doesn't hold that {what}")
