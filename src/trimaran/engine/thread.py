"""Runs the step loop on a thread of its own, for callers on any thread."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from trimaran.core.errors import BusyError, EngineClosedError, EngineUnhealthyError
from trimaran.core.outputs import SequenceDelta
from trimaran.core.request import FinishReason, Request
from trimaran.engine.assembly import Event
from trimaran.engine.core import EngineCore
from trimaran.engine.doing import Doing
from trimaran.engine.generation import LiveRequest
from trimaran.engine.health import EngineHealth
from trimaran.engine.side_thread import SideThread
from trimaran.engine.watchdog import Watchdog

log = logging.getLogger("trimaran")

_SWITCH_SECONDS = 1e-4
_HANGING_SECONDS = 5.0  # that closing waits for a step that hangs
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
    delivers them (see `engine/assembly.py`). A third one watches (`engine/watchdog.py`). Where
    a step hangs, its requests fail for their callers at once and no others are taken; what they
    hold is freed when the step returns after all, and then the engine goes on with those that
    wait.

    A process that is forked from this one doesn't have the thread: there requests are refused,
    and an engine of its own is to be made.
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
        self._handed: dict[Request, Sink] = {}  # in the inbox
        self._hang: str | None = None
        self._hung: list[LiveRequest] = []  # failed for their callers, not yet ended
        self._thread.start()
        timeout = core.config.step_timeout
        self._watchdog = (
            None if timeout is None else Watchdog(core, timeout, self._on_hang, self._on_stall)
        )
        atexit.register(self.close)  # a step in native code must not outlive the interpreter

    def submit(self, request: Request, sink: Sink) -> None:
        """Hands a request in; `sink` gets all of its deltas, the last with a finish reason.

        Raises:
            RequestError: the request could never be served.
            BusyError: too many wait already; says when to try again.
            EngineUnhealthyError: a step hangs.
            EngineClosedError: the engine takes no requests any more, or not in this process.
        """
        self._hand_in(request, sink, complete=True)

    def open(self, request: Request, sink: Sink) -> None:
        """Hands a request in whose prompt still arrives, by `extend` and `complete`.

        Raises:
            TrimaranError: as `submit`.
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
            if not answer.set_running_or_notify_cancel():
                return
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
            self._thread.join(None if self._hang is None else _HANGING_SECONDS)
            if self._thread.is_alive():  # it can't be ended; its callers needn't wait for it
                self._fail_all(f"the engine was closed while {self._hang}")

    @property
    def alive(self) -> bool:
        return self._death is None and not self._closing and not self._forked()

    def health(self) -> EngineHealth:
        """Whether requests are taken, and if not, why."""
        if self._forked():
            return EngineHealth(False, f"it runs in process {self._process}")
        closing = "the engine is closing" if self._closing else None
        reason = self._death or self._hang or closing
        return EngineHealth(reason is None, reason or "")

    def _hand_in(self, request: Request, sink: Sink, complete: bool) -> None:
        self._refuse_if_forked()
        self.core.check(request, complete=complete)

        def register() -> None:
            self._refuse_if_busy()
            self._handed[request] = sink

        self._enter(lambda: self._add(request, complete), register)

    def _enter(self, job: Callable[[], None], register: Callable[[], None] | None = None) -> None:
        """Puts into the inbox what is sure to be run there; what `register` raises, it's not."""
        self._refuse_if_forked()
        with self._lock:  # so that nothing enters the inbox after the last look at it
            self._refuse_if_closed()
            if register is not None:
                register()
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
                    if self._hang is not None:
                        self._recover()
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

    def _recover(self) -> None:
        """What hung has returned: frees what its requests held."""
        with self._lock:
            hung, why = self._hung, self._hang
            self._hung, self._hang = [], None
        log.warning("the engine goes on: what hung has returned (%s)", why)
        self._events += self.core.fail(hung, str(why))

    def _add(self, request: Request, complete: bool) -> None:
        sink = self._handed.pop(request, None)
        if sink is None:  # it has failed for its caller already
            return
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
            sink = self._sinks.get(live)
            if sink is None:  # it has failed for its caller already
                continue
            if live.undelivered == 0:
                self._sinks.pop(live, None)
            sink(deltas)

    def _shut(self, why: str) -> None:
        with self._lock:  # from here on nothing enters the inbox
            self._death = why
        with contextlib.suppress(Exception):
            self._take_inbox(wait=False)
        with contextlib.suppress(Exception):
            self._deliver(self._events)
        self._fail_all(why)
        if self._watchdog is not None:
            self._watchdog.close()
        if self._aside is not None:
            self._aside.close()
        self.core.close()

    def _refuse_if_forked(self) -> None:
        if self._forked():
            raise EngineClosedError(
                f"no request can be taken: the engine runs in process {self._process}, of which"
                " this one is a fork; make an engine here"
            )

    def _fail_all(self, why: str) -> None:
        self._fail_for_callers(list(self._sinks), why)
        for request in list(self._handed):
            if (sink := self._handed.pop(request, None)) is not None:
                with contextlib.suppress(Exception):
                    sink([_failed(request.id, why)])

    def _fail_for_callers(self, lives: list[LiveRequest], why: str) -> None:
        for live in lives:
            sink = self._sinks.pop(live, None)
            if sink is not None:  # else its last delta was delivered meanwhile
                with contextlib.suppress(Exception):
                    sink([_failed(live.request.id, why)])

    # ------------------------------------------------------------------ on the watchdog's

    def _on_hang(self, doing: Doing, seconds: float) -> None:
        core, step = self.core, doing.step
        lives = core.stuck() if step is None else core.requests_of(step)
        shape = (
            "" if step is None else f" of {step.plan.rows} rows, {step.plan.sequences} sequences"
        )
        why = f"{doing.what} a step{shape} hasn't ended for {seconds:.1f} s"
        names = ", ".join(live.request.id for live in lives)
        log.error("%s; the requests in it fail: %s", why, names or "none")
        with self._lock:
            if core.doing is not doing:  # it has just ended
                return
            self._hang = why
            self._hung = lives
        self._count("hang", len(lives))
        self._fail_for_callers(lives, why)

    def _on_stall(self, seconds: float) -> None:
        def end() -> None:
            core = self.core
            lives, usage = core.stuck(), core.scheduler.kv.usage()
            why = (
                f"the scheduler has brought no request further for {seconds:.1f} s:"
                f" {core.scheduler.num_running} sequences run, {core.scheduler.num_waiting} wait;"
                f" of {usage.total} KV blocks {usage.held} are held, {usage.free} free"
            )
            log.error("%s; it fails: %s", why, ", ".join(live.request.id for live in lives))
            self._count("stall", len(lives))
            self._events += core.fail(lives, why)

        self._inbox.put(end)

    def _count(self, reason: str, requests: int) -> None:
        failures = self.core.metrics.failures
        failures[reason] = failures.get(reason, 0) + requests

    def _refuse_if_busy(self) -> None:
        if self._hang is not None:
            raise EngineUnhealthyError(
                f"no request can be taken: {self._hang}; try again once it has ended"
            )
        core = self.core
        try:
            core.admission.check(*self._load(), core.clock.now())
        except BusyError:
            rejections = core.metrics.rejections
            rejections["max_waiting"] = rejections.get("max_waiting", 0) + 1
            raise

    def has_room(self) -> bool:
        """Whether one more request might be taken now, as far as those that wait go."""
        return self.core.admission.has_room(*self._load())

    def _load(self) -> tuple[int, int]:
        """(requests that wait, sequences that run)."""
        scheduler = self.core.scheduler
        return scheduler.num_waiting + len(self._handed), scheduler.num_running

    def _refuse_if_closed(self) -> None:
        if self._death is not None or self._closing:
            raise EngineClosedError(
                f"no request can be taken: {self._death or 'the engine is closing'}"
            )


def _nothing() -> None:
    """Wakes the thread."""


def _failed(request_id: str, why: str) -> SequenceDelta:
    return SequenceDelta(request_id, 0, finish_reason=FinishReason.ERROR, error=why)
