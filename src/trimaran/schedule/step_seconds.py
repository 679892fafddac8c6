"""How long computing tokens takes, measured on the steps that ran."""

from __future__ import annotations

from typing import Protocol

FEW_TOKENS = 32
"""A step with fewer says little about prefill: most of its time goes into reading weights."""

_GUESS = 1e-3
_SHARE = 0.2


class PrefillCost(Protocol):
    """Predicts the time of prefill."""

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds to compute `tokens` tokens of one sequence."""
        ...


class MeasuredPrefill:
    """Seconds a token, as a mean over steps with prefill, the later ones weighing more.

    Formula: c += 0.2 · (step seconds / step rows - c); seconds(n) = c · n.
    Cost: O(1).
    Faults: knows nothing of the context's length, nor of decodes in the same step; before the
    first such step a guess of 1 ms a token.
    """

    def __init__(self) -> None:
        self._seconds = _GUESS
        self._measured = False

    def observe(self, prefill_tokens: int, rows: int, seconds: float) -> None:
        """A step of `rows` tokens, `prefill_tokens` of them prefill, has taken so long."""
        if prefill_tokens >= FEW_TOKENS and seconds > 0:
            share = _SHARE if self._measured else 1.0
            self._seconds += share * (seconds / rows - self._seconds)
            self._measured = True

    def prefill_seconds(self, tokens: int) -> float:
        return self._seconds * tokens
