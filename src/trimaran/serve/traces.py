"""Traces by OpenTelemetry: a SERVER span for each request, with the engine's phases below it.

    chat smollm2                   from the request's head to the end of its answer
    ├── queue                      from its arrival at the engine to its first step
    ├── prefill                    to its first token
    └── decode                     to its last token

A `/v1/realtime` session has one such span from its beginning to its end, with the phases of all
its answers. A `traceparent` that came with the request makes the span a child of the caller's;
the answer carries that of the span. OpenTelemetry's packages are an extra: `pip install
'trimaran[otel]'`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.types import Scope

from trimaran import __version__
from trimaran.core.errors import ConfigError
from trimaran.serve import genai
from trimaran.serve.record import Part, Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_EXPORT_SECONDS = 5.0
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_id_of(traceparent: str | None) -> str | None:
    """The trace's id in a `traceparent` header (W3C Trace Context); None in a bad one."""
    found = _TRACEPARENT.fullmatch(traceparent or "")
    if found is None or traceparent is None or traceparent.startswith("ff"):
        return None
    return found[1] if found[1].strip("0") else None


def operation_of(scope: Scope) -> str | None:
    """The operation that a request or a session is; None for others, such as for metrics."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if scope["type"] == "websocket":
        return genai.SESSIONS.get(path)
    return genai.OPERATIONS.get(path) if scope["method"] == "POST" else None


class Traces:
    """Makes spans and sends them to a collector, from a thread of its own."""

    def __init__(self, endpoint: str, port: int, exporter: SpanExporter | None = None) -> None:
        """
        Args:
            endpoint: of a collector that speaks OTLP over HTTP; "/v1/traces" is added where it
                has no path.
            port: on which the server listens.
            exporter: instead of the one to `endpoint`.

        Raises:
            ConfigError: no URL, or OpenTelemetry isn't installed.
        """
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"otlp_endpoint is '{endpoint}'; give the URL of a collector that speaks OTLP"
                " over HTTP, such as http://localhost:4318"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"traces need OpenTelemetry, which isn't installed here ({error}): pip install"
                " 'trimaran[otel]', or leave --otlp-endpoint out"
            ) from None
        about = {"service.version": __version__}
        if "OTEL_SERVICE_NAME" not in os.environ:
            about["service.name"] = "trimaran"
        if exporter is None:
            url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
            exporter = OTLPSpanExporter(url, timeout=_EXPORT_SECONDS)
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("trimaran.serve", __version__)
        self._context = TraceContextTextMapPropagator()
        self._port = port

    def close(self) -> None:
        """Sends what is left; blocks for some seconds where the collector doesn't answer."""
        self._provider.shutdown()

    # ------------------------------------------------------------------ a request

    def begin(self, record: Record, scope: Scope) -> tuple[Span, str] | None:
        """The span of a request, and the `traceparent` that names it; None for one that isn't
        traced, such as for metrics."""
        from opentelemetry.trace import SpanKind

        operation = operation_of(scope)
        if operation is None:
            return None
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        span = self._tracer.start_span(
            operation,
            context=self._context.extract(headers),
            kind=SpanKind.SERVER,
            start_time=record.began_ns,
            attributes={
                genai.OPERATION_NAME: operation,
                genai.PROVIDER_NAME: genai.PROVIDER,
                genai.HTTP_METHOD: scope.get("method", "GET"),
                genai.URL_PATH: scope["path"],
                genai.SERVER_PORT: self._port,
                genai.REQUEST_ID: record.request_id,
                genai.CLIENT_ADDRESS: (scope.get("client") or ("",))[0],
            },
        )
        context = span.get_span_context()
        record.trace_id = f"{context.trace_id:032x}"
        flags = int(context.trace_flags)
        return span, f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def end(self, span: Span, record: Record, status: int) -> None:
        """The request has been answered, or its client has left (`status` 0 or 499)."""
        from opentelemetry.trace import Status, StatusCode

        end = record.began_ns + round(record.seconds * 1e9)
        if span.is_recording():
            span.set_attributes(_attributes(record))
            if record.model is not None:
                operation = span.attributes[genai.OPERATION_NAME]  # type: ignore[attr-defined]
                span.update_name(f"{operation} {record.model}")
            if status:
                span.set_attribute(genai.HTTP_STATUS, status)
            error = record.error_type(status)
            if error is not None:
                span.set_attribute(genai.ERROR_TYPE, error)
                if status >= 500 or error == "request_failed":
                    span.set_status(Status(StatusCode.ERROR))
            for part in record.parts:
                self.add(span, record, part)
        span.end(end)

    def add(self, span: Span, record: Record, part: Part) -> None:
        """Part of a request, or of a session, has ended: its phases become children."""
        from opentelemetry.trace import set_span_in_context

        if not span.is_recording():
            return
        if part.first_token is not None:
            span.add_event(
                genai.FIRST_TOKEN,
                {genai.REQUEST_ID: part.request_id},
                record.nanoseconds(part.first_token),
            )
        context = set_span_in_context(span)
        for phase in part.phases:
            child = self._tracer.start_span(
                phase.name,
                context=context,
                start_time=record.nanoseconds(phase.begin),
                attributes=_of_phase(phase.name, part, record),
            )
            child.end(record.nanoseconds(phase.end))


def _attributes(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if record.model is not None:
        found |= {genai.REQUEST_MODEL: record.model, genai.RESPONSE_MODEL: record.model}
    for name, attribute in genai.REQUEST_PARAMETERS.items():
        value = getattr(record.params, name, None)
        if value is not None and value != ():
            found[attribute] = [value] if name == "stop" and isinstance(value, str) else value
    if not record.parts:
        return found
    facts = record.facts()
    found |= {
        genai.FINISH_REASONS: [part.finish_reason for part in record.parts],
        genai.INPUT_TOKENS: facts["prompt_tokens"],
        genai.OUTPUT_TOKENS: facts["output_tokens"],
        genai.CACHED_TOKENS: facts["cached_tokens"],
        genai.PREEMPTIONS: facts["preemptions"],
    }
    for phase, attribute in (
        (genai.QUEUE, genai.TIME_IN_QUEUE),
        (genai.PREFILL, genai.TIME_IN_PREFILL),
        (genai.DECODE, genai.TIME_IN_DECODE),
    ):
        if f"{phase}_seconds" in facts:
            found[attribute] = facts[f"{phase}_seconds"]
    first = record.time_to_first_token
    if first is not None:
        found[genai.TIME_TO_FIRST_TOKEN] = first
    found[genai.E2E] = record.seconds
    return found


def _of_phase(name: str, part: Part, record: Record) -> Mapping[str, Any]:
    found: dict[str, Any] = {
        genai.REQUEST_ID: part.request_id,
        genai.PROVIDER_NAME: genai.PROVIDER,
        genai.REQUEST_MODEL: record.model or "",
    }
    if name == genai.PREFILL:
        found |= {genai.INPUT_TOKENS: part.prompt_tokens, genai.CACHED_TOKENS: part.cached_tokens}
    elif name == genai.DECODE:
        found |= {genai.OUTPUT_TOKENS: part.output_tokens, genai.PREEMPTIONS: part.preemptions}
    return found
