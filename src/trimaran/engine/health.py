"""Whether an engine serves, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """How an engine is.

    Attributes:
        ok: it takes requests.
        reason: why not; empty where it does.
    """

    ok: bool
    reason: str = ""
