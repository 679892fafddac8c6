"""HTTP connections with limits on their headers, their number and their patience.

uvicorn bounds neither the size of headers nor the time they take: one client could fill the
memory with them, and a thousand silent connections would stay open for ever. A timer runs
while a connection owes us the rest of a request's head; bodies are bounded in
`middleware.py`, where an answer can still be written.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol; the limits are set by `limited_protocol`."""

    max_header_bytes = 64 << 10
    max_connections = 1024
    header_timeout = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, b"too many connections")
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_complete()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._head_timer is not None:
            # llhttp hands headers over one by one, and a single one without an end never:
            # so what counts is what came while the head isn't complete.
            self._head_bytes += len(data)
            if self._head_bytes > self.max_header_bytes and b"\r\n\r\n" not in data:
                self._refuse(431, b"request header fields too large")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if sum(len(n) + len(v) for n, v in self.headers[-1:]) > self.max_header_bytes:
            self._refuse(431, b"request header fields too large")
        if len(self.headers) > 200:
            self._refuse(431, b"too many request header fields")

    def on_headers_complete(self) -> None:
        self._head_complete()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.header_timeout, self._head_late)

    def _head_complete(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        self._refuse(408, b"the request's headers took too long")

    def _refuse(self, status: int, why: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._head_complete()
        self.transport.write(
            b"HTTP/1.1 %d \r\ncontent-type: text/plain\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (status, len(why), why)
        )
        self.transport.close()


def limited_protocol(
    max_header_bytes: int, max_connections: int, header_timeout: float
) -> type[LimitedProtocol]:
    """The protocol class with these limits, in bytes, connections and seconds."""
    return type(
        "Protocol",
        (LimitedProtocol,),
        {
            "max_header_bytes": max_header_bytes,
            "max_connections": max_connections,
            "header_timeout": header_timeout,
        },
    )
