"""WebSockets that end: with their session when the server drains, and without the client's
help when it takes nothing any more."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

LAST_WRITE_SECONDS = 10.0
"""That a client has to take the last of what was sent to it."""


class SessionSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol, which bounds the size of a message and stops reading while one is
    not yet taken, and whose pings find out clients that are gone."""

    _abort_timer: asyncio.TimerHandle | None = None

    async def run_asgi(self) -> None:
        await super().run_asgi()
        if not self.disconnected:  # closing waits for the client to take what was sent
            self._abort_timer = self.loop.call_later(LAST_WRITE_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        super().connection_lost(exc)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()

    def shutdown(self) -> None:
        """The server drains: a session closes itself, once its answer has ended."""
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
