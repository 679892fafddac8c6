"""The deltas of one request, for a caller on any thread."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from trimaran.core.errors import RequestFailedError
from trimaran.core.outputs import SequenceDelta
from trimaran.core.request import Request
from trimaran.engine.collector import sequences_left
from trimaran.engine.thread import EngineThread


class DeltaStream(Iterator[SequenceDelta]):
    """A request that was handed in: it computes whether it is read or not. Closing it, or
    letting go of it, before its end aborts it."""

    def __init__(self, thread: EngineThread, request: Request) -> None:
        """
        Raises:
            RequestError: the request could never be served.
            EngineClosedError: the engine takes no requests any more.
        """
        self._unfinished = 0
        self._thread = thread
        self._id = request.id
        self._inbox: queue.SimpleQueue[list[SequenceDelta]] = queue.SimpleQueue()
        self._deltas: Iterator[SequenceDelta] = iter(())
        thread.submit(request, self._inbox.put)
        self._unfinished = request.params.n

    def __next__(self) -> SequenceDelta:
        """The next delta.

        Raises:
            RequestFailedError: the request failed while running.
        """
        while True:
            for delta in self._deltas:
                self._unfinished = sequences_left(self._unfinished, delta)
                if delta.error is not None:
                    raise RequestFailedError(f"request '{self._id}' failed: {delta.error}")
                return delta
            if not self._unfinished:
                raise StopIteration
            self._deltas = iter(self._inbox.get())

    def close(self) -> None:
        """Aborts the request where it hasn't ended; may be called twice."""
        if self._unfinished:
            self._unfinished = 0
            self._deltas = iter(())
            self._thread.abort(self._id)

    def __del__(self) -> None:
        self.close()
