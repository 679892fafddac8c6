"""Prometheus metrics under vLLM's names, so that its dashboards work unchanged.

Requests are observed where their deltas arrive in the event loop; times come from the
engine's clock (`RequestMetrics`). Gauges and the cache's counters are read from the engine
when Prometheus asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trimaran.core.outputs import RequestMetrics, SequenceDelta
from trimaran.core.request import FinishReason
from trimaran.engine.async_engine import AsyncEngine, RequestStream

LABELS = ("model_name", "engine")

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30)
ITL = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
LATENCY = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class ServerMetrics:
    """All of one server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._values: tuple[str, str] | None = None
        self._last: dict[tuple[str, int], float] = {}  # when a sequence's last delta came
        self._success = self._counter(
            "request_success", "Requests that ended, by reason.", "finished_reason"
        )
        self._rejected = self._counter(
            "admission_rejections", "Requests that were refused, by reason.", "reason"
        )
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

    def attach(self, engine: AsyncEngine, model_name: str) -> None:
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
            *self._phases.values(),
        ):
            metric.labels(*self._values)  # there from the start, at zero
        self.registry.register(_EngineCollector(engine, self._values))

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
        self._rejected.labels(*self._names, reason).inc()

    def came(self, found: Sequence[SequenceDelta]) -> None:
        """Deltas of one request have arrived."""
        now = time.monotonic()
        for delta in found:
            if not delta.token_ids:
                continue
            key = (delta.request_id, delta.index)
            before = self._last.get(key)
            self._last[key] = now
            self._generated.labels(*self._names).inc(len(delta.token_ids))
            if before is not None:
                self._itl.labels(*self._names).observe(now - before)
            elif delta.index == 0 and delta.metrics is not None:
                metrics = delta.metrics
                if metrics.first_token is not None:
                    self._ttft.labels(*self._names).observe(metrics.first_token - metrics.arrival)
            if delta.finish_reason is not None:
                del self._last[key]

    def ended(self, streams: Iterable[RequestStream]) -> None:
        """Requests have ended, or their client has left."""
        for stream in streams:
            request = stream.request
            for index in range(request.params.n):
                self._last.pop((request.id, index), None)
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
            self._times(metrics, stream.tokens, request.params.n)

    def _times(self, metrics: RequestMetrics, tokens: int, n: int) -> None:
        begin, first, end = metrics.first_scheduled, metrics.first_token, metrics.finished
        if begin is not None:
            self._phase("queue", begin - metrics.arrival)
        if begin is None or first is None or end is None:
            return
        self._phase("prefill", first - begin)
        self._phase("decode", end - first)
        self._phase("inference", end - begin)
        self._e2e.labels(*self._names).observe(end - metrics.arrival)
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


class _EngineCollector(Collector):
    """Reads the engine's state when it is asked for."""

    def __init__(self, engine: AsyncEngine, values: tuple[str, str]) -> None:
        self._engine = engine
        self._values = values

    def collect(self) -> Iterator[Metric]:
        scheduler = self._engine.core.scheduler
        usage = scheduler.kv.usage()
        gauges = {
            "num_requests_running": ("Sequences that run.", scheduler.num_running),
            "num_requests_waiting": ("Sequences that wait.", scheduler.num_waiting),
            "kv_cache_usage_perc": (
                "Share of the KV blocks that requests hold (0 to 1).",
                usage.held / max(1, usage.total),
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        counters = {
            "prefix_cache_queries": ("Prompt tokens that were looked up.", usage.queried_tokens),
            "prefix_cache_hits": ("Prompt tokens that were found.", usage.hit_tokens),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._values, value)
            yield counter
        config = self._engine.core.config
        about = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The cache's configuration, in labels.",
            labels=("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        blocks, size = str(usage.total), str(scheduler.kv.block_size)
        about.add_metric(("0", size, blocks, str(config.prefix_cache)), 1)
        yield about
