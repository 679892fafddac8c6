"""How a step's token budget is shared out."""

from __future__ import annotations

from typing import Protocol


class Chunking(Protocol):
    """Decides how many of its uncomputed tokens each sequence computes in a step."""

    def share(self, wants: list[int], budget: int) -> list[int]:
        """A new list, one count a sequence in their order: 0 <= count <= want, at most
        `budget` in all, and the first one that wants anything gets at least one token.

        Args:
            wants: uncomputed tokens of each sequence.
            budget: tokens left in this step, at least one.
        """
        ...


class FixedChunk:
    """Each in turn gets what it wants, up to `size` tokens, until the budget is used up.

    Formula: count = min(want, size, budget left).
    Cost: O(1) a sequence; a few nanoseconds where everybody gets all.
    Faults: a step with a chunk takes as long as a full one whatever the decodes in it can
    bear, so the time between tokens is bounded by the size and not by a target; one long
    prompt uses up the budget for the prompts behind it.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def share(self, wants: list[int], budget: int) -> list[int]:
        if sum(wants) <= min(budget, self.size):
            return wants.copy()
        counts = []
        for want in wants:
            count = min(want, self.size, budget)
            budget -= count
            counts.append(count)
        return counts
