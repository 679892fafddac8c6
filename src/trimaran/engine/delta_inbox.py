"""Where one request's deltas arrive in an event loop."""

from __future__ import annotations

import asyncio

from trimaran.core.errors import RequestFailedError
from trimaran.core.outputs import RequestMetrics, SequenceDelta
from trimaran.core.request import FinishReason, Request
from trimaran.engine.collector import sequences_left


class DeltaInbox:
    """Deltas that have come and were not taken, and what was seen of those that were.

    Attributes:
        request: as it was handed in.
        tokens: generated so far, of all its sequences.
        metrics: its times, once a delta has come.
        finish_reason: of the sequence that ended last; ERROR where the request failed.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = 0
        self.metrics: RequestMetrics | None = None
        self.finish_reason: FinishReason | None = None
        self._queue: asyncio.Queue[SequenceDelta] = asyncio.Queue()
        self._unfinished = request.params.n
        self._failure: str | None = None

    @property
    def ended(self) -> bool:
        """Whether every sequence's last delta has been taken."""
        return self._unfinished == 0

    async def ready(self) -> list[SequenceDelta]:
        """What has come since the last call, waiting for at least one delta; empty at the end.

        Raises:
            RequestFailedError: the request failed while running.
        """
        if not self._unfinished:
            return []
        found = [await self._queue.get()]
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        for delta in found:
            self._unfinished = sequences_left(self._unfinished, delta)
            self.tokens += len(delta.token_ids)
            self.metrics = delta.metrics or self.metrics
            self.finish_reason = delta.finish_reason or self.finish_reason
            error = self._failure or delta.error
            if error is not None:
                self._unfinished = 0
                self.finish_reason = FinishReason.ERROR
                raise RequestFailedError(f"request '{self.request.id}' failed: {error}")
        return found
