"""An encoder for asyncio: many tasks ask for vectors; one thread computes them in batches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from trimaran.core.errors import BusyError, EngineClosedError, RequestFailedError
from trimaran.core.request import FinishReason, Request
from trimaran.core.sampling_params import SamplingParams
from trimaran.engine.delta_inbox import DeltaInbox
from trimaran.engine.encoder_core import Encoded, EncoderCore, Vector
from trimaran.engine.health import EngineHealth

T = TypeVar("T")
_PARAMS = SamplingParams(max_tokens=1)


class EncoderStream(DeltaInbox):
    """One text's request: no delta comes, but one vector."""

    def __init__(self, engine: EncoderEngine, request: Request) -> None:
        super().__init__(request)
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._vector: asyncio.Future[Vector] = self._loop.create_future()

    async def vector(self) -> Vector:
        """float32 [width].

        Raises:
            RequestFailedError: it couldn't be computed.
        """
        return await self._vector

    def close(self) -> None:
        """Aborts the request unless it has ended."""
        if self._unfinished:  # though whoever waited for the vector may have been cancelled
            self._unfinished = 0
            self._vector.cancel()
            self._engine.abort(self.request.id)

    def deliver(self, found: Encoded) -> None:
        """Called on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._take, found)

    def _take(self, found: Encoded) -> None:
        self._unfinished = 0
        self.metrics = found.metrics
        self.finish_reason = FinishReason.STOP if found.error is None else FinishReason.ERROR
        if self._vector.done():
            return
        if found.vector is None:
            why = f"request '{self.request.id}' failed: {found.error}"
            self._vector.set_exception(RequestFailedError(why))
        else:
            self._vector.set_result(found.vector)


class EncoderEngine:
    """Owns an `EncoderCore`; methods may be called from any task."""

    def __init__(self, core: EncoderCore) -> None:
        self.core = core
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, EncoderStream] = {}
        self._ids = itertools.count()
        self._handed = 0  # texts in the inbox
        self._closing = False
        self._death: str | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="trimaran-encoder", daemon=True)
        self._thread.start()

    def check(self, ids: list[int]) -> None:
        """Raises `RequestError` where a text can't be encoded."""
        self.core.check(Request("encode", ids, _PARAMS))

    def start(self, ids: list[int], request_id: str = "encode", priority: int = 0) -> EncoderStream:
        """Hands a text in.

        Raises:
            RequestError: it can't be encoded.
            BusyError: too many wait already; says when to try again.
            EngineClosedError: nothing is taken any more.
        """
        core = self.core
        name = f"{request_id}-{next(self._ids)}"
        request = Request(name, ids, _PARAMS, arrival=core.clock.now(), priority=priority)
        core.check(request)
        stream = EncoderStream(self, request)

        def add() -> None:
            with self._lock:
                self._handed -= 1
            self._streams[name] = stream
            core.add(request)

        self._enter(add, self._refuse_if_busy)
        return stream

    def abort(self, request_id: str) -> None:
        """Ends a request; harmless when it has ended."""

        def end() -> None:
            self._streams.pop(request_id, None)
            self.core.abort(request_id)

        with contextlib.suppress(EngineClosedError):
            self._enter(end)

    def health(self) -> EngineHealth:
        """Whether texts are taken, and if not, why."""
        reason = self._death or ("the engine is closing" if self._closing else "")
        return EngineHealth(not reason, reason)

    async def ask(self, question: Callable[[EncoderCore], T]) -> T:
        """What `question` finds between two steps, on the engine's thread.

        Raises:
            EngineClosedError: the engine has ended.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]

        def run() -> None:
            try:
                value, error = question(self.core), None
            except Exception as failure:  # the asker's, not the engine's
                value, error = None, failure
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, value, error)

        self._enter(run)
        return await answer

    async def close(self) -> None:
        """Ends every request and the thread."""
        with self._lock:
            self._closing = True
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    def _refuse_if_busy(self) -> None:
        core = self.core
        try:
            core.admission.check(*self._load(), core.clock.now())
        except BusyError:
            rejections = core.metrics.rejections
            rejections["max_waiting"] = rejections.get("max_waiting", 0) + 1
            raise
        self._handed += 1

    def has_room(self) -> bool:
        """Whether one more text might be taken now, as far as those that wait go."""
        return self.core.admission.has_room(*self._load())

    def _load(self) -> tuple[int, int]:
        """(texts that wait, texts that are encoded)."""
        scheduler = self.core.scheduler
        return scheduler.num_waiting + self._handed, scheduler.num_running

    def _enter(self, job: Callable[[], None], register: Callable[[], None] | None = None) -> None:
        """Puts into the inbox what is sure to be run there; what `register` raises, it's not."""
        with self._lock:  # so that nothing enters the inbox after the last look at it
            if self._closing or self._death is not None:
                why = self._death or "the engine is closing"
                raise EngineClosedError(f"no request can be taken: {why}")
            if register is not None:
                register()
            self._inbox.put(job)

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        why = "the engine was closed"
        try:
            while not self._closing:
                if not self.core.has_work:
                    self._inbox.get()()
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._inbox.get_nowait()()
                for found in self.core.step() if not self._closing else ():
                    if (stream := self._streams.pop(found.request.id, None)) is not None:
                        stream.deliver(found)
        except Exception as error:  # a bug: say so to everybody rather than hang
            why = f"the encoder's step loop died: {type(error).__name__}: {error}"
        with self._lock:
            self._death = why
        with contextlib.suppress(Exception):
            while True:
                self._inbox.get_nowait()()
        for stream in self._streams.values():
            request = stream.request
            metrics = self.core.metrics_of(request.id)
            stream.deliver(Encoded(request, metrics, None, why))
        self._streams.clear()
