"""Runs the step loop on a thread of its own, for callers on any thread."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from trimaran.core.errors import EngineClosedError
from trimaran.core.outputs import SequenceDelta
from trimaran.core.request import FinishReason, Request
from trimaran.engine.assembly import Event
from trimaran.engine.core import EngineCore
from trimaran.engine.generation import LiveRequest
from trimaran.engine.side_thread import SideThread

_SWITCH_SECONDS = 1e-4
_STALLED_SECONDS = 0.01  # then a step is tried again, whoever forgot to wake the thread

T = TypeVar("T")

Sink = Callable[[list[SequenceDelta]], None]
"""Gets a request's deltas of one step, on the engine's thread; must be quick and not raise."""


class EngineThread:
    """Owns an `EngineCore`; every method may be called from any thread.

    Between steps the thread takes what callers want (submit, abort) from an inbox; with
    nothing to do it sleeps on it. Should the loop itself die, every request ends with the
    reason and later ones are refused with it.

    While the back end computes a step, a second thread makes the deltas of the step before and
    delivers them (see `engine/assembly.py`). A process that is forked from this one doesn't
    have the thread: there requests are refused, and an engine of its own is to be made.
    """

    def __init__(self, core: EngineCore, *, overlap: bool = True) -> None:
        """With `overlap` false nothing is done while the back end computes."""
        self.core = core
        self._events: list[Event] = []  # of the last step and since, not yet delivered
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sinks: dict[LiveRequest, Sink] = {}
        self._closing = False
        self._death: str | None = None
        self._lock = threading.Lock()
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
        self._process = os.getpid()
        core.wake = lambda: self._inbox.put(_nothing)
        self._aside = SideThread("trimaran-text") if overlap else None
        self._thread = threading.Thread(target=self._run, name="trimaran-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a step in native code must not outlive the interpreter

    def submit(self, request: Request, sink: Sink) -> None:
        """Hands a request in; `sink` gets all of its deltas, the last with a finish reason.

        Raises:
            RequestError: the request could never be served.
            EngineClosedError: the engine takes no requests any more, or not in this process.
        """
        self._hand_in(request, sink, complete=True)

    def open(self, request: Request, sink: Sink) -> None:
        """Hands a request in whose prompt still arrives, by `extend` and `complete`.

        Raises:
            RequestError, EngineClosedError: as `submit`.
        """
        self._hand_in(request, sink, complete=False)

    def extend(self, request_id: str, ids: list[int]) -> None:
        """More tokens of an open request's prompt; see `EngineCore.extend`."""
        self._inbox.put(lambda: self._events.extend(self.core.extend(request_id, ids)))

    def complete(self, request_id: str, ids: list[int], *, anew: bool = False) -> None:
        """The last tokens of an open request's prompt; see `EngineCore.complete`."""
        self._inbox.put(lambda: self._events.extend(self.core.complete(request_id, ids, anew=anew)))

    def abort(self, request_id: str) -> None:
        """Ends a request and frees what it holds before the next step; harmless when it has
        ended. Its sink gets the finish reason ABORT."""
        self._inbox.put(lambda: self._events.extend(self.core.abort(request_id)))

    def call(self, function: Callable[[EngineCore], None]) -> None:
        """Runs `function` on the engine's thread between two steps, some time soon."""
        self._inbox.put(lambda: function(self.core))

    def ask(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """What `function` returns or raises on the engine's thread, between two steps.

        Raises:
            EngineClosedError: the engine has ended, or isn't in this process.
        """
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function(self.core))
            except Exception as error:  # the asker's, not the engine's
                answer.set_exception(error)

        self._enter(run)
        return answer

    def close(self) -> None:
        """Ends every request, stops the thread, frees the back end; may be called twice."""
        if self._forked():  # nothing of it runs here, and its lock may have been held
            return
        with self._lock:
            self._closing = True
        atexit.unregister(self.close)
        self._inbox.put(_nothing)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._death is None and not self._closing and not self._forked()

    def _hand_in(self, request: Request, sink: Sink, complete: bool) -> None:
        self._refuse_if_forked()
        self.core.check(request, complete=complete)
        self._enter(lambda: self._add(request, sink, complete))

    def _enter(self, job: Callable[[], None]) -> None:
        """Puts into the inbox what is sure to be run there."""
        self._refuse_if_forked()
        with self._lock:  # so that nothing enters the inbox after the last look at it
            self._refuse_if_closed()
            self._inbox.put(job)

    def _forked(self) -> bool:
        return os.getpid() != self._process

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        why = "the engine was closed"
        try:
            while not self._closing:
                self._take_inbox(
                    wait=not self.core.has_work and not self._events,
                    stalled=self.core.stalled and not self._events,
                )
                if not self._closing:
                    events, self._events = self._events, []
                    deliver = partial(self._deliver, events) if events else None
                    self._events = self.core.compute(self._aside, deliver)
        except Exception as error:  # a bug: say so to everybody rather than hang
            why = f"the engine's step loop died: {type(error).__name__}: {error}"
        self._shut(why)

    def _take_inbox(self, wait: bool, stalled: bool = False) -> None:
        if wait:
            self._inbox.get()()
        with contextlib.suppress(queue.Empty):
            if stalled and not wait:
                self._inbox.get(timeout=_STALLED_SECONDS)()
            while True:
                self._inbox.get_nowait()()

    def _add(self, request: Request, sink: Sink, complete: bool) -> None:
        if self._death is not None:
            sink([_failed(request.id, self._death)])
            return
        try:
            live = self.core.add(request) if complete else self.core.open(request)
        except Exception as error:  # e.g. an id that came twice at the same time
            sink([_failed(request.id, str(error))])
            return
        self._sinks[live] = sink

    def _deliver(self, events: list[Event]) -> None:
        """Makes the deltas of events and hands them over; perhaps on the other thread."""
        for live, deltas in self.core.assemble(events).items():
            sink = self._sinks[live]
            if live.undelivered == 0:
                del self._sinks[live]
            sink(deltas)

    def _shut(self, why: str) -> None:
        with self._lock:  # from here on nothing enters the inbox
            self._death = why
        with contextlib.suppress(Exception):
            self._take_inbox(wait=False)
        with contextlib.suppress(Exception):
            self._deliver(self._events)
        for live, sink in self._sinks.items():
            with contextlib.suppress(Exception):
                sink([_failed(live.request.id, why)])
        self._sinks.clear()
        if self._aside is not None:
            self._aside.close()
        self.core.close()

    def _refuse_if_forked(self) -> None:
        if self._forked():
            raise EngineClosedError(
                f"no request can be taken: the engine runs in process {self._process}, of which"
                " this one is a fork; make an engine here"
            )

    def _refuse_if_closed(self) -> None:
        if self._death is not None or self._closing:
            raise EngineClosedError(
                f"no request can be taken: {self._death or 'the engine is closing'}"
            )


def _nothing() -> None:
    """Wakes the thread."""


def _failed(request_id: str, why: str) -> SequenceDelta:
    return SequenceDelta(request_id, 0, finish_reason=FinishReason.ERROR, error=why)
