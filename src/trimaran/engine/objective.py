"""The objective Σ w·(α·TTFT + β·TPOT + γ·ITL) over the requests of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimaran.core.outputs import RequestMetrics
from trimaran.core.slo import SloClass


@dataclass(slots=True)
class ClassTally:
    """Sums over the requests of one SLO class that were answered; times in seconds.

    Attributes:
        requests: how many.
        cost: Σ w·(α·TTFT + β·TPOT + γ·ITL).
        ttft, tpot, itl: sums of them.
        kept: requests that kept all targets of the class.
    """

    requests: int = 0
    cost: float = 0.0
    ttft: float = 0.0
    tpot: float = 0.0
    itl: float = 0.0
    kept: int = 0


@dataclass(slots=True)
class Objective:
    """Adds up what each answered request cost; those aborted or failed are not in it.

    Attributes:
        classes: by the name of the SLO class.
    """

    classes: dict[str, ClassTally] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The objective: the lower, the better."""
        return sum(tally.cost for tally in self.classes.values())

    @property
    def requests(self) -> int:
        return sum(tally.requests for tally in self.classes.values())

    @property
    def attainment(self) -> float:
        """Share of the requests that kept their class's targets; 1 where there were none."""
        kept = sum(tally.kept for tally in self.classes.values())
        return kept / self.requests if self.requests else 1.0

    def add(self, slo: SloClass, metrics: RequestMetrics) -> float:
        """Takes in a request that was answered; what it cost."""
        ttft = metrics.ttft or 0.0
        tpot, itl = metrics.tpot, metrics.itl
        cost = slo.cost(ttft, tpot, itl)
        tally = self.classes.setdefault(slo.name, ClassTally())
        tally.requests += 1
        tally.cost += cost
        tally.ttft += ttft
        tally.tpot += tpot
        tally.itl += itl
        in_time = slo.ttft is None or ttft <= slo.ttft
        tally.kept += in_time and (slo.tpot is None or tpot <= slo.tpot)
        return cost
