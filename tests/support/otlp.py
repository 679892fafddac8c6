"""A collector of traces: takes OTLP over HTTP and keeps what it is sent."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A span as it came over the wire; ids in hexadecimal, times in nanoseconds since 1970."""

    name: str
    kind: int
    trace: str
    id: str
    parent: str
    begin: int
    end: int
    attributes: dict[str, Any]
    events: dict[str, int]
    status: int
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e9


class Collector:
    """Attributes:
    url: to give to the sender.
    """

    def __init__(self) -> None:
        self._bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                collector._bodies.append(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[Span]:
        """All that has come so far."""
        found = []
        for body in self._bodies:
            message = ExportTraceServiceRequest.FromString(body)
            for resource in message.resource_spans:
                about = _values(resource.resource.attributes)
                for scope in resource.scope_spans:
                    found += [_span(each, about) for each in scope.spans]
        return found


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


def _span(found: Any, resource: dict[str, Any]) -> Span:
    return Span(
        found.name,
        found.kind,
        found.trace_id.hex(),
        found.span_id.hex(),
        found.parent_span_id.hex(),
        found.start_time_unix_nano,
        found.end_time_unix_nano,
        _values(found.attributes),
        {event.name: event.time_unix_nano for event in found.events},
        found.status.code,
        resource,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
