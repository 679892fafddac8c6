"""`block_size="auto"`: the size of a KV block, from the model and the lengths it serves.

Large blocks cost less to find, to copy and to walk: the kernels work on tiles of 32 positions,
and a table is shorter. Small ones waste less: of each sequence's last block (B - 1) / 2 tokens
stand empty on average, so of sequences of L tokens the share

    waste(B) = ((B - 1) / 2) / (L + (B - 1) / 2)

The largest size whose waste stays below 3 % is taken (a healthy cache is below 5 %, and what
is shared in full blocks is lost with large ones too). What nobody has measured yet is taken
to be short: 16.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.core.config import BLOCK_SIZES
from trimaran.engine.lengths import Lengths

MOST_WASTE = 0.03
ENOUGH = 32
"""Sequences from which lengths are believed."""
UNKNOWN = 16


@dataclass(frozen=True, slots=True)
class BlockSize:
    """A size and why.

    Attributes:
        tokens: of a block.
        reason: a line for the log.
    """

    tokens: int
    reason: str


def choose_block_size(lengths: Lengths, window: int = 0) -> BlockSize:
    """The size of a block for a model.

    Args:
        lengths: of the sequences it served before.
        window: positions that its smallest sliding window sees, 0 without one: of such layers
            no more than a window is ever held, so that is what a block wastes of.
    """
    if lengths.count < ENOUGH:
        return BlockSize(
            UNKNOWN,
            f"block size {UNKNOWN}: the lengths of only {lengths.count:.0f} sequences are known",
        )
    mean = lengths.mean
    live = min(mean, window) if window else mean
    fitting = [size for size in BLOCK_SIZES if size and waste(size, live) <= MOST_WASTE]
    size = max(fitting, default=min(size for size in BLOCK_SIZES if size))
    seen = f", of which a window sees {window}" if window and window < mean else ""
    return BlockSize(
        size,
        f"block size {size}: {lengths.count:.0f} sequences had {mean:.0f} tokens on average"
        f" (median {lengths.quantile(0.5)}){seen}; {100 * waste(size, live):.1f} % of held"
        f" blocks will be empty, of at most {100 * MOST_WASTE:.0f}",
    )


def waste(size: int, length: float) -> float:
    """Share of the held tokens that stand empty with blocks of `size` and sequences of
    `length` tokens."""
    empty = (size - 1) / 2
    return empty / (length + empty)
