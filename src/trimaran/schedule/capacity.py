"""Who may hold blocks: what is reserved at admission, and who gives back when they run out."""

from __future__ import annotations

from collections.abc import Sequence as Row
from typing import Protocol

from trimaran.core.errors import ConfigError
from trimaran.core.request import Sequence


class Capacity(Protocol):
    """Decides over blocks."""

    def reserve(self, sequence: Sequence) -> int:
        """Tokens for which there must be blocks before `sequence` is admitted."""
        ...

    def victim(self, running: Row[Sequence], needy: Sequence) -> Sequence:
        """Who is preempted so that `needy` gets a block; may be `needy` itself.

        Args:
            running: in order of admission; not empty.
        """
        ...


class MaxUtilization:
    """Admits what fits now; the last admitted gives its blocks back and computes again.

    Formula: reserve = tokens known so far; victim = the last of those that run.
    Cost: O(1).
    Faults: outputs grow into memory that was given away, so under pressure work is thrown
    away (what the prefix index still has is found again) and a preempted sequence's next
    token is late. In return the cache is never idle for fear of what may come, and the
    first admitted always goes on.
    """

    def reserve(self, sequence: Sequence) -> int:
        return sequence.total

    def victim(self, running: Row[Sequence], needy: Sequence) -> Sequence:
        return running[-1]


def make_capacity(name: str) -> Capacity:
    """The capacity policy of that name (`EngineConfig.capacity`).

    Raises:
        ConfigError: there is none.
    """
    if name == "max-utilization":
        return MaxUtilization()
    raise ConfigError(f"capacity is '{name}'; give 'max-utilization'")
