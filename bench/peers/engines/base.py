"""What every engine under measurement can do. Only the standard library is imported here:
each engine runs in an environment of its own."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Arrivals(NamedTuple):
    """When the first and the last token reached the caller, and how many there were."""

    first: float
    last: float
    tokens: int

    @classmethod
    def of(cls, times: list[float]) -> Arrivals:
        """From the moment of each token."""
        return cls(times[0], times[-1], len(times))


class Settings(NamedTuple):
    """What all engines are given alike.

    Attributes:
        sequences: requests that may run at once.
        context: tokens of the longest sequence.
        threads: compute threads.
    """

    sequences: int
    context: int
    threads: int


class Engine(Protocol):
    """Greedy, no stop at the end of sequence, prefixes reused where the engine can.

    An engine is made from (path of the model in its format, Settings, its own options);
    options it doesn't know are left in the dictionary, and refused by the caller.
    """

    def describe(self) -> dict[str, Any]: ...

    def stream(self, prompt: list[int], tokens: int) -> Arrivals:
        """One request; stamped where a caller gets the tokens."""
        ...

    def batch(self, prompts: list[list[int]], tokens: list[int]) -> int:
        """All requests at once, each with its number of tokens; how many came out in all."""
        ...
