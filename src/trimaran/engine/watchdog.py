"""Notices a step that doesn't return, and a scheduler that gets nowhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trimaran.engine.core import EngineCore
from trimaran.engine.doing import Doing

OnHang = Callable[[Doing, float], None]
OnStall = Callable[[float], None]


class Watchdog:
    """A thread that looks at what the engine's thread is doing, several times a timeout.

    - A hang: it is still at the same thing, a step or a decision, after the timeout.
    - A stall: there is work, and for the timeout no step has brought any request further.

    Time is counted in its own looks, so a machine that slept or a process that was stopped is
    no hang. Native code can't be interrupted: what to do about it is the owner's business.
    """

    def __init__(
        self, core: EngineCore, timeout: float, on_hang: OnHang, on_stall: OnStall
    ) -> None:
        """
        Args:
            timeout: seconds.
            on_hang: called once for each hang, with what hangs and for how long.
            on_stall: called with how long, and again after each further timeout.
        """
        self._core = core
        self._timeout = timeout
        self._on_hang = on_hang
        self._on_stall = on_stall
        self._interval = min(1.0, timeout / 5)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trimaran-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops looking; doesn't wait."""
        self._end.set()

    def _run(self) -> None:
        core, interval = self._core, self._interval
        doing: Doing | None = None
        progress = core.progress
        held = stalled = 0.0
        while not self._end.wait(interval):
            last, doing = doing, core.doing
            if doing is not None and doing is last:
                held += interval
                if held >= self._timeout > held - interval:
                    self._on_hang(doing, held)
                continue
            held = 0.0
            if core.has_work and core.progress == progress:
                stalled += interval
                if stalled >= self._timeout:
                    self._on_stall(stalled)
                    stalled = 0.0
            else:
                stalled, progress = 0.0, core.progress
