"""What one step of the engine computes, as arrays that a back end executes.

    sequence        A           B       C
    row           0 1 2 3 4  |  5   |  6 7        tokens, positions, slots: one a row
    row_starts    0             5      6    8     sequence s has rows row_starts[s:s+2]
    context       position of the sequence's last row + 1

A row is one token not yet in the KV cache. There is no prefill and no decode here: a
prompt chunk is a sequence with many rows, a decode is a sequence with one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def _no_copies() -> Int32:
    return np.zeros((0, 2), np.int32)


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where the keys and values of a further group of layers lie (see `StepPlan`).

    Attributes:
        slots, block_tables, copies: as in `StepPlan`, of blocks of the group's own. Places in
            `block_tables` before what a window of the group's layers still sees are -1.
    """

    slots: Int32
    block_tables: Int32
    copies: Int32


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work. All arrays are C-contiguous int32.

    Attributes:
        tokens: [T] token ids; rows of one sequence are adjacent, in order of position.
        positions: [T] absolute positions, consecutive within a sequence.
        slots: [T] where each row's K and V are written: `block * block_size + offset`.
        row_starts: [S + 1] first row of each sequence, then T.
        contexts: [S] tokens of the sequence in the cache once the step has run.
        block_tables: [S, W] physical blocks in order of position, padded with -1.
        logit_rows: [R] rows whose logits are wanted, ascending.
        copies: [C, 2] (source, target) blocks copied, in all layers, before any row is
            written: copy-on-write of blocks that several sequences hold.
        more: where a model's layers are in groups (`Backend.layer_groups`) whose keys and
            values are held apart: the tables of each group after the first. Where it is
            empty, one table is that of all layers.
    """

    tokens: Int32
    positions: Int32
    slots: Int32
    row_starts: Int32
    contexts: Int32
    block_tables: Int32
    logit_rows: Int32
    copies: Int32 = field(default_factory=_no_copies)
    more: tuple[GroupTables, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def sequences(self) -> int:
        return len(self.contexts)


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Hidden rows of a step (after the final norm, one a row of the step) to be added up.

    Attributes:
        rows: int32 [P, 2] the first row, and the one after the last; C-contiguous.
        sums: float64 [P, width] to which they are added, one after the other in order, so that
            it makes no difference in how many steps a prompt is computed; C-contiguous.
    """

    rows: Int32
    sums: Float64
