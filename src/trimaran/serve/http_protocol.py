"""HTTP connections with limits on their heads, their number and their patience.

uvicorn bounds neither the size of a head nor the time it takes, and it waits for ever for a
client that takes nothing: one client could fill the memory, and a thousand silent connections
would stay open for good. Here a timer runs while a connection owes us the rest of a head, and
`check_patience`, called now and then, ends connections whose client takes nothing. Bodies are
bounded in `middleware.py`, where an answer can still be written.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from trimaran.serve.errors import INVALID, SERVER, ApiError

access = logging.getLogger("trimaran.access")

MAX_FIELDS = 200
"""Header fields of a request."""
MAX_PIPELINED = 16
"""Requests that may wait on one connection behind the one that is answered."""
MAX_PIPELINED_BODY = 64 << 10
"""Bytes of the body of one that waits."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol; the limits are set by `limited_protocol`."""

    max_header_bytes = 64 << 10
    max_connections = 1024
    header_timeout = 10.0
    write_timeout = 60.0
    log_refusals = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cycles: list[RequestResponseCycle] = []  # not yet answered, the oldest first
        self._in_head = True
        self._fed_end = False  # a message has ended within what is being parsed
        self._head_bytes = 0  # received of a head that isn't complete
        self._field_bytes = 0  # parsed of it
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._sent: _CountingTransport
        self._taken = 0
        self._taken_at = 0.0
        self._pending_since: float | None = None

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._sent = _CountingTransport(transport)
        super().connection_made(self._sent)  # type: ignore[arg-type]
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too many connections are open; try again later", "too_many")
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        for cycle in self._cycles:  # uvicorn itself tells only the newest one
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()
        self.pipeline.clear()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._stop_timer()
        self.transport = self._sent.transport
        super().handle_websocket_upgrade()

    def check_patience(self, now: float) -> None:
        """Ends the connection if its client has taken nothing of what was sent to it for
        `write_timeout`, or hasn't taken all of it in ten times that.

        Args:
            now: of the loop's clock.
        """
        pending = self._sent.get_write_buffer_size()
        taken = self._sent.written - pending
        if taken != self._taken or not pending:
            self._taken, self._taken_at = taken, now
        if not pending:
            self._pending_since = None
            return
        if self._pending_since is None:
            self._pending_since = now
        late = now - self._taken_at > self.write_timeout
        if late or now - self._pending_since > 10 * self.write_timeout:
            self.transport.abort()

    # ------------------------------------------------------------------ what comes

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._fed_end = False
        super().data_received(data)
        if self._in_head and not self._refused:
            # llhttp hands headers over one by one, and a single one without an end never:
            # so what counts is what came while the head isn't complete.
            self._head_bytes = 0 if self._fed_end else self._head_bytes + len(data)
            if self._head_bytes > self.max_header_bytes:
                self._refuse_head()

    def on_message_begin(self) -> None:
        if self._refused:
            return
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._field_bytes = 0
        if self._head_timer is None and not self._answering():
            self._expect_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_field(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_field(len(name) + len(value))
        if len(self.headers) > MAX_FIELDS:
            self._refuse(431, f"more than {MAX_FIELDS} header fields", "too_many_headers")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        if self._refused:
            return
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:  # a WebSocket
            return
        self._cycles = [each for each in self._cycles if not each.response_complete]
        self._cycles.append(self.cycle)
        if self.scope["http_version"] == "1.0":
            _without_chunks(self.cycle)
        elif self.scope["http_version"] != "1.1":
            self._refuse(505, "HTTP/1.1 and 1.0 are spoken here", "http_version")
        if len(self._cycles) > 1 + MAX_PIPELINED:
            self._refuse(429, "too many requests at once on one connection", "too_many")
        elif len(self._cycles) > 1:
            self.flow.resume_reading()  # or nobody would notice that the client leaves

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        super().on_body(body)
        if self._cycles[:1] != [self.cycle] and len(self.cycle.body) > MAX_PIPELINED_BODY:
            self._refuse(413, "the body of a pipelined request is too large", "body_too_large")

    def on_message_complete(self) -> None:
        self._fed_end = True
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._cycles = [each for each in self._cycles if not each.response_complete]
        super().on_response_complete()
        if self._in_head and not self._answering():  # the next one has begun to come
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request isn't valid HTTP", "invalid_http")

    # ------------------------------------------------------------------ parts

    def _answering(self) -> bool:
        return any(not each.response_complete for each in self._cycles)

    def _count_field(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > self.max_header_bytes:
            self._refuse_head()

    def _expect_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.header_timeout, self._head_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        self._refuse(408, "the request's headers took too long", "header_timeout")

    def _refuse_head(self) -> None:
        self._refuse(
            431,
            f"the request's headers are larger than {self.max_header_bytes} bytes",
            "headers_too_large",
        )

    def _refuse(self, status: int, why: str, code: str) -> None:
        """Closes the connection; with an answer where none is under way or owed before."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_timer()
        owed = [each for each in self._cycles if not each.response_complete]
        own = owed[0] if len(owed) == 1 and owed[0].more_body else None  # what is refused
        if not owed or (own is not None and not own.response_started):
            if own is not None:
                own.disconnected = True  # its handler has nothing to say any more
                own.message_event.set()
            error = ApiError(status, why, SERVER if status >= 500 else INVALID, code=code)
            body = json.dumps(error.body()).encode()
            request_id = uuid.uuid4().hex
            self.transport.write(
                b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"x-request-id: %s\r\nconnection: close\r\n\r\n%s"
                % (status, len(body), request_id.encode(), body)
            )
            if self.log_refusals and own is None:  # else its handler writes a line
                self._tell(status, code, request_id)
        self.transport.close()

    def _tell(self, status: int, code: str, request_id: str) -> None:
        """The line of a request that no handler saw; none for a connection that sent nothing."""
        if status == 408 and not self._in_head:
            return
        access.info(
            "refused %s %s",
            code,
            status,
            extra={
                "request_id": request_id,
                "status": status,
                "seconds": 0.0,
                "client": (self.client or ("",))[0],
            },
        )


class _CountingTransport:
    """A transport, and how much was written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self.transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks: an answer without a length ends with its connection."""
    send = cycle.send

    async def send_plain(message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", [])}
            if b"content-length" not in names:
                cycle.chunked_encoding = False
                plain.append(True)
        elif plain:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    plain: list[bool] = []
    setattr(cycle, "send", send_plain)  # noqa: B010


def limited_protocol(
    max_header_bytes: int,
    max_connections: int,
    header_timeout: float,
    write_timeout: float,
    log_refusals: bool = False,
) -> type[LimitedProtocol]:
    """The protocol class with these limits, in bytes, connections and seconds."""
    return type(
        "Protocol",
        (LimitedProtocol,),
        {
            "max_header_bytes": max_header_bytes,
            "max_connections": max_connections,
            "header_timeout": header_timeout,
            "write_timeout": write_timeout,
            "log_refusals": log_refusals,
        },
    )
