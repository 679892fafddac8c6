"""Prometheus metrics under vLLM's names, so that its dashboards work unchanged.

Requests are observed where their deltas arrive in the event loop; times come from the
engine's clock (`RequestMetrics`). What the engine itself counts is in `engine_metrics.py`.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from trimaran.core.outputs import RequestMetrics, SequenceDelta
from trimaran.core.request import FinishReason
from trimaran.engine.async_engine import AsyncEngine
from trimaran.engine.delta_inbox import DeltaInbox
from trimaran.engine.encoder_engine import EncoderEngine
from trimaran.serve.engine_metrics import LABELS, EngineCollector, Renamed

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30)
ITL = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
LATENCY = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class ServerMetrics:
    """All of one server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._values: tuple[str, str] | None = None
        # When a sequence's last delta came, and how many tokens it has.
        self._last: dict[tuple[str, int], tuple[float, int]] = {}
        self._longest: dict[str, int] = {}  # tokens of a request's sequences that have ended
        self._success = self._counter(
            "request_success", "Requests that ended, by reason.", "finished_reason"
        )
        self._rejected: Tally[str] = Tally()
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens served.")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the cache.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._preemptions = self._counter("num_preemptions", "Sequences whose blocks were taken.")
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence.", ITL
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first.", ITL
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", LATENCY
        )
        self._phases = {
            phase: self._histogram(f"request_{phase}_time_seconds", text, LATENCY)
            for phase, text in (
                ("queue", "From arrival to the first step."),
                ("prefill", "From the first step to the first token."),
                ("decode", "From the first token to the last."),
                ("inference", "From the first step to the last token."),
            )
        }
        self._request_prompt = self._histogram("request_prompt_tokens", "Of a request.", TOKENS)
        self._request_output = self._histogram("request_generation_tokens", "Of a request.", TOKENS)
        self._request_longest = self._histogram(
            "request_max_num_generation_tokens", "Of a request's longest sequence.", TOKENS
        )
        self._asked_n = self._histogram("request_params_n", "Asked for.", (1, 2, 5, 10, 20))
        self._asked_tokens = self._histogram("request_params_max_tokens", "Asked for.", TOKENS)
        self.registry.register(
            Renamed(
                self._itl.collect, "inter_token_latency_seconds", "time_per_output_token_seconds"
            )
        )
        ProcessCollector(registry=self.registry)

    def attach(self, engine: AsyncEngine | EncoderEngine, model_name: str) -> None:
        """From now on the engine's own figures are among the metrics."""
        self._values = (model_name, "0")
        for metric in (
            self._prompt_tokens,
            self._cached,
            self._generated,
            self._preemptions,
            self._ttft,
            self._itl,
            self._tpot,
            self._e2e,
            self._request_prompt,
            self._request_output,
            self._request_longest,
            self._asked_n,
            self._asked_tokens,
            *self._phases.values(),
        ):
            metric.labels(*self._values)  # there from the start, at zero
        for reason in FinishReason:
            self._success.labels(*self._values, reason.value)
        self.registry.register(EngineCollector(engine, self._values, self._rejected))

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def histograms(self) -> dict[str, dict[str, list[float]]]:
        """TTFT, ITL and TPOT so far: upper bounds in seconds, and how many fell below each but
        not below the one before; the last count is of those above all bounds."""
        return {
            name: _counts(metric)
            for name, metric in (("ttft", self._ttft), ("itl", self._itl), ("tpot", self._tpot))
        }

    # ------------------------------------------------------------------ observations

    def rejected(self, reason: str) -> None:
        """A request was refused before it was handed in."""
        self._rejected[reason] += 1

    def came(self, found: Sequence[SequenceDelta]) -> None:
        """Deltas of one request have arrived."""
        now = time.monotonic()
        for delta in found:
            if not delta.token_ids:
                continue
            key = (delta.request_id, delta.index)
            before, tokens = self._last.get(key, (None, 0))
            self._last[key] = (now, tokens + len(delta.token_ids))
            self._generated.labels(*self._names).inc(len(delta.token_ids))
            if before is not None:
                self._itl.labels(*self._names).observe(now - before)
            elif delta.index == 0 and delta.metrics is not None and delta.metrics.ttft is not None:
                self._ttft.labels(*self._names).observe(delta.metrics.ttft)
            if delta.finish_reason is not None:
                self._keep_longest(delta.request_id, self._last.pop(key)[1])

    def ended(self, streams: Iterable[DeltaInbox]) -> None:
        """Requests have ended, or their client has left."""
        for stream in streams:
            request = stream.request
            for index in range(request.params.n):
                _, tokens = self._last.pop((request.id, index), (0.0, 0))
                self._keep_longest(request.id, tokens)
            longest = self._longest.pop(request.id)
            metrics = stream.metrics
            reason = stream.finish_reason or FinishReason.ABORT
            self._success.labels(*self._names, reason.value).inc()
            if metrics is None:
                continue
            self._prompt_tokens.labels(*self._names).inc(len(request.prompt))
            self._cached.labels(*self._names).inc(metrics.cached_tokens)
            self._preemptions.labels(*self._names).inc(metrics.preemptions)
            self._request_prompt.labels(*self._names).observe(len(request.prompt))
            self._request_output.labels(*self._names).observe(stream.tokens)
            self._request_longest.labels(*self._names).observe(longest)
            self._asked_n.labels(*self._names).observe(request.params.n)
            if request.params.max_tokens is not None:
                self._asked_tokens.labels(*self._names).observe(request.params.max_tokens)
            self._times(metrics, stream.tokens, request.params.n)

    def _keep_longest(self, request_id: str, tokens: int) -> None:
        self._longest[request_id] = max(tokens, self._longest.get(request_id, 0))

    def _times(self, metrics: RequestMetrics, tokens: int, n: int) -> None:
        begin, first, end = metrics.first_scheduled, metrics.first_token, metrics.finished
        # Of a prompt that came in pieces the time before its end isn't waiting.
        arrival = metrics.prompt_complete or metrics.arrival
        if begin is not None:
            begin = max(begin, arrival)
            self._phase("queue", begin - arrival)
        if begin is None or first is None or end is None:
            return
        self._phase("prefill", first - begin)
        self._phase("decode", end - first)
        self._phase("inference", end - begin)
        self._e2e.labels(*self._names).observe(end - arrival)
        if tokens > n:
            self._tpot.labels(*self._names).observe((end - first) / (tokens / n - 1))

    def _phase(self, name: str, seconds: float) -> None:
        self._phases[name].labels(*self._names).observe(max(0.0, seconds))

    # ------------------------------------------------------------------ parts

    @property
    def _names(self) -> tuple[str, str]:
        return self._values or ("", "0")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, LABELS, registry=self.registry, buckets=buckets)


def _counts(metric: Histogram) -> dict[str, list[float]]:
    bounds: list[float] = []
    below: list[float] = []
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bounds.append(float(sample.labels["le"]))
                below.append(sample.value)
    counts = [high - low for low, high in zip([0.0, *below], below, strict=False)]
    return {"bounds": bounds[:-1], "counts": counts}
