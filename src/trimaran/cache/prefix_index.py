"""What an index of committed prefixes does; who holds a block is the pool's business.

Where does a new kind of index go? It implements `PrefixIndex`. The pool tells it when the
last table lets go of one of its blocks (`unheld`) and when a table takes one up again
(`held`); it alone decides which unheld block is given up next (`evict`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True, eq=False)
class Cursor:
    """Where the committed tokens of one sequence end in an index.

    Attributes:
        salt: of the sequence; prefixes are shared only within a salt.
        place: the index's own mark of the last committed block; None is the root.
        blocks: committed blocks so far, found or inserted.
        closed: nothing more can be inserted after it: a hash collided, or the index was
            cleared under the sequence.
    """

    salt: str
    place: object | None = None
    blocks: int = 0
    closed: bool = False

    def copy(self) -> Cursor:
        """For a sequence that goes on from the same place."""
        return Cursor(self.salt, self.place, self.blocks, self.closed)


@dataclass(frozen=True, slots=True)
class Match:
    """A stored prefix of a sequence; valid until the next allocation.

    Attributes:
        tokens: length of the prefix.
        blocks: that hold its KV, in order of position.
        cursor: from where the sequence goes on.
    """

    tokens: int
    blocks: list[int] = field(default_factory=list)
    cursor: Cursor = field(default_factory=lambda: Cursor(""))


class PrefixIndex(Protocol):
    """Finds blocks by the tokens they and all blocks before them hold."""

    def match(self, tokens: Sequence[int], salt: str, limit: int) -> Match:
        """The longest stored prefix of `tokens[:limit]` under `salt`; changes nothing."""
        ...

    def insert(self, cursor: Cursor, tokens: Sequence[int], block: int) -> int:
        """Stores a full block of committed tokens after `cursor`, and moves the cursor.

        Returns:
            The block that now stands for these tokens: another than `block` where an equal
            one was stored before, which the caller then holds in its stead. So whoever
            holds a stored block holds all stored blocks before it.
        """
        ...

    def held(self, block: int) -> None:
        """A stored block has got its first holder."""
        ...

    def unheld(self, block: int) -> None:
        """A stored block has lost its last holder; of a sequence, the last block first."""
        ...

    def evict(self) -> int:
        """Takes out and returns the least recently used unheld block that no stored one
        continues. There must be an unheld block."""
        ...

    def clear(self) -> list[int]:
        """Takes out everything; returns the blocks that were unheld."""
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

    def match(self, tokens: Sequence[int], salt: str, limit: int) -> Match:
        return Match(0, [], Cursor(salt))

    def insert(self, cursor: Cursor, tokens: Sequence[int], block: int) -> int:
        cursor.blocks += 1
        return block

    def held(self, block: int) -> None:
        raise AssertionError(f"block {block} can't be stored here")

    def unheld(self, block: int) -> None:
        raise AssertionError(f"block {block} can't be stored here")

    def evict(self) -> int:
        raise AssertionError("nothing is stored here")

    def clear(self) -> list[int]:
        return []

    def check(self) -> None:
        """Nothing is stored, so nothing can be wrong."""

    def __contains__(self, block: int) -> bool:
        return False

    def __len__(self) -> int:
        return 0
