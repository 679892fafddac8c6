"""What a request's class expects of its latency, and what missing it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimaran.core.errors import ParameterError


@dataclass(frozen=True, slots=True)
class SloClass:
    """Targets and weights of a class of requests; all times in seconds.

    A request's cost is weight · (alpha · TTFT + beta · TPOT + gamma · ITL), of which the sum
    over all requests is the objective that policies are compared by. TTFT is the time from
    arrival to the first token, TPOT the mean time between two tokens after it, ITL the longest
    one. With the default alpha and beta a cost is the seconds until the hundred and first
    token has come, and with gamma the longest halt on the way counts once more.

    Attributes:
        name: how requests call it.
        ttft: target of the time to the first token, or None.
        tpot: target of the time an output token takes, or None; `fine` chunking keeps it.
        alpha, beta, gamma: what a second of TTFT, TPOT and ITL costs.
        weight: of the class against others; `weighted-shortest` serves by it.

    Raises:
        ParameterError: a value is out of range.
    """

    name: str
    ttft: float | None = None
    tpot: float | None = None
    alpha: float = 1.0
    beta: float = 100.0
    gamma: float = 1.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        for field in ("ttft", "tpot"):
            value = getattr(self, field)
            if value is not None and not (_number(value) and value > 0):
                raise ParameterError(
                    "slo", f"{field} of SLO class '{self.name}' is {value!r}; give seconds above 0"
                )
        for field in ("alpha", "beta", "gamma"):
            value = getattr(self, field)
            if not (_number(value) and value >= 0):
                raise ParameterError(
                    "slo", f"{field} of SLO class '{self.name}' is {value!r}; give at least 0"
                )
        if not (_number(self.weight) and 1e-6 <= self.weight <= 1e6):
            raise ParameterError(
                "slo",
                f"weight of SLO class '{self.name}' is {self.weight!r}; give 0.000001 to 1000000",
            )

    def cost(self, ttft: float, tpot: float, itl: float) -> float:
        """What a request of this class with these times costs."""
        return self.weight * (self.alpha * ttft + self.beta * tpot + self.gamma * itl)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


INTERACTIVE = SloClass("interactive", ttft=0.5, tpot=0.03, weight=4.0)
STANDARD = SloClass("standard", ttft=2.0, tpot=0.1)
BATCH = SloClass("batch", gamma=0.0, weight=0.25)

SLO_CLASSES = {each.name: each for each in (INTERACTIVE, STANDARD, BATCH)}
"""Those every engine knows; targets as MLPerf Inference 5.1 has them for Llama-3.1-8B."""


def slo_class(value: str | SloClass) -> SloClass:
    """A class by its name, or the class itself.

    Raises:
        ParameterError: no class has this name.
    """
    if isinstance(value, SloClass):
        return value
    found = SLO_CLASSES.get(value) if isinstance(value, str) else None
    if found is None:
        raise ParameterError(
            "slo", f"slo is {value!r}; give one of {', '.join(SLO_CLASSES)}, or an SloClass"
        )
    return found
