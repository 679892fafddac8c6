"""A listening socket that speaks TLS, with limits on handshakes.

asyncio's own waits a minute for a handshake, and takes any number of clients that never begin
one. Here those in a handshake count as open connections, and have as long as the head of a
request has.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sized

ACCEPTED_AT_ONCE = 100
"""Connections that are taken before anything else has a turn."""
NO_FILES_SECONDS = 0.5
"""Until the next try where the system has no file for a connection."""


class TlsServer:
    """Accepts connections from its making until `close`; to be used in a running loop.

    Args:
        listening: not blocking.
        make: the protocol of a connection, used once its handshake is done.
        context: certificate and key.
        connections: those whose handshake is done.
        most: connections there may be, those in a handshake included; more are closed at
            once, without a word: to say it would take the handshake.
        seconds: that a handshake may take.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        connections: Sized,
        most: int,
        seconds: float,
    ) -> None:
        self._listening = listening
        self._make = make
        self._context = context
        self._connections = connections
        self._most = most
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._shaking: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Takes no more connections, and ends all handshakes."""
        self._loop.remove_reader(self._listening)
        if self._again is not None:
            self._again.cancel()
        self._listening.close()
        for task in self._shaking:
            task.cancel()

    async def wait_closed(self) -> None:
        """Until no handshake is left."""
        await asyncio.gather(*self._shaking, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no file is left: the one that waits would wake us for ever
                self._loop.remove_reader(self._listening)
                self._again = self._loop.call_later(NO_FILES_SECONDS, self._listen)
                return
            if len(self._shaking) + len(self._connections) >= self._most:
                accepted.close()
                continue
            accepted.setblocking(False)
            task = self._loop.create_task(self._shake(accepted))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError, TimeoutError):  # SSLError is an OSError
            await self._loop.connect_accepted_socket(
                self._make,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._seconds,
            )
