"""The engine for asyncio: many tasks submit, stream and abort at once."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from trimaran.cache.inspection import CacheReport
from trimaran.core.errors import RequestFailedError
from trimaran.core.outputs import RequestOutput, SequenceDelta
from trimaran.core.request import Request
from trimaran.core.retention import Retention
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.slo import STANDARD, SloClass, slo_class
from trimaran.engine.chat_frame import ChatFrame
from trimaran.engine.collector import OutputCollector
from trimaran.engine.core import EngineCore
from trimaran.engine.delta_inbox import DeltaInbox
from trimaran.engine.health import EngineHealth
from trimaran.engine.open_request import IDLE_SECONDS, OpenRequest
from trimaran.engine.pooling import NO_TOKENS, Vector, normalized
from trimaran.engine.prompt import Prompt, prompt_ids, prompt_text
from trimaran.engine.thread import EngineThread

Answer = TypeVar("Answer")


class _LoopRelay:
    """Carries deltas from the engine's thread into one event loop.

    Whatever a step yields for any number of tasks crosses in one wake-up of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: list[tuple[asyncio.Queue[SequenceDelta], list[SequenceDelta]]] = []

    def send(self, queue: asyncio.Queue[SequenceDelta], deltas: list[SequenceDelta]) -> None:
        with self._lock:
            self._pending.append((queue, deltas))
            first = len(self._pending) == 1
        if first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        for queue, deltas in pending:
            for delta in deltas:
                queue.put_nowait(delta)


class RequestStream(DeltaInbox):
    """Deltas of one request as they come, until all of its sequences have ended.

    Iterate over it, or take what has come with `ready`. `close` it when leaving early, or the
    request runs on; used as a context manager it closes itself.
    """

    def __init__(self, request: Request, thread: EngineThread, relay: _LoopRelay) -> None:
        super().__init__(request)
        self._thread = thread
        thread.submit(request, lambda deltas: relay.send(self._queue, deltas))

    async def __aiter__(self) -> AsyncIterator[SequenceDelta]:
        while deltas := await self.ready():
            for delta in deltas:
                yield delta

    async def vector(self) -> Vector:
        """float32 [width], not normalised, of a request made by `AsyncEngine.pool`.

        Raises:
            RequestFailedError: it failed, or was aborted.
        """
        found: Vector | None = None
        async for delta in self:
            found = delta.vector
        if found is None:
            raise RequestFailedError(f"request '{self.request.id}' was aborted")
        return found

    def close(self) -> None:
        """Aborts the request unless it has ended; may be called twice."""
        if self._unfinished:
            self._unfinished = 0
            self._thread.abort(self.request.id)

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncEngine:
    """Submit, stream and abort from many tasks; one engine thread behind it."""

    def __init__(self, core: EngineCore) -> None:
        self._thread = EngineThread(core)
        self._ids = itertools.count()
        self._relays: dict[int, _LoopRelay] = {}

    @property
    def core(self) -> EngineCore:
        """The engine, for reading its configuration."""
        return self._thread.core

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        retention: Retention | None = None,
        slo: str | SloClass = STANDARD,
    ) -> AsyncIterator[SequenceDelta]:
        """Deltas of a request as they come, until all of its sequences have ended.

        Leaving the iteration early (break, cancellation, `aclose`) aborts the request.

        Args:
            cache_salt: prefixes are shared only between requests of equal salt.
            retention: how long the prompt is to stay cached afterwards.

        Raises:
            RequestError: it could never be served.
            RequestFailedError: it failed while running.
            BusyError: too many requests wait already; says when to try again.
            EngineUnhealthyError: a step hangs.
            EngineClosedError: the engine takes no requests any more.
        """
        with self.start(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            retention=retention,
            slo=slo,
        ) as running:
            async for delta in running:
                yield delta

    def start(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        retention: Retention | None = None,
        slo: str | SloClass = STANDARD,
    ) -> RequestStream:
        """Hands a request in at once and returns its stream; to be called in a running loop.

        Raises:
            RequestError, BusyError, EngineUnhealthyError, EngineClosedError: as `stream`.
        """
        request = self._request(prompt, params, request_id, priority, cache_salt, retention, slo)
        return RequestStream(request, self._thread, self._relay())

    def check_pooled(self, prompt: Prompt, pooling: str = "mean") -> None:
        """Raises `RequestError` where `pool` could never serve a prompt."""
        request = self._request(prompt, NO_TOKENS, None, 0, "", None, STANDARD)
        request.pooling = pooling
        self.core.check(request)

    def pool(
        self,
        prompt: Prompt,
        pooling: str = "mean",
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        slo: str | SloClass = STANDARD,
    ) -> RequestStream:
        """Hands a prompt in of which one vector is wanted: its stream has one delta, with it.
        To be called in a running loop.

        Args:
            pooling: "mean" of the prompt's rows after the final norm, or the "last" one.

        Raises:
            RequestError, BusyError, EngineUnhealthyError, EngineClosedError: as `stream`.
        """
        request = self._request(prompt, NO_TOKENS, request_id, priority, cache_salt, None, slo)
        request.pooling = pooling
        return RequestStream(request, self._thread, self._relay())

    async def embed(
        self,
        prompt: Prompt,
        pooling: str = "mean",
        *,
        normalize: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        slo: str | SloClass = STANDARD,
    ) -> Vector:
        """float32 [width]: a prompt's vector (see `LLM.embed`). Cancelling the task aborts it;
        errors as `stream`."""
        with self.pool(
            prompt,
            pooling,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            slo=slo,
        ) as running:
            vector = await running.vector()
        return normalized(vector) if normalize else vector

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        retention: Retention | None = None,
        slo: str | SloClass = STANDARD,
    ) -> RequestOutput:
        """The whole answer of a request. Cancelling the task aborts it; errors as `stream`."""
        params = params or SamplingParams()
        ids = prompt_ids(prompt, self.core.tokenizer)
        collector = OutputCollector(request_id or "", prompt_text(prompt), ids, params.n)
        async for delta in self.stream(
            ids,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            retention=retention,
            slo=slo,
        ):
            collector.output.request_id = delta.request_id
            collector.add(delta)
        return collector.result()

    def open(
        self,
        params: SamplingParams | None = None,
        *,
        chat: ChatFrame | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        retention: Retention | None = None,
        slo: str | SloClass = STANDARD,
        idle_seconds: float = IDLE_SECONDS,
    ) -> OpenRequest:
        """A request whose prompt arrives piece by piece; what is certain of it is computed
        meanwhile. To be called in an event loop.

        Args:
            chat: the prompt is the last message of this conversation, else it is plain text.
            idle_seconds: without more text for so long it is given up.

        Raises:
            RequestError: it could never be served; `prompt_logprobs` can't be had.
            BusyError, EngineUnhealthyError, EngineClosedError: as `stream`.
        """
        return OpenRequest(
            self._thread,
            self._make([], params, request_id, priority, cache_salt, retention, slo),
            self.core.tokenizer,
            self._relay().send,
            chat=chat,
            idle_seconds=idle_seconds,
        )

    def abort(self, request_id: str) -> None:
        """Ends a request; its stream ends with the finish reason ABORT."""
        self._thread.abort(request_id)

    def has_room(self) -> bool:
        """Whether one more request might be taken now, as far as those that wait go."""
        return self._thread.has_room()

    def health(self) -> EngineHealth:
        """Whether requests are taken, and if not, why."""
        return self._thread.health()

    async def ask(self, question: Callable[[EngineCore], Answer]) -> Answer:
        """What `question` finds between two steps; it runs on the engine's thread, so it must
        be quick.

        Raises:
            EngineClosedError: the engine has ended.
        """
        return await asyncio.wrap_future(self._thread.ask(question))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes that no request holds."""
        self._thread.call(lambda core: core.scheduler.kv.reset_prefix_cache())

    async def inspect_prefix_cache(self, top: int = 10) -> CacheReport:
        """What the prefix cache holds, by salt, with the `top` hottest prefixes. Taken between
        two steps; holds the next one up for about a second for each million of blocks.

        Raises:
            EngineClosedError: the engine has ended.
        """
        return await self.ask(lambda core: core.scheduler.kv.inspect(top))

    async def close(self) -> None:
        """Ends every request and frees the engine."""
        await asyncio.to_thread(self._thread.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _relay(self) -> _LoopRelay:
        loop = asyncio.get_running_loop()
        relay = self._relays.setdefault(id(loop), _LoopRelay(loop))
        if relay._loop is not loop:  # a loop that ended left its address to this one
            relay = self._relays[id(loop)] = _LoopRelay(loop)
        return relay

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str,
        retention: Retention | None,
        slo: str | SloClass,
    ) -> Request:
        ids = prompt_ids(prompt, self.core.tokenizer)
        return self._make(ids, params, request_id, priority, cache_salt, retention, slo)

    def _make(
        self,
        ids: list[int],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str,
        retention: Retention | None,
        slo: str | SloClass,
    ) -> Request:
        return Request(
            id=request_id or f"async-{next(self._ids)}",
            prompt=ids,
            params=params or SamplingParams(),
            arrival=self.core.clock.now(),
            priority=priority,
            cache_salt=cache_salt,
            retention=retention,
            slo=slo_class(slo),
        )
