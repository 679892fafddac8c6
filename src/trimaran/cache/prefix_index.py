"""What an index of committed prefixes does; who holds a block is the pool's business.

Where does a new kind of index go? It implements `PrefixIndex`. The pool tells it when the
last table lets go of one of its blocks (`unheld`) and when a table takes one up again
(`held`); it alone decides which unheld block is given up next (`evict`).

Whoever holds a stored block holds all stored blocks before it (see `insert`), so a path is
locked to its root by the pool's reference counts, and below an unheld block nothing is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trimaran.core.namespace import Namespace

NOWHERE = Namespace()


@dataclass(slots=True, eq=False)
class Cursor:
    """Where the committed tokens of one sequence end in an index.

    Attributes:
        namespace: of the sequence; prefixes are shared only within one.
        place: the index's own mark of the last committed full block; None is the root.
        blocks: committed full blocks so far, found or inserted.
        closed: nothing more can be inserted after it: a hash collided, or the index was
            cleared under the sequence.
    """

    namespace: Namespace
    place: object | None = None
    blocks: int = 0
    closed: bool = False

    def copy(self) -> Cursor:
        """For a sequence that goes on from the same place."""
        return Cursor(self.namespace, self.place, self.blocks, self.closed)


@dataclass(frozen=True, slots=True)
class Match:
    """A stored prefix of a sequence; valid until the next allocation.

        tokens    |<- block 7 ->|<- block 2 ->|<- partial ->|
        blocks    [ 7, 2 ]                      source 9: its first tokens are these too

    Attributes:
        tokens: length of the prefix, the partial part included.
        blocks: that hold its KV whole, in order of position: they can be shared.
        cursor: from where the sequence goes on.
        source: a stored block that begins with the tokens after `blocks`, to be copied;
            None where none are found.
        partial: how many tokens of `source`.
        found: the index's own mark of where the match ends.
    """

    tokens: int
    blocks: list[int] = field(default_factory=list)
    cursor: Cursor = field(default_factory=lambda: Cursor(NOWHERE))
    source: int | None = None
    partial: int = 0
    found: object | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored run of tokens, for inspection.

    Attributes:
        end: length of the prefix that it ends.
        tokens: of its own, after those of the piece that it continues.
        block: that ends with it, or None where other blocks continue it.
        below: a block that begins with it, itself or one that continues it.
        hits: sequences whose prefix was found up to just here.
        last: nothing continues it.
    """

    namespace: Namespace
    end: int
    tokens: int
    block: int | None
    below: int
    hits: int
    last: bool


class PrefixIndex(Protocol):
    """Finds blocks by the tokens they and all blocks before them hold."""

    def match(self, tokens: Sequence[int], namespace: Namespace, limit: int) -> Match:
        """The longest stored prefix of `tokens[:limit]`; changes nothing."""
        ...

    def used(self, match: Match) -> None:
        """A sequence goes on from `match`: it is counted, and what is copied is young."""
        ...

    def insert(self, cursor: Cursor, tokens: Sequence[int], block: int) -> int:
        """Stores a full block of committed tokens after `cursor`, and moves the cursor.

        Returns:
            The block that now stands for these tokens: another than `block` where an equal
            one was stored before, which the caller then holds in its stead. So whoever
            holds a stored block holds all stored blocks before it.
        """
        ...

    def insert_tail(self, cursor: Cursor, tokens: Sequence[int], block: int) -> None:
        """Stores the last block of a sequence, partly filled with committed tokens, where
        the index can use one. Nobody writes to it any more, and its one holder is about to
        let go."""
        ...

    def keep(self, block: int, priority: int, until: float | None) -> None:
        """Sets the eviction priority of a stored block until a time; None is for good."""
        ...

    def at(self, now: float) -> None:
        """It is `now`, seconds on the clock by which priorities run out."""
        ...

    def held(self, block: int) -> None:
        """A stored block has got its first holder."""
        ...

    def unheld(self, block: int) -> None:
        """A stored block has lost its last holder; of a sequence, the last block first."""
        ...

    def evict(self) -> int:
        """Takes out and returns the unheld block that goes first: see `EvictionOrder`.
        There must be an unheld block."""
        ...

    def clear(self) -> list[int]:
        """Takes out everything; returns the blocks that were unheld."""
        ...

    def prefix(self, block: int) -> tuple[Namespace, list[int]]:
        """Namespace and tokens up to the end of a stored block; O(their number)."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """All that is stored, in no order; O(stored blocks). Nothing may change meanwhile."""
        ...

    def check(self) -> None:
        """Raises `AssertionError` where the structure contradicts itself."""
        ...

    @property
    def num_unheld(self) -> int:
        """Stored blocks that nobody holds."""
        ...

    def __contains__(self, block: int) -> bool: ...

    def __len__(self) -> int:
        """Stored blocks."""
        ...


class NoIndex:
    """The index of an engine without a prefix cache: it finds and stores nothing."""

    num_unheld = 0

    def match(self, tokens: Sequence[int], namespace: Namespace, limit: int) -> Match:
        return Match(0, [], Cursor(namespace))

    def used(self, match: Match) -> None:
        """Nothing is found, so nothing is used."""

    def insert(self, cursor: Cursor, tokens: Sequence[int], block: int) -> int:
        cursor.blocks += 1
        return block

    def insert_tail(self, cursor: Cursor, tokens: Sequence[int], block: int) -> None:
        """Nothing is stored."""

    def keep(self, block: int, priority: int, until: float | None) -> None:
        raise AssertionError(f"block {block} can't be stored here")

    def at(self, now: float) -> None:
        """Nothing runs out."""

    def held(self, block: int) -> None:
        raise AssertionError(f"block {block} can't be stored here")

    def unheld(self, block: int) -> None:
        raise AssertionError(f"block {block} can't be stored here")

    def evict(self) -> int:
        raise AssertionError("nothing is stored here")

    def clear(self) -> list[int]:
        return []

    def prefix(self, block: int) -> tuple[Namespace, list[int]]:
        raise AssertionError(f"block {block} can't be stored here")

    def pieces(self) -> Iterator[Piece]:
        return iter(())

    def check(self) -> None:
        """Nothing is stored, so nothing can be wrong."""

    def __contains__(self, block: int) -> bool:
        return False

    def __len__(self) -> int:
        return 0
