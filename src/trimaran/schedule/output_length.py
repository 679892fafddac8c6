"""How many tokens an output will have, learnt from those that ended."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

_WINDOW = 256
_PRIOR_LENGTH = 128  # what is believed before anything was seen, with the weight of some outputs
_PRIOR_WEIGHT = 4
_REFRESH = 16


class OutputLengths:
    """The mean of min(length, limit) over the outputs of late.

    Formula: S(t), the share of outputs longer than t, is the product over the lengths l <= t
    at which outputs ended by themselves of 1 - ended(l) / at_risk(l) (Kaplan and Meier,
    Nonparametric estimation from incomplete observations, 1958), so that an output cut off by
    its limit says that it was longer, and not that it ended there. The expectation for a limit
    m is the sum of S(t) for 0 <= t < m. The last 256 outputs count, and four of 128 tokens.
    Cost: O(1) an output, O(log 256) a question, and a sort of 256 once in 16 outputs.
    Faults: one distribution for all requests, whatever they ask.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, bool]] = deque(maxlen=_WINDOW)
        self._new = 0
        self._ends: list[int] = []  # of pieces on which S is constant
        self._sums: list[float] = []  # of S up to each end
        self._tail = 0.0  # S after the last one
        self._fit()

    def observe(self, length: int, ended: bool) -> None:
        """An output had `length` tokens; it ended by itself, or was cut off there."""
        self._seen.append((length, ended))
        self._new += 1
        if self._new >= _REFRESH or len(self._seen) < _REFRESH:
            self._fit()

    def expected(self, limit: int) -> float:
        """Tokens to expect of an output that is cut off at `limit`, at least 1."""
        place = bisect_right(self._ends, limit)
        start = self._ends[place - 1] if place else 0
        before = self._sums[place - 1] if place else 0.0
        if place < len(self._ends):
            slope = (self._sums[place] - before) / (self._ends[place] - start)
        else:
            slope = self._tail
        return max(1.0, before + slope * (limit - start))

    def _fit(self) -> None:
        self._new = 0
        seen = sorted([*self._seen, *[(_PRIOR_LENGTH, True)] * _PRIOR_WEIGHT])
        self._ends, self._sums = [], []
        share, total, start, at = 1.0, 0.0, 0, 0
        while at < len(seen):
            length, at_risk, ended = seen[at][0], len(seen) - at, 0
            while at < len(seen) and seen[at][0] == length:
                ended += seen[at][1]
                at += 1
            if length > start:
                total += share * (length - start)
                self._ends.append(length)
                self._sums.append(total)
                start = length
            share *= 1.0 - ended / at_risk
        self._tail = share
