"""Gives sequences the blocks they need, and finds those whose content exists already."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimaran.cache.block_pool import BlockPool
from trimaran.cache.block_table import BlockTable, TableMatrix
from trimaran.cache.content import StoredBlocks
from trimaran.cache.hash_index import HashIndex
from trimaran.cache.prefix_index import Cursor, Match, NoIndex, PrefixIndex
from trimaran.core.request import Sequence

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Blocks by state (free + held + cached = total), and prefix hits since the start.

    Attributes:
        queried_tokens: tokens of sequences that were looked up when they were admitted.
        hit_tokens: those of them that were found.
    """

    total: int
    free: int
    held: int
    cached: int
    queried_tokens: int
    hit_tokens: int


@dataclass(slots=True, eq=False)
class Reserved:
    """Blocks that continue a stored prefix and are filled by another than a step.

    Attributes:
        blocks: those of the prefix, then the reserved ones.
        cursor: where the prefix ends in the index.
        start: how many of the blocks are the prefix's.
    """

    blocks: list[int]
    cursor: Cursor
    start: int


class KVCacheManager:
    """Block tables of the running sequences over one pool and one prefix index.

    A sequence has a table from `admit` or `fork` until `release`. KV of
    `tokens[:computed]` lies in its blocks; blocks of uncomputed positions are its own.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        prefix_cache: whether equal prefixes are found and shared.
        index: the index to use instead of a `HashIndex`.
        content: is told which full blocks are stored, used and given up.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool = True,
        *,
        index: PrefixIndex | None = None,
        content: StoredBlocks | None = None,
    ) -> None:
        if index is None:
            index = HashIndex(block_size) if prefix_cache else NoIndex()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = index
        self.content = content
        self.pool = BlockPool(num_blocks, index, None if content is None else content.remove)
        self._reserved: set[Reserved] = set()
        self._tables: dict[Sequence, BlockTable] = {}
        self._matrix = TableMatrix()
        self._copies: list[tuple[int, int]] = []
        self._rows_of: list[Sequence] = []
        self._rows: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        self._queried = self._hit = 0

    # ------------------------------------------------------------------ sequences

    def match(self, sequence: Sequence) -> Match:
        """The longest stored prefix of a sequence that has no table; changes nothing.

        At least one token is left over, so that there is a row to sample from.
        """
        return self.index.match(
            sequence.tokens, sequence.request.cache_salt, len(sequence.tokens) - 1
        )

    def match_up_to(self, sequence: Sequence, tokens: int) -> Match:
        """The longest stored prefix of the sequence's first `tokens` tokens."""
        return self.index.match(sequence.tokens, sequence.request.cache_salt, tokens)

    def no_match(self, sequence: Sequence) -> Match:
        """The empty prefix: for a sequence whose every row is wanted."""
        return self.index.match((), sequence.request.cache_salt, 0)

    def admit(self, sequence: Sequence, match: Match, up_to: int) -> bool:
        """Gives a sequence a table that begins with `match` and has blocks for positions
        below `up_to`; or changes nothing and returns False where there aren't enough."""
        pool = self.pool
        fresh = max(0, self.blocks_for(up_to) - len(match.blocks))
        resting = sum(pool.references(block) == 0 for block in match.blocks)
        if fresh > pool.available - resting:
            return False
        for block in match.blocks:
            pool.retain(block)
        added = pool.allocate(fresh)
        assert added is not None
        blocks = match.blocks + added
        table = self._open(sequence, blocks, match)
        self._matrix.writable[table.row] = len(blocks) * self.block_size
        self._queried += len(sequence.tokens)
        self._hit += match.tokens
        if self.content is not None:
            self.content.use(match.blocks)
        return True

    def allocate(self, sequence: Sequence, up_to: int) -> bool:
        """Makes positions `sequence.computed` to `up_to` - 1 writable: adds blocks, and
        replaces one that others hold too or that is indexed (see `take_copies`).

        Returns:
            False, and nothing has changed, where there aren't enough blocks.
        """
        table = self._tables[sequence]
        if up_to <= self._matrix.writable[table.row]:
            return True
        length, wanted = len(table.blocks), self.blocks_for(up_to)
        foreign = self._foreign(table, sequence.computed // self.block_size, wanted)
        fresh = self.pool.allocate(max(0, wanted - length) + len(foreign))
        if fresh is None:
            return False
        for place in foreign:
            copied = place * self.block_size < sequence.computed
            self._replace(table, place, fresh.pop(), copied)
        self._matrix.extend(table.row, length, fresh)
        table.blocks.extend(fresh)
        self._matrix.writable[table.row] = wanted * self.block_size
        return True

    def commit(self, sequence: Sequence, computed: int) -> None:
        """The KV of `tokens[:computed]` is in the cache now, and the tokens are certain:
        full blocks among them are indexed."""
        table = self._tables[sequence]
        size, cursor = self.block_size, table.cursor
        while (cursor.blocks + 1) * size <= computed:
            place = cursor.blocks
            block = table.blocks[place]
            if self._store(cursor, table.blocks, sequence.tokens) != block:
                self._matrix.extend(table.row, place, [table.blocks[place]])

    def _store(self, cursor: Cursor, blocks: list[int], tokens: Tokens[int]) -> int:
        """Indexes the block after `cursor`; the one that stands in its place now."""
        place, size = cursor.blocks, self.block_size
        block = blocks[place]
        own = tokens[place * size : (place + 1) * size]
        stands = self.index.insert(cursor, own, block)
        if stands != block:  # computed twice at the same time; one copy is enough
            self.pool.retain(stands)
            self.pool.release(block)
            blocks[place] = stands
        if self.content is not None and stands in self.index:
            self.content.add(stands, blocks[place - 1] if place else None, own, cursor.salt)
        return stands

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child` a table of the parent's computed blocks; the first of the two that
        writes into a block they share gets a copy of it."""
        table = self._tables[parent]
        shared = table.blocks[: self.blocks_for(parent.computed)]
        for block in shared:
            self.pool.retain(block)
        match = Match(parent.computed, list(shared), table.cursor.copy())
        opened = self._open(child, match.blocks, match)
        self._matrix.writable[[table.row, opened.row]] = parent.computed

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence's table away; unknown ones are ignored.

        The last block is released first, so that a prefix outlives what continues it.
        """
        table = self._tables.pop(sequence, None)
        if table is None:
            return
        if self._copies:
            own = set(table.blocks)
            self._copies = [copy for copy in self._copies if copy[1] not in own]
        for block in reversed(table.blocks):
            self.pool.release(block)
        self._matrix.give_back(table.row, len(table.blocks))
        self._rows_of = []

    # ------------------------------------------------------------------ from a lower tier

    def reserve(self, match: Match, count: int) -> Reserved | None:
        """Holds a stored prefix of full blocks, and `count` blocks to be filled after it; or
        changes nothing and returns None where there aren't enough."""
        pool = self.pool
        resting = sum(pool.references(block) == 0 for block in match.blocks)
        if count > pool.available - resting:
            return None
        for block in match.blocks:
            pool.retain(block)
        fresh = pool.allocate(count)
        assert fresh is not None
        reserved = Reserved(match.blocks + fresh, match.cursor, len(match.blocks))
        self._reserved.add(reserved)
        return reserved

    def settle(self, reserved: Reserved, tokens: Tokens[int], filled: int) -> None:
        """Indexes the first `filled` of the reserved blocks, which hold the KV of `tokens`,
        and lets go of all."""
        self._reserved.remove(reserved)
        for _ in range(filled):
            self._store(reserved.cursor, reserved.blocks, tokens)
        for block in reversed(reserved.blocks):
            self.pool.release(block)

    # ------------------------------------------------------------------ for a step's plan

    def rows(self, sequences: list[Sequence]) -> npt.NDArray[np.intp]:
        """[S] rows of the sequences' tables in the matrix; kept while they stay the same."""
        if sequences != self._rows_of or not sequences:
            tables = self._tables
            self._rows = np.array([tables[sequence].row for sequence in sequences], np.intp)
            self._rows_of = list(sequences)
        return self._rows

    def short(self, sequences: list[Sequence], ends: Int32) -> list[int]:
        """Places in `sequences` of those that need `allocate` to be written up to `ends`."""
        writable = self._matrix.writable[self.rows(sequences)]
        places: list[int] = (writable < ends).nonzero()[0].tolist()
        return places

    def tables(self, sequences: list[Sequence], width: int) -> Int32:
        """int32 [S, width] block tables (a copy), padded with -1."""
        found = self._matrix.blocks[:, :width][self.rows(sequences)]
        if found.shape[1] < width:
            raise AssertionError(f"tables of {width} blocks wanted, none is so long")
        return found

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, target) blocks to copy before anything is written, since the last call.

        In order: a later target may be an earlier source, so a back end copies one after
        the other, or reads all sources first.
        """
        copies, self._copies = self._copies, []
        return copies

    # ------------------------------------------------------------------ state

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def block_table(self, sequence: Sequence) -> list[int]:
        """The sequence's blocks in order of position (a copy); none before `admit`."""
        table = self._tables.get(sequence)
        return [] if table is None else list(table.blocks)

    def usage(self) -> CacheUsage:
        """Blocks by state and prefix hits so far."""
        pool = self.pool
        return CacheUsage(
            total=pool.num_blocks,
            free=pool.num_free,
            held=pool.num_held,
            cached=pool.num_cached,
            queried_tokens=self._queried,
            hit_tokens=self._hit,
        )

    def reset_prefix_cache(self) -> None:
        """Forgets every stored prefix. Sequences that run go on with what they hold, which
        isn't indexed any more."""
        self.pool.clear_index()
        for holder in self._holders():
            holder.cursor.closed = True
        if self.content is not None:
            self.content.clear()

    def check(self) -> None:
        """Raises `AssertionError` where counts, tables, matrix and index disagree."""
        self.pool.check(holder.blocks for holder in self._holders())
        self._check_content()
        rows = [table.row for table in self._tables.values()]
        if len(set(rows)) != len(rows):
            raise AssertionError("two tables have one row")
        for sequence, table in self._tables.items():
            row = self._matrix.blocks[table.row]
            length = len(table.blocks)
            if row[:length].tolist() != table.blocks or (row[length:] != -1).any():
                raise AssertionError(f"the row of {sequence.id} differs from its table")
            if length * self.block_size < sequence.computed:
                raise AssertionError(f"{sequence.id} lacks blocks for what it has computed")
        used = set(rows)
        for number in range(len(self._matrix.blocks)):
            if number not in used and (self._matrix.blocks[number] != -1).any():
                raise AssertionError(f"row {number} is unused but not empty")

    def _holders(self) -> list[BlockTable | Reserved]:
        return [*self._tables.values(), *self._reserved]

    def _check_content(self) -> None:
        if self.content is None:
            return
        for stored in self.content:
            if stored.block not in self.index:
                raise AssertionError(f"block {stored.block} has a digest, but isn't indexed")
        if len({stored.digest for stored in self.content}) != len(self.content):
            raise AssertionError("two stored blocks have one digest")

    # ------------------------------------------------------------------ parts

    def _open(self, sequence: Sequence, blocks: list[int], match: Match) -> BlockTable:
        if sequence in self._tables:
            raise AssertionError(f"{sequence.id} has a table already")
        table = BlockTable(self._matrix.take_row(), blocks, match.cursor)
        self._matrix.extend(table.row, 0, blocks)
        self._tables[sequence] = table
        return table

    def _foreign(self, table: BlockTable, first: int, stop: int) -> list[int]:
        """Places of the table in [first, stop) whose blocks are not its own alone."""
        blocks = table.blocks
        if first >= len(blocks):
            return []
        return [
            place
            for place in range(first, min(stop, len(blocks)))
            if self.pool.references(blocks[place]) > 1 or blocks[place] in self.index
        ]

    def _replace(self, table: BlockTable, place: int, new: int, copied: bool) -> None:
        old = table.blocks[place]
        if copied:
            self._copies.append((old, new))
        self.pool.release(old)
        table.blocks[place] = new
        self._matrix.extend(table.row, place, [new])
