"""What happens to every request before and after its handler: ids, keys, limits, log lines.

Plain ASGI: a layer costs a function call and no task.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import uuid
from collections.abc import Sequence
from functools import partial
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimaran.serve.errors import AUTH, INVALID, ApiError, unavailable
from trimaran.serve.genai_metrics import GenAiHistograms
from trimaran.serve.record import SESSION, Record, current
from trimaran.serve.traces import Traces, operation_of, trace_id_of

access = logging.getLogger("trimaran.access")

OPEN_PATHS = frozenset(
    {"/", "/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json", "/favicon.ico"}
)
"""Asked for without a key: what a load balancer, Prometheus and a browser read first."""

_KEY_PROTOCOL = "openai-insecure-api-key."

LARGEST_BODIES = 32
"""Bodies of the largest size that are held at once..."""
LEAST_TOTAL = 64 << 20
"""...or, where that is less, as many as fit these bytes."""


class RequestIds:
    """Names each request, in its answer's headers and in the access log, and traces it."""

    def __init__(
        self,
        app: ASGIApp,
        log: bool,
        traces: Traces | None = None,
        histograms: GenAiHistograms | None = None,
    ) -> None:
        self._app = app
        self._log = log
        self._traces = traces
        self._histograms = histograms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._session(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = uuid.uuid4().hex
        shown = _header(scope, b"x-request-id") or own
        if len(shown) > 128 or not shown.isascii() or not shown.isprintable():
            shown = own
        scope.setdefault("state", {})["request_id"] = own
        status = 0
        record = Record(shown, trace_id_of(_header(scope, b"traceparent")))
        traced = self._traces.begin(record, scope) if self._traces is not None else None
        current.set(record)

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).append("x-request-id", shown)
                if traced is not None:
                    MutableHeaders(scope=message).append("traceparent", traced[1])
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            if self._traces is not None and traced is not None:
                self._traces.end(traced[0], record, status)
            operation = operation_of(scope)
            if self._histograms is not None and operation is not None:
                self._histograms.observe(record, operation, status)
            if self._log:
                path = _one_line(scope)
                access.info(
                    "%s %s %s",
                    scope["method"],
                    path,
                    status or "client gone",
                    extra={
                        "request_id": shown,
                        "method": scope["method"],
                        "path": path,
                        "status": status,
                        "seconds": round(record.seconds, 6),
                        "client": (scope.get("client") or ("",))[0],
                        "engine": record.facts(),
                    },
                )

    async def _session(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket: its handler writes the log line, here it is traced."""
        record = Record(uuid.uuid4().hex, trace_id_of(_header(scope, b"traceparent")))
        traced = self._traces.begin(record, scope) if self._traces is not None else None
        record.on_part = lambda part: None
        if self._traces is not None and traced is not None:
            record.on_part = partial(self._traces.add, traced[0], record)
        current.set(record)
        status = 403  # what a client is told that is closed before it was accepted

        async def send_traced(message: Message) -> None:
            nonlocal status
            if message["type"] == "websocket.accept":
                status = SESSION
                if traced is not None:
                    named = (b"traceparent", traced[1].encode())
                    message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        try:
            await self._app(scope, receive, send_traced)
        finally:
            if self._traces is not None and traced is not None:
                self._traces.end(traced[0], record, status)


class Keys:
    """Lets through who has one of the keys; each is compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_prefixes: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_prefixes = open_prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._keys or scope["type"] == "lifespan" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"authorization") or ""
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer":
            key = _header(scope, b"x-api-key") or _browser_key(scope)
        found = key.strip().encode()
        right = 0
        for own in self._keys:  # all of them, so that the time doesn't tell which one it was
            right |= hmac.compare_digest(found, own)
        if right:
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "no valid API key came with the request; send 'Authorization: Bearer KEY'",
            AUTH,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 4401, "reason": error.message})
        else:
            await send_error(scope, send, error)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path in OPEN_PATHS or path.startswith(self._open_prefixes)


class Bodies:
    """Reads the whole body of a request, within a size and a time, before its handler runs.

    What has come of all bodies whose requests aren't answered is bounded too: else a thousand
    clients that each leave out the last byte would hold a thousand times the size of one.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_total = max(LARGEST_BODIES * max_bytes, LEAST_TOTAL)
        self._total = 0
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await send_error(scope, send, error)
            return
        if body is None:  # the client has left
            return
        taken = False

        async def replay() -> Message:
            nonlocal taken
            if taken:
                return await receive()
            taken = True
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            await self._app(scope, replay, send)
        finally:
            self._total -= len(body)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        length = _header(scope, b"content-length")
        if length is not None and length.isdecimal() and int(length[:20]) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        whole = False
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    self._total += len(part)
                    if size > self._max_bytes:
                        raise self._too_large()
                    if self._total > self._max_total:
                        raise _too_many()
                    parts.append(part)
                    if not message.get("more_body", False):
                        whole = True
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body of the request took longer than {self._seconds:g} s",
                code="body_timeout",
                headers={"connection": "close"},
            ) from None
        finally:
            if not whole:
                self._total -= size

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body of the request is larger than {self._max_bytes} bytes",
            INVALID,
            code="body_too_large",
            headers={"connection": "close"},
        )


def _too_many() -> ApiError:
    error = unavailable("too many large requests are coming in; try again later", "busy")
    error.headers["connection"] = "close"
    return error


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """Answers with an error, outside of any handler."""
    body = json.dumps(error.body_for(scope["path"])).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.headers,
    }
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _browser_key(scope: Scope) -> str:
    """Browsers can't set headers of a WebSocket: OpenAI's pages name a subprotocol."""
    for name in scope.get("subprotocols", ()):
        if name.startswith(_KEY_PROTOCOL):
            return str(name.removeprefix(_KEY_PROTOCOL))
    return ""


def _header(scope: Scope, name: bytes) -> str | None:
    for own, value in scope["headers"]:
        if own == name:
            return str(value.decode("latin-1"))
    return None


def _one_line(scope: Scope) -> str:
    """The path as it was sent: decoded, it could hold a line end and forge a log line."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    return raw.decode("ascii", "backslashreplace")
