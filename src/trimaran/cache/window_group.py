"""Block tables of the layers that see a window of positions.

    position / block_size     0    1    2    3    4    5
    blocks                 [ -1,  -1,   9,   4,   7,   2 ]
                             gone      |<- window ->| next rows

Whenever a block is full, those that end before the window of the next row are let go: they
stay cached for others while there is room, and a prefix is found there if the blocks of its
last window are.

Blocks held by a sequence that computes `c` tokens in a step: at most
ceil((window - 1 + c) / block_size) + 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trimaran.cache.block_pool import BlockPool
from trimaran.cache.block_table import Rows, TableMatrix
from trimaran.cache.window_index import Digest, WindowIndex, block_digests, first_digest
from trimaran.core.request import Sequence

Int32 = npt.NDArray[np.int32]

GONE = -1
"""In place of a block that lies before the window."""


@dataclass(slots=True, eq=False)
class WindowTable:
    """One sequence's blocks.

    Attributes:
        row: of the matrix that mirrors it.
        blocks: by position; the first ones are `GONE`.
        first: how many are.
        digest: of the committed full blocks.
        committed: how many full blocks are committed.
        closed: no more of its blocks are indexed: the index was cleared under it.
    """

    row: int
    blocks: list[int]
    first: int
    digest: Digest
    committed: int
    closed: bool = False

    def held(self) -> list[int]:
        """The blocks that it holds, in order of position."""
        return self.blocks[self.first :]


@dataclass(slots=True)
class _Found:
    """Digests of the prefix that was last looked for."""

    sequence: Sequence | None = None
    digests: list[Digest] = field(default_factory=list)


class WindowGroup:
    """Tables over a pool of their own. `admit`, `fork` and `release` are called in the same
    order as those of the other groups of a cache, so that a sequence has the same row in all.

    Args:
        window: positions that a row sees, its own included.
        num_blocks: in the pool.
        block_size: tokens in a block.
        prefix_cache: whether blocks outside of windows stay to be found again.
        most_rows: tokens of one sequence in a step, at most.
    """

    def __init__(
        self, window: int, num_blocks: int, block_size: int, prefix_cache: bool, most_rows: int
    ) -> None:
        self.window = window
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = WindowIndex()
        self.pool = BlockPool(num_blocks, self.index)  # type: ignore[arg-type]
        self.matrix = TableMatrix()
        self._prefix_cache = prefix_cache
        self._most_rows = most_rows
        self._tables: dict[Sequence, WindowTable] = {}
        self._copies: list[tuple[int, int]] = []
        self._found = _Found()
        self._now = 0.0

    # ------------------------------------------------------------------ sequences

    def hit(self, sequence: Sequence, tokens: int) -> int:
        """Of a prefix of `tokens` tokens, the longest beginning in whole blocks whose last
        window is stored; never more than `tokens`. O(tokens)."""
        digests = self._digests(sequence, tokens)
        stored, run = [0], 0  # how many blocks up to here are stored without a gap
        for digest in digests:
            run = run + 1 if self.index.find(digest) is not None else 0
            stored.append(run)
        for end in range(len(digests), 0, -1):
            if stored[end] >= end - self._first_place(end * self.block_size):
                return end * self.block_size
        return 0

    def lacks(self, sequence: Sequence, start: int, up_to: int, rows: int | None = None) -> bool:
        """Whether there are too few blocks to `admit`."""
        kept = self._stored(sequence, start)
        resting = sum(self.pool.references(block) == 0 for block in kept)
        fresh = self._end_place(start, up_to, rows) - self._first_place(start) - len(kept)
        return fresh > self.pool.available - resting

    def admit(self, sequence: Sequence, start: int, up_to: int, rows: int | None = None) -> int:
        """Gives a sequence a table from the stored prefix of `start` tokens on; its row.

        There are blocks then for the next step: for positions below `up_to`, of the next
        `rows` (by default those of any step) tokens.
        """
        kept = self._stored(sequence, start)
        for block in kept:
            self.pool.retain(block)
        first = self._first_place(start)
        added = self.pool.allocate(self._end_place(start, up_to, rows) - first - len(kept))
        assert added is not None
        digests = self._digests(sequence, start)
        table = WindowTable(
            self.matrix.take_row(),
            [GONE] * first + kept + added,
            first,
            digests[-1] if digests else first_digest(sequence.request.namespace),
            len(digests),
        )
        self._open(sequence, table)
        self.matrix.writable[table.row] = len(table.blocks) * self.block_size
        return table.row

    def needs(self, sequence: Sequence, up_to: int) -> int:
        """How many blocks `allocate` takes from the pool."""
        table = self._tables[sequence]
        if up_to <= self.matrix.writable[table.row]:
            return 0
        wanted = self._blocks_for(up_to)
        shared = self._shared(table, sequence.computed // self.block_size, wanted)
        return max(0, wanted - len(table.blocks)) + len(shared)

    def allocate(self, sequence: Sequence, up_to: int) -> None:
        """Makes positions `sequence.computed` to `up_to` - 1 writable; see `needs`."""
        table = self._tables[sequence]
        if up_to <= self.matrix.writable[table.row]:
            return
        wanted, length = self._blocks_for(up_to), len(table.blocks)
        shared = self._shared(table, sequence.computed // self.block_size, wanted)
        fresh = self.pool.allocate(max(0, wanted - length) + len(shared))
        assert fresh is not None
        for place in shared:
            old, new = table.blocks[place], fresh.pop()
            if place * self.block_size < sequence.computed:
                self._copies.append((old, new))
            self.pool.release(old)
            self._put(table, place, new)
        self.matrix.extend(table.row, length, fresh)
        table.blocks.extend(fresh)
        self.matrix.writable[table.row] = len(table.blocks) * self.block_size

    def commit(self, sequence: Sequence, computed: int) -> None:
        """The KV of `tokens[:computed]` is in the cache now, and the tokens are certain: full
        blocks among them are indexed, and those before the window are let go."""
        table, size = self._tables[sequence], self.block_size
        start = table.committed * size
        for digest in block_digests(table.digest, sequence.tokens[:computed], start, size):
            self._store(table, table.committed, digest)
            table.digest = digest
            table.committed += 1
        first = self._first_place(computed)
        if first > table.first:
            self._keep(table, sequence, first)
            for place in range(table.first, first):
                self.pool.release(table.blocks[place])
                table.blocks[place] = GONE
            self.matrix.blocks[table.row, table.first : first] = GONE
            table.first = first

    def fork(self, parent: Sequence, child: Sequence) -> int:
        """Gives `child` a table of the parent's computed blocks; its row."""
        table = self._tables[parent]
        blocks = table.blocks[: self._blocks_for(parent.computed)]
        for block in blocks[table.first :]:
            self.pool.retain(block)
        row = self.matrix.take_row()
        opened = WindowTable(row, blocks, table.first, table.digest, table.committed, table.closed)
        self._open(child, opened)
        self.matrix.writable[[table.row, row]] = parent.computed
        return row

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence's table away; unknown ones are ignored."""
        table = self._tables.pop(sequence, None)
        if table is None:
            return
        if self._copies:
            own = set(table.held())
            self._copies = [copy for copy in self._copies if copy[1] not in own]
        self._keep(table, sequence, len(table.blocks))
        for block in reversed(table.held()):
            self.pool.release(block)
        self.matrix.give_back(table.row, len(table.blocks))

    def at(self, now: float) -> None:
        """It is `now`, seconds on the scheduler's clock."""
        self._now = now
        self.index.at(now)

    # ------------------------------------------------------------------ for a step's plan

    def row(self, sequence: Sequence) -> int:
        """Row of a sequence's table in the matrix."""
        return self._tables[sequence].row

    def tables(self, rows: Rows, width: int) -> Int32:
        """int32 [S, width] block tables (a copy), `GONE` before windows and behind the end."""
        found = self.matrix.blocks[:, :width][rows]
        if found.shape[1] < width:
            raise AssertionError(f"tables of {width} blocks wanted, none is so long")
        return found

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, target) blocks to copy before anything is written, since the last call."""
        copies, self._copies = self._copies, []
        return copies

    # ------------------------------------------------------------------ state

    def block_table(self, sequence: Sequence) -> list[int]:
        """The sequence's blocks by position (a copy); none before `admit`."""
        table = self._tables.get(sequence)
        return [] if table is None else list(table.blocks)

    def reset(self) -> None:
        """Forgets every stored prefix."""
        self.pool.clear_index()
        for table in self._tables.values():
            table.closed = True

    def check(self) -> None:
        """Raises `AssertionError` where counts, tables, matrix and index disagree, or where a
        table lacks a block of its window or holds one before it."""
        self.pool.check(table.held() for table in self._tables.values())
        for sequence, table in self._tables.items():
            row, length = self.matrix.blocks[table.row], len(table.blocks)
            if row[:length].tolist() != table.blocks or (row[length:] != -1).any():
                raise AssertionError(f"the row of {sequence.id} differs from its table")
            if length * self.block_size < sequence.computed:
                raise AssertionError(f"{sequence.id} lacks blocks for what it has computed")
            gone = [block == GONE for block in table.blocks]
            if gone != [place < table.first for place in range(length)]:
                raise AssertionError(f"{sequence.id} has gaps among its blocks")
            if table.first > self._first_place(sequence.computed):
                raise AssertionError(f"{sequence.id} lacks blocks of its window")

    # ------------------------------------------------------------------ parts

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _first_place(self, position: int) -> int:
        """The first block that a row at `position`, or one after it, sees."""
        return max(0, position - self.window + 1) // self.block_size

    def _end_place(self, start: int, up_to: int, rows: int | None) -> int:
        rows = self._most_rows if rows is None else rows
        return self._blocks_for(max(start, min(up_to, start + rows)))

    def _digests(self, sequence: Sequence, tokens: int) -> list[Digest]:
        """Of the full blocks of the first `tokens` tokens."""
        count, found = tokens // self.block_size, self._found
        if found.sequence is not sequence or len(found.digests) < count:
            digests = block_digests(
                first_digest(sequence.request.namespace),
                sequence.tokens[:tokens],
                0,
                self.block_size,
            )
            self._found = found = _Found(sequence, digests)
        return found.digests[:count]

    def _stored(self, sequence: Sequence, start: int) -> list[int]:
        """The blocks of the last window of a stored prefix."""
        digests = self._digests(sequence, start)[self._first_place(start) :]
        blocks = [self.index.find(digest) for digest in digests]
        if None in blocks or start % self.block_size:
            raise AssertionError(f"{sequence.id}: no prefix of {start} tokens is stored")
        return [block for block in blocks if block is not None]

    def _open(self, sequence: Sequence, table: WindowTable) -> None:
        if sequence in self._tables:
            raise AssertionError(f"{sequence.id} has a table already")
        self.matrix.extend(table.row, 0, table.blocks)
        self._tables[sequence] = table

    def _store(self, table: WindowTable, place: int, digest: Digest) -> None:
        block = table.blocks[place]
        if table.closed or not self._prefix_cache:
            return
        stands = self.index.insert(digest, block)
        if stands != block:  # computed twice; one copy is enough
            self.pool.retain(stands)
            self.pool.release(block)
            self._put(table, place, stands)

    def _keep(self, table: WindowTable, sequence: Sequence, stop: int) -> None:
        """Blocks before place `stop` are about to be let go: those of the prompt's last window
        are kept as long as the request asks for."""
        retention = sequence.request.retention
        if retention is None:
            return
        until = None if retention.seconds is None else self._now + retention.seconds
        end = sequence.prompt_length // self.block_size
        begin = max(table.first, self._first_place(end * self.block_size))
        for block in table.blocks[begin : min(end, stop)]:
            if block in self.index:
                self.index.keep(block, retention.priority, until)

    def _put(self, table: WindowTable, place: int, block: int) -> None:
        table.blocks[place] = block
        self.matrix.extend(table.row, place, [block])

    def _shared(self, table: WindowTable, first: int, stop: int) -> list[int]:
        """Places of the table in [first, stop) whose blocks are not its own alone."""
        blocks = table.blocks
        return [
            place
            for place in range(max(first, table.first), min(stop, len(blocks)))
            if self.pool.references(blocks[place]) > 1 or blocks[place] in self.index
        ]
