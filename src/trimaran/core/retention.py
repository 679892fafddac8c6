"""How long a request wants its prompt to stay in the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimaran.core.errors import ParameterError

DEFAULT_PRIORITY = 35
"""Of blocks nobody asked anything for, as in TensorRT-LLM."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Which cached blocks are given up first when blocks are needed.

    It holds for the blocks of the request's prompt from when the request lets go of them.
    Lower priorities go first, and the least recently used within one; a block never goes
    before those that continue it. Of several requests that used a block, the last one that
    has a retention decides. Nothing is kept from a request that needs the memory: a high
    priority goes last, but it goes.

    Attributes:
        priority: 0 (first to go) to 100; without a retention it is 35.
        seconds: after so long the priority is the default again; None is never.

    Raises:
        ParameterError: a value is out of range.
    """

    priority: int = DEFAULT_PRIORITY
    seconds: float | None = None

    def __post_init__(self) -> None:
        priority, seconds = self.priority, self.seconds
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 100:
            raise ParameterError(
                "retention",
                f"retention's priority is {priority!r}; give a whole number from 0 to 100",
            )
        if seconds is None:
            return
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not math.isfinite(seconds) or seconds <= 0:
            raise ParameterError(
                "retention",
                f"retention's seconds are {seconds!r}; give a number above 0, or None for no end",
            )
