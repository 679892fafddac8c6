"""Whether one more request may wait, and when to come again if not."""

from __future__ import annotations

from collections import deque

from trimaran.core.errors import BusyError

_REMEMBERED = 64  # ends of requests by which the rate is measured
_UNKNOWN_SECONDS = 1.0  # before any request has ended
_LONGEST_SECONDS = 600.0


class Admission:
    """The limit on waiting requests. A request that finds a free seat never counts as waiting.

    Formula: with w requests waiting beyond the free seats, limit m and r requests ending in a
    second, measured over the last 64 ends and up to now, the retry hint is (w - m + 1) / r
    seconds: about then, so many will have been served that one fits.
    """

    def __init__(self, max_waiting: int | None, seats: int) -> None:
        self._limit = max_waiting
        self._seats = seats
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)

    def ended(self, now: float) -> None:
        """A request has ended."""
        self._ends.append(now)

    def has_room(self, waiting: int, running: int) -> bool:
        """Whether `check` would let one more pass."""
        return self._limit is None or self._beyond(waiting, running) < self._limit

    def _beyond(self, waiting: int, running: int) -> int:
        """Of those that wait, how many have no seat to come to."""
        return waiting - max(0, self._seats - running)

    def check(self, waiting: int, running: int, now: float) -> None:
        """Raises `BusyError` where one more would have to wait and may not.

        Args:
            waiting: requests, those just handed in with them.
            running: sequences.
        """
        if self._limit is None or self.has_room(waiting, running):
            return
        beyond = self._beyond(waiting, running)
        seconds = self._seconds(beyond - self._limit + 1, now)
        error = BusyError(
            f"the engine is busy: {max(0, beyond)} requests wait and max_waiting is"
            f" {self._limit}; try again in about {seconds:.1f} seconds"
        )
        error.retry_after = seconds
        raise error

    def _seconds(self, excess: int, now: float) -> float:
        ends = self._ends
        if len(ends) < 2 or now <= ends[0]:
            return _UNKNOWN_SECONDS
        rate = len(ends) / (now - ends[0])
        return min(_LONGEST_SECONDS, max(0.1, excess / rate))
