"""OpenTelemetry's histograms of generative AI, as Prometheus names them.

They are of whole HTTP requests, by operation, model and kind of error, where vLLM's are of the
engine's: a dashboard made for any server that keeps to the conventions shows them.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from trimaran.serve import genai
from trimaran.serve.record import Record

DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
)  # fmt: skip
OUTPUT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)

_LABELS = tuple(
    name.replace(".", "_")
    for name in (
        genai.OPERATION_NAME,
        genai.PROVIDER_NAME,
        genai.REQUEST_MODEL,
        genai.SERVER_PORT,
        genai.ERROR_TYPE,
    )
)


class GenAiHistograms:
    """Three histograms in a registry; a label that doesn't apply is empty.

    Args:
        port: on which the server listens.
    """

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        self._port = str(port)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"gen_ai_server_{name}_seconds", text, _LABELS, registry=registry, buckets=buckets
            )

        self._duration = histogram(
            "request_duration", "From a request's head to the end of its answer.", DURATION
        )
        self._first = histogram(
            "time_to_first_token", "Of successful requests, the latest of their prompts'.",
            FIRST_TOKEN,
        )  # fmt: skip
        self._output = histogram(
            "time_per_output_token",
            "Of successful requests: mean time of a token after the first.",
            OUTPUT_TOKEN,
        )

    def observe(self, record: Record, operation: str, status: int) -> None:
        """A request has been answered, or its client has left (`status` 0 or 499)."""
        error = record.error_type(status)
        labels = (operation, genai.PROVIDER, record.model or "", self._port, error or "")
        self._duration.labels(*labels).observe(record.seconds)
        if error is not None:
            return
        first = record.time_to_first_token
        if first is not None:
            self._first.labels(*labels).observe(first)
        each = record.time_per_output_token
        if each is not None:
            self._output.labels(*labels).observe(each)
