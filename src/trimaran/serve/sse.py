"""Server-sent events, and answers that end when their client goes away.

Starlette's own streaming response costs a task group and two tasks a request and several
awaits a chunk; here a chunk is one `send`. Two tasks run: one writes, one waits for the
client to leave, and whichever ends first ends the other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trimaran.core.errors import TrimaranError
from trimaran.serve.errors import SERVER, ApiError, as_api_error

DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection before it had the answer."""


def data(value: Mapping[str, Any]) -> bytes:
    """An event of one JSON object."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def named(event: str, value: Mapping[str, Any]) -> bytes:
    """An event with a name, as Anthropic's API has them."""
    return b"event: " + event.encode() + b"\n" + data(value)


def error_event(error: Exception) -> bytes:
    """An error after the answer has begun."""
    return data(told(error).body())


def told(error: Exception) -> ApiError:
    """What a client is told of an error; of a bug only that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TrimaranError):
        return as_api_error(error)
    return ApiError(500, "an error inside the server", SERVER, code="internal_error")


class EventStream(Response):
    """Sends what an iterator of encoded events yields, and closes it at the end or when the
    client leaves; then `stack`, which holds the job, whether or not the iterator had begun.

    How long a client may take nothing is the protocol's matter (`http_protocol.py`).
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], stack: ExitStack, headers: Mapping[str, str] = {}
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events = events
        self._stack = stack
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stack:
            writing = asyncio.ensure_future(self._write(send))
            leaving = asyncio.ensure_future(_gone(receive))
            try:
                await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                writing.cancel()
                (result,) = await asyncio.gather(writing, return_exceptions=True)
                await self._events.aclose()  # type: ignore[attr-defined]
        if isinstance(result, Exception):
            raise result

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientGoneError: it did; there is nobody to answer.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
