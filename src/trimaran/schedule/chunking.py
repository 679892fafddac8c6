"""How a step's token budget is shared out."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


class Chunking(Protocol):
    """Decides how many of its uncomputed tokens each sequence computes in a step.

    A step is a call of `begin`, then `share` for those that run, then `admit` for each that
    might be admitted. Arrays that are handed in are not written to.

    Attributes:
        prompts_first: those that wait have the budget before those that run, unless somebody
            that runs got nothing in the step before.
    """

    prompts_first: bool

    def begin(self, starts: Int32, wants: Int32, targets: Float64, joined: int) -> bool:
        """A new step; returns whether those that wait may be admitted in it.

        Args:
            starts: [R] tokens computed of each that runs.
            wants: [R] uncomputed tokens of each.
            targets: [R] seconds that an output token of each may take, or inf.
            joined: how many were admitted in the step before.
        """
        ...

    def share(self, starts: Int32, wants: Int32, budget: int) -> Int32:
        """One count for each that runs, in the order in which it is their turn: 0 <= count
        <= want, and the first one that wants anything gets at least one token.

        Args:
            budget: tokens left in this step, at least one; the counts' sum may only exceed
                it where a single sequence is served.
        """
        ...

    def admit(self, start: int, want: int, budget: int, alone: bool) -> int:
        """How many of its `want` tokens one that waits would compute if it was admitted now;
        0: it is not to be admitted in this step. At least one where it is `alone`.

        Args:
            start: tokens that the prefix cache has of it.
            budget: tokens left in this step, at least one.
            alone: nobody else is in the step so far.
        """
        ...


class FixedChunk:
    """Each in turn gets what it wants, up to `size` tokens, until the budget is used up.

    Formula: count = min(want, size, budget left).
    Cost: a few array operations, and a Python loop only where not everybody gets all.
    Faults: a step with a chunk takes as long as a full one whatever the decodes in it can
    bear, so the time between tokens is bounded by the size and not by a target; one long
    prompt uses up the budget for the prompts behind it.
    """

    prompts_first = False

    def __init__(self, size: int) -> None:
        self.size = size

    def begin(self, starts: Int32, wants: Int32, targets: Float64, joined: int) -> bool:
        return True

    def share(self, starts: Int32, wants: Int32, budget: int) -> Int32:
        return within(np.minimum(wants, np.int32(self.size)), budget)

    def admit(self, start: int, want: int, budget: int, alone: bool) -> int:
        return min(want, self.size, budget)


def within(counts: Int32, budget: int) -> Int32:
    """The counts in their order as far as their sum stays within `budget`."""
    if int(counts.sum()) <= budget:
        return counts
    ends = np.minimum(np.cumsum(counts), budget)
    return np.diff(ends, prepend=0).astype(np.int32)
