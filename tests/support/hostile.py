"""Clients that behave badly, on plain sockets; and what they must not leave behind."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from typing import Any

import httpx
from support.http_server import HttpServer, open_files, resident_bytes

LONG = {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
SETTLE_SECONDS = 20.0


def connect(server: HttpServer, *, receive_buffer: int | None = None) -> socket.socket:
    """A connection; with `receive_buffer` (bytes) the system takes in little that isn't read."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(30)
    client.connect((host, int(port)))
    return client


def post(path: str, body: Any, *headers: str) -> bytes:
    """The bytes of a request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(content)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def reset(client: socket.socket) -> None:
    """Closes a connection as a process that crashed with unread data does: with a RST."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def everything(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def exchange(server: HttpServer, *parts: bytes) -> bytes:
    """What a server answers to these bytes until it closes or we have waited 5 s."""
    with connect(server) as client:
        client.settimeout(5)
        found = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            for part in parts:
                client.sendall(part)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while part := client.recv(1 << 16):
                found += part
        return found


def state(server: HttpServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/debug/state", timeout=30).json()
    return found


def until(what: str, done: Any, seconds: float = SETTLE_SECONDS) -> None:
    """Waits until `done()`, or fails with `what` was waited for."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(0.05)


class Residue:
    """What a server holds when nothing is asked of it, to compare with later."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._live()  # whatever the first look opens for good is open now
        self.files = open_files(server)
        self.memory = resident_bytes(server)

    def assert_none(self, *, memory: int = 64 << 20) -> None:
        """Nothing runs or waits, no block is held, no file is open that wasn't, and no more
        than `memory` bytes have come to be resident."""
        server = self._server
        until("no request is live", lambda: self._live() == [0.0] * 5)
        until("files are closed", lambda: open_files(server) <= self.files)
        blocks = state(server)["blocks"]
        assert blocks["held"] == 0
        assert blocks["free"] + blocks["cached"] == blocks["total"]
        grown = resident_bytes(server) - self.memory
        assert grown <= memory, f"{grown >> 20} MiB more are resident"
        assert server.process.poll() is None

    def _live(self) -> list[float]:
        found = state(self._server)
        return [
            float(found["running"]),
            float(found["waiting"]),
            float(found["server"]["active_requests"]),
            self._server.metric("vllm:kv_cache_usage_perc"),
            self._server.metric("vllm:num_requests_running")
            + self._server.metric("vllm:num_requests_waiting"),
        ]
