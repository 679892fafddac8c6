"""`WebSocket /v1/realtime`: a conversation in text, by OpenAI's events."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast
from urllib.parse import urlsplit

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from trimaran.core.errors import TrimaranError
from trimaran.serve.errors import ApiError, unavailable
from trimaran.serve.middleware import access
from trimaran.serve.realtime import RealtimeSession
from trimaran.serve.record import current
from trimaran.serve.service import Phase, Service
from trimaran.serve.sse import told

router = APIRouter()

GOING_AWAY, REFUSED = 1001, 1008
"""Close codes (RFC 6455, section 7.4.1)."""
_DRAIN_POLL = 0.1  # seconds between two looks whether the last answer has ended


@router.websocket("/v1/realtime")
async def realtime(socket: WebSocket) -> None:
    """A session, until the client leaves, is silent for too long, or the server drains."""
    service = cast(Service, socket.app.state.service)
    if not _welcome(socket, service):
        await socket.close(REFUSED, "pages of this origin may not call; see --cors-origin")
        return
    await socket.accept("realtime" if "realtime" in socket.scope["subprotocols"] else None)
    await _Connection(socket, service).serve()


class _Connection:
    """A WebSocket and its session."""

    def __init__(self, socket: WebSocket, service: Service) -> None:
        self._socket = socket
        self._service = service
        self._look = asyncio.Event()  # the server drains, or the client takes nothing
        self._broken = False

    async def serve(self) -> None:
        """Takes events until the connection ends; then everything of the session has."""
        service = self._service
        try:
            model = service.check_model(self._socket.query_params.get("model"))
            _ = service.engine
            if service.phase is Phase.DRAINING:
                raise unavailable("the server is shutting down; ask another one", "draining", 5)
        except (ApiError, TrimaranError) as error:
            await RealtimeSession(service, "", self._send).error(told(error))
            await self._socket.close(REFUSED, told(error).message[:100])
            return
        session = RealtimeSession(service, model, self._send)
        begin = time.perf_counter()
        service.on_drain.add(self._look.set)
        try:
            await session.begin()
            await self._events(session)
        except (WebSocketDisconnect, TimeoutError):  # it has left, or takes nothing
            pass
        finally:
            service.on_drain.discard(self._look.set)
            await session.close()
            if service.config.access_log:
                self._log(session.id, time.perf_counter() - begin)

    def _log(self, name: str, seconds: float) -> None:
        path = str(self._socket.scope["raw_path"], "ascii", "backslashreplace")
        about = {"request_id": name, "method": "WEBSOCKET", "path": path, "status": 101}
        client = self._socket.client.host if self._socket.client else ""
        more: dict[str, Any] = {"seconds": round(seconds, 6), "client": client}
        if (record := current.get()) is not None:
            more["engine"] = record.facts()
        access.info("%s %s %s", "WEBSOCKET", path, "ended", extra=about | more)

    async def _events(self, session: RealtimeSession) -> None:
        seconds = self._service.config.session_timeout
        looking = asyncio.ensure_future(self._look.wait())
        receiving = asyncio.ensure_future(self._socket.receive())
        try:
            while not self._broken:
                draining = self._service.phase is Phase.DRAINING
                waits = {receiving} if draining else {receiving, looking}
                limit = _DRAIN_POLL if draining else seconds
                await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    message = receiving.result()
                    if message["type"] == "websocket.disconnect":
                        return
                    await self._take(session, message)
                    receiving = asyncio.ensure_future(self._socket.receive())
                elif session.busy or (looking.done() and not draining):
                    continue
                elif draining:
                    await self._socket.close(GOING_AWAY, "the server is shutting down")
                    return
                else:
                    why = f"no event came for {seconds:g} s, the limit of this server"
                    await session.error(ApiError(408, why, code="session_expired"))
                    await self._socket.close(GOING_AWAY, why)
                    return
        finally:
            receiving.cancel()
            looking.cancel()

    async def _take(self, session: RealtimeSession, message: Any) -> None:
        text = message.get("text")
        if text is None:
            await session.error(ApiError(400, "events are text; bytes came", code="invalid_json"))
        else:
            await session.handle(text)

    async def _send(self, event: dict[str, Any]) -> None:
        """Raises TimeoutError where the client takes nothing for too long."""
        try:
            async with asyncio.timeout(self._service.config.write_timeout):
                await self._socket.send_text(json.dumps(event, separators=(",", ":")))
        except (TimeoutError, WebSocketDisconnect):
            self._broken = True
            self._look.set()
            raise


def _welcome(socket: WebSocket, service: Service) -> bool:
    """Whether a page of that origin may call: browsers let any page open a WebSocket."""
    origin = socket.headers.get("origin")
    if origin is None:
        return True
    allowed = service.config.cors_origins
    own = urlsplit(origin).netloc == socket.headers.get("host")
    return own or "*" in allowed or origin in allowed
