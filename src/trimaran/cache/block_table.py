"""Block tables: which blocks hold a sequence's KV, in order of position.

All tables lie as rows of one int32 matrix as well, so that a step's tables are one gather:

                 position / block_size
                 0    1    2    3
    row 0     [  7,   2,   9,  -1 ]   a sequence of three blocks
    row 1     [ -1,  -1,  -1,  -1 ]   unused
    row 2     [  7,   4,  -1,  -1 ]   shares its first block with row 0
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimaran.cache.prefix_index import Cursor

Int32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]


class BlockTable:
    """One sequence's blocks.

    Attributes:
        row: of the matrix that mirrors it.
        blocks: physical blocks in order of position.
        cursor: where its committed tokens end in the prefix index.
        copied: tokens computed when its last block came to be a copy; more than these are
            computed once a step has run, and only then the copy is known to be made.
    """

    __slots__ = ("blocks", "copied", "cursor", "row")

    def __init__(self, row: int, blocks: list[int], cursor: Cursor, copied: int) -> None:
        self.row = row
        self.blocks = blocks
        self.cursor = cursor
        self.copied = copied


class TableMatrix:
    """The rows of all tables; grows by doubling, rows are used again.

    Attributes:
        blocks: int32 [rows, width], -1 where there is no block.
        lengths: int32 [rows] blocks in each row.
        writable: int32 [rows]; positions from the first uncomputed one up to here can be
            written without asking for a block.
    """

    def __init__(self, rows: int = 16, width: int = 16) -> None:
        self.blocks: Int32 = np.full((rows, width), -1, np.int32)
        self.lengths: Int32 = np.zeros(rows, np.int32)
        self.writable: Int32 = np.zeros(rows, np.int32)
        self._unused = list(range(rows - 1, -1, -1))

    def take_row(self) -> int:
        """An empty row."""
        if not self._unused:
            rows, width = self.blocks.shape
            self.blocks = np.concatenate([self.blocks, np.full((rows, width), -1, np.int32)])
            self.lengths = np.concatenate([self.lengths, np.zeros(rows, np.int32)])
            self.writable = np.concatenate([self.writable, np.zeros(rows, np.int32)])
            self._unused = list(range(2 * rows - 1, rows - 1, -1))
        return self._unused.pop()

    def give_back(self, row: int, length: int) -> None:
        """Empties a row that had `length` blocks."""
        self.blocks[row, :length] = -1
        self.lengths[row] = self.writable[row] = 0
        self._unused.append(row)

    def append(self, rows: Rows, lengths: Int32, blocks: list[int], writable: Int32) -> None:
        """Puts one block into each of `rows` after its `lengths` blocks."""
        self._widen(int(lengths.max()) + 1)
        self.blocks[rows, lengths] = blocks
        self.lengths[rows] = lengths + np.int32(1)
        self.writable[rows] = writable

    def extend(self, row: int, start: int, blocks: list[int]) -> None:
        """Puts `blocks` into the row from place `start` on."""
        end = start + len(blocks)
        self._widen(end)
        self.lengths[row] = max(self.lengths[row], end)
        if len(blocks) == 1:  # the usual case, without making an array
            self.blocks[row, start] = blocks[0]
        elif blocks:
            self.blocks[row, start:end] = blocks

    def _widen(self, wanted: int) -> None:
        rows, width = self.blocks.shape
        if wanted > width:
            wider = np.full((rows, max(wanted, 2 * width)), -1, np.int32)
            wider[:, :width] = self.blocks
            self.blocks = wider
