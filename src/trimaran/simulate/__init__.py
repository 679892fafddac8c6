"""Replaying a trace on a virtual clock: the very same engine over a back end of arithmetic.

    trace ──▶ Replay ──▶ EngineCore ──▶ Scheduler, KVCacheManager: the real ones
                             │
                             └──▶ SimulatedBackend: moves the clock by what a step costs

Nothing is computed, so an hour of traffic takes seconds, and with the costs that a real
engine's `StepCostModel` has learnt the times are those of that machine. A real back end
behind `PacedBackend` makes the same decisions on the same trace, which tests hold it to.
"""
