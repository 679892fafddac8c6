"""What an engine is at, for the watchdog to tell."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.schedule.step import ScheduledStep


@dataclass(frozen=True, slots=True, eq=False)
class Doing:
    """What the engine is at: "scheduling", or "computing" or "sampling" a step."""

    what: str
    step: ScheduledStep | None = None
