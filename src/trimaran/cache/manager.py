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
from trimaran.cache.inspection import CacheReport, hottest_of, namespaces_of
from trimaran.cache.prefix_index import Cursor, Match, NoIndex, PrefixIndex
from trimaran.cache.window_group import WindowGroup
from trimaran.core.request import Sequence
from trimaran.core.retention import Retention

Int32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Blocks by state (free + held + cached = total), and prefix hits since the start.

    Attributes:
        queried_tokens: tokens of sequences that were looked up when they were first admitted.
        hit_tokens: those of them that were found.
        resumed_tokens: found again by sequences that came back after preemption.
    """

    total: int
    free: int
    held: int
    cached: int
    queried_tokens: int
    hit_tokens: int
    resumed_tokens: int

    @property
    def hit_rate(self) -> float:
        """Of the tokens looked up, the share that was found; 0 before the first."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


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

    more: tuple[WindowGroup, ...] = ()
    """Groups of layers with tables of their own, beside those that `tables` are of."""

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
        self._by_row: dict[int, BlockTable] = {}
        self._matrix = TableMatrix()
        self._copies: list[tuple[int, int]] = []
        self._queried = self._hit = self._resumed = 0
        self._now = 0.0
        self._forked = False  # since the last time that forks were seen to share no last block

    def at(self, now: float) -> None:
        """It is `now`, seconds on the scheduler's clock: what was to be kept until then isn't
        any more."""
        self._now = now
        self.index.at(now)

    # ------------------------------------------------------------------ sequences

    def match(self, sequence: Sequence) -> Match:
        """The longest stored prefix of a sequence that has no table; changes nothing.

        At least one token is left over, so that there is a row to sample from.
        """
        return self.index.match(
            sequence.tokens, sequence.request.namespace, len(sequence.tokens) - 1
        )

    def match_up_to(self, sequence: Sequence, tokens: int) -> Match:
        """The longest stored prefix of the sequence's first `tokens` tokens."""
        return self.index.match(sequence.tokens, sequence.request.namespace, tokens)

    def no_match(self, sequence: Sequence) -> Match:
        """The empty prefix: for a sequence whose every row is wanted."""
        return self.index.match((), sequence.request.namespace, 0)

    def admit(self, sequence: Sequence, match: Match, up_to: int, rows: int | None = None) -> bool:
        """Gives a sequence a table that begins with `match` and has blocks for positions
        below `up_to`; or changes nothing and returns False where there aren't enough.

        The partial part of the match is copied into a block of its own (see `take_copies`).
        The source isn't held: even where it is evicted for this sequence or another of the
        same step, it is read before anything is written.

        Args:
            up_to: above `match.tokens`.
            rows: tokens that the next step computes: layers with windows (`GroupedKVCache`)
                need blocks for these alone.
        """
        pool = self.pool
        fresh = max(0, self.blocks_for(up_to) - len(match.blocks))
        resting = sum(pool.references(block) == 0 for block in match.blocks)
        if fresh > pool.available - resting:
            return False
        self.index.used(match)
        for block in match.blocks:
            pool.retain(block)
        added = pool.allocate(fresh)
        assert added is not None
        if match.source is not None and match.source != added[0]:
            self._copies.append((match.source, added[0]))
        blocks = match.blocks + added
        table = self._open(sequence, blocks, match)
        self._matrix.writable[table.row] = len(blocks) * self.block_size
        if self.content is not None:
            self.content.use(match.blocks)
        if sequence.preemptions:
            self._resumed += match.tokens
        else:
            self._queried += len(sequence.tokens)
            self._hit += match.tokens
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
            self._replace(table, place, fresh.pop(), sequence.computed)
        self._matrix.extend(table.row, length, fresh)
        table.blocks.extend(fresh)
        self._matrix.writable[table.row] = wanted * self.block_size
        return True

    def allocate_next(self, rows: Rows, computed: Int32) -> bool:
        """Gives each of the tables at `rows` one block more, for the position after its
        `computed` tokens: what `allocate` does for the next position, for all at once.

        Returns:
            False, and nothing has changed, where a table needs another thing (a block of its
            own in place of a shared one), or where there aren't enough blocks.
        """
        matrix = self._matrix
        lengths = matrix.lengths[rows]
        if (lengths * self.block_size != computed).any():
            return False
        fresh = self.pool.allocate(len(rows))
        if fresh is None:
            return False
        tables = self._by_row
        for row, block in zip(rows.tolist(), fresh, strict=True):
            tables[row].blocks.append(block)
        matrix.append(rows, lengths, fresh, computed + np.int32(self.block_size))
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
            self.content.add(stands, blocks[place - 1] if place else None, own, cursor.namespace)
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
        self._forked = True

    def release(self, sequence: Sequence, *, sound: bool = True) -> None:
        """Takes a sequence's table away; unknown ones are ignored.

        Its last, partly filled block is stored too. The last block is released first, so
        that a prefix outlives what continues it.

        Args:
            sound: that block may be stored; not after a step of the sequence failed.
        """
        table = self._tables.pop(sequence, None)
        if table is None:
            return
        if self._copies:
            own = set(table.blocks)
            self._copies = [copy for copy in self._copies if copy[1] not in own]
        if sound and sequence.computed > table.copied:
            self._store_tail(table, sequence)
        if sequence.request.retention is not None:
            self._keep_prompt(table, sequence, sequence.request.retention)
        for block in reversed(table.blocks):
            self.pool.release(block)
        self._matrix.give_back(table.row, len(table.blocks))
        del self._by_row[table.row]

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

    def row(self, sequence: Sequence) -> int:
        """Row of a sequence's table in the matrix: the same from `admit` or `fork` on until
        `release`."""
        return self._tables[sequence].row

    def short(self, rows: Rows, ends: Int32) -> Rows:
        """Places in `rows` of the tables that need `allocate` to be written up to `ends`."""
        return (self._matrix.writable[rows] < ends).nonzero()[0]

    def tables(self, rows: Rows, width: int) -> Int32:
        """int32 [S, width] block tables (a copy), padded with -1."""
        found = self._matrix.blocks[:, :width][rows]
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
            resumed_tokens=self._resumed,
        )

    def live_tokens(self, rows: Rows, computed: Int32) -> int:
        """Tokens whose KV lies in held blocks; those of a block that several hold count once.

        What is not live in a held block is behind a sequence's last computed token: the rest of
        its last block, blocks that were allocated ahead, and blocks that a lower tier fills.

        Args:
            rows: [R] of all the tables.
            computed: [R] tokens of each whose KV is in the cache.
        """
        size, matrix = self.block_size, self._matrix
        unfilled = int(matrix.lengths[rows].sum()) * size - int(computed.sum())
        if self._forked:  # forks share a partly filled block until they write into it
            filled = computed % size
            partial = filled.nonzero()[0]
            last = matrix.blocks[rows[partial], computed[partial] // size]
            rest = size - filled[partial]
            _, first = np.unique(last, return_index=True)
            unfilled -= int(rest.sum()) - int(rest[first].sum())
            self._forked = len(first) < len(last)
        for reserved in self._reserved:
            unfilled += (len(reserved.blocks) - reserved.start) * size
        return self.pool.num_held * size - unfilled

    def inspect(self, top: int = 10) -> CacheReport:
        """What the prefix cache holds now, with the `top` hottest prefixes; O(stored blocks):
        about a second for a million."""
        usage = self.usage()
        return CacheReport(
            self.block_size,
            usage.total,
            usage.free,
            usage.held,
            usage.cached,
            usage.queried_tokens,
            usage.hit_tokens,
            usage.hit_rate,
            namespaces_of(self.index),
            hottest_of(self.index, top),
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
            if (
                row[:length].tolist() != table.blocks
                or (row[length:] != -1).any()
                or (self._matrix.lengths[table.row] != length)
            ):
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
        table = BlockTable(self._matrix.take_row(), blocks, match.cursor, match.tokens)
        self._matrix.extend(table.row, 0, blocks)
        self._tables[sequence] = self._by_row[table.row] = table
        return table

    def _store_tail(self, table: BlockTable, sequence: Sequence) -> None:
        """Stores the partly filled last block, where nobody else goes on from it."""
        place, filled = divmod(sequence.computed, self.block_size)
        if filled and place == table.cursor.blocks:
            block = table.blocks[place]
            if self.pool.references(block) == 1 and block not in self.index:
                tokens = sequence.tokens[sequence.computed - filled : sequence.computed]
                self.index.insert_tail(table.cursor, tokens, block)

    def _keep_prompt(self, table: BlockTable, sequence: Sequence, retention: Retention) -> None:
        until = None if retention.seconds is None else self._now + retention.seconds
        for block in table.blocks[: self.blocks_for(sequence.prompt_length)]:
            if block in self.index:
                self.index.keep(block, retention.priority, until)

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

    def _replace(self, table: BlockTable, place: int, new: int, computed: int) -> None:
        old = table.blocks[place]
        if place * self.block_size < computed:
            self._copies.append((old, new))
            table.copied = computed
        self.pool.release(old)
        table.blocks[place] = new
        self._matrix.extend(table.row, place, [new])
