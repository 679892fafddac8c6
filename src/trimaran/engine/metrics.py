"""What an engine counts while it runs, in Prometheus' forms; names as in `trimaran:*`."""

from __future__ import annotations

from bisect import bisect_left

from trimaran.engine.objective import Objective

_SECONDS = tuple(
    digit * 10.0**power for power in (-5, -4, -3, -2, -1, 0) for digit in (1.0, 2.0, 5.0)
)
"""Upper bounds from 10 microseconds to 5 seconds."""

_TOKENS = (1.0, *(8.0 * 2.0**power for power in range(12)))
"""Upper bounds from 1 to 16384 tokens; those of vLLM's `iteration_tokens_total`."""


class Histogram:
    """Counts values by upper bound. One thread writes; any may read.

    Attributes:
        bounds: ascending; a value equal to a bound falls below it.
        counts: one a bound, then those above the last; not cumulated.
        count, sum: of all values.
    """

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.sum += value

    def quantile(self, share: float) -> float:
        """The bound below which this share of the values lies; infinite above the last."""
        wanted = share * self.count
        below = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            below += count
            if below >= wanted:
                return bound
        return float("inf")


class EngineMetrics:
    """Counters and histograms of one engine, since its start.

    Attributes:
        steps: forwards that were run.
        schedule_seconds: deciding on one step and making its plan.
        compute_gap_seconds: from the end of one forward to the start of the next, where work
            was there all the time.
        step_interval_seconds: from the start of one forward to that of the next, likewise.
        step_tokens: rows of a step, of prompts and of sequences that generate.
        generated_tokens: sampled, those of requests that were then aborted too.
        rejections: requests refused for the limits on waiting ones, by reason.
        failures: requests that the watchdog ended, by reason.
        objective: what the requests that were answered cost, by their SLO classes.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.generated_tokens = 0
        self.step_tokens = Histogram(_TOKENS)
        self.schedule_seconds = Histogram()
        self.compute_gap_seconds = Histogram()
        self.step_interval_seconds = Histogram()
        self.rejections: dict[str, int] = {}
        self.failures: dict[str, int] = {}
        self.objective = Objective()
        self._begun: float | None = None
        self._ended: float | None = None

    def forward_begins(self, now: float) -> None:
        """A forward begins."""
        if self._ended is not None and self._begun is not None:
            self.compute_gap_seconds.observe(now - self._ended)
            self.step_interval_seconds.observe(now - self._begun)
        self._begun, self._ended = now, None

    def forward_ended(self, now: float) -> None:
        """The forward that began has ended."""
        self.steps += 1
        self._ended = now

    def idle(self) -> None:
        """There was nothing to compute: what follows is no gap."""
        self._begun = self._ended = None
