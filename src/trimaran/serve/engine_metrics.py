"""What Prometheus reads off an engine when it asks: gauges, counters, and its histograms.

Names are vLLM's and SGLang's where they have one, else `trimaran:`. Speculative decoding has
none here, for the engine has no drafts: a counter at zero would claim that none were accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trimaran.engine.async_engine import AsyncEngine
from trimaran.engine.encoder_engine import EncoderEngine
from trimaran.engine.metrics import Histogram

LABELS = ("model_name", "engine")

REJECTIONS = ("queue_full", "draining", "max_waiting")
"""Why a request is refused for load; each is there from the start, at zero."""
FAILURES = ("hang", "stall")
"""Why the watchdog ends requests; each is there from the start, at zero."""


class EngineCollector(Collector):
    """Reads the engine's state when it is asked for; costs the engine nothing.

    Args:
        values: of `LABELS`.
        rejections: requests that the server refused before the engine saw them, by reason.
    """

    def __init__(
        self,
        engine: AsyncEngine | EncoderEngine,
        values: tuple[str, str],
        rejections: Mapping[str, int],
    ) -> None:
        self._core = engine.core
        self._values = values
        self._rejections = rejections

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._prefixes()
        yield from self._fragmentation()
        yield from self._tiers()
        yield from self._steps()
        yield from self._troubles()
        yield from self._objective()
        yield from self._about()

    # ------------------------------------------------------------------ groups

    def _load(self) -> Iterator[Metric]:
        scheduler = self._core.scheduler
        running, waiting = scheduler.num_running, scheduler.num_waiting
        usage = scheduler.kv.usage()
        share = usage.held / max(1, usage.total)
        held = "Share of the KV blocks that requests hold (0 to 1)."
        yield self._gauge("vllm:num_requests_running", "Sequences that run.", running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait.", waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", held, share)
        yield self._gauge("vllm:gpu_cache_usage_perc", held + " vLLM's former name.", share)
        yield self._gauge("sglang:num_running_reqs", "Sequences that run.", running)
        yield self._gauge("sglang:num_queue_reqs", "Sequences that wait.", waiting)
        yield self._gauge("sglang:token_usage", held, share)
        blocks = GaugeMetricFamily(
            "trimaran:kv_blocks", "KV blocks by state.", labels=(*LABELS, "state")
        )
        for state in ("free", "held", "cached"):
            blocks.add_metric((*self._values, state), getattr(usage, state))
        yield blocks

    def _prefixes(self) -> Iterator[Metric]:
        usage = self._core.scheduler.kv.usage()
        queried, hit = usage.queried_tokens, usage.hit_tokens
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens that were looked up.", queried
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens that were found.", hit)
        yield self._gauge(
            "sglang:cache_hit_rate",
            "Of the prompt tokens looked up since the start, the share that was found (0 to 1).",
            usage.hit_rate,
        )

    def _fragmentation(self) -> Iterator[Metric]:
        kv = self._core.scheduler.kv
        last = self._core.steps.last
        if last is None or kv.usage().held == 0:
            live, share = 0, 0.0
        else:
            live, share = last.live, last.fragmentation(kv.block_size)
        yield self._gauge(
            "trimaran:kv_live_tokens",
            "Tokens whose KV lies in held blocks after the last step, shared ones once.",
            live,
        )
        yield self._gauge(
            "trimaran:kv_fragmentation_ratio",
            "1 - live tokens / (held blocks x block size) after the last step (0 to 1).",
            share,
        )

    def _tiers(self) -> Iterator[Metric]:
        loading = self._core.scheduler.loading
        if loading is None:
            return
        usage = loading.tiers.usage()
        used = GaugeMetricFamily(
            "trimaran:kv_tier_bytes", "KV in a tier below the cache.", labels=(*LABELS, "tier")
        )
        used.add_metric((*self._values, "host"), usage.host_bytes)
        used.add_metric((*self._values, "disk"), usage.disk_bytes)
        yield used
        blocks = {
            name: getattr(usage, name)
            for name in ("saved", "persisted", "loaded", "dropped", "failed")
        }
        yield self._counters(
            "trimaran:kv_tier_blocks", "KV blocks by what the tiers did with them.", "event", blocks
        )

    def _steps(self) -> Iterator[Metric]:
        metrics = self._core.metrics
        yield self._counter("trimaran:steps", "Forwards that were run.", metrics.steps)
        for name, text, histogram in (
            ("vllm:iteration_tokens_total", "Tokens of a step.", metrics.step_tokens),
            (
                "trimaran:step_interval_seconds",
                "From the start of a forward to that of the next, with work all the time.",
                metrics.step_interval_seconds,
            ),
            (
                "trimaran:schedule_seconds",
                "Deciding on a step and making its plan.",
                metrics.schedule_seconds,
            ),
            (
                "trimaran:compute_gap_seconds",
                "From the end of a forward to the start of the next, with work all the time.",
                metrics.compute_gap_seconds,
            ),
        ):
            yield self._histogram(name, text, histogram)

    def _troubles(self) -> Iterator[Metric]:
        metrics = self._core.metrics
        yield self._counters(
            "vllm:admission_rejections",
            "Requests that were refused for load, by reason.",
            "reason",
            dict.fromkeys(REJECTIONS, 0) | dict(self._rejections) | dict(metrics.rejections),
        )
        yield self._counters(
            "trimaran:watchdog_failures",
            "Requests that the watchdog ended, by reason.",
            "reason",
            dict.fromkeys(FAILURES, 0) | dict(metrics.failures),
        )

    def _objective(self) -> Iterator[Metric]:
        classes = dict(self._core.metrics.objective.classes)
        for name, text in (
            ("requests", "Requests answered, by SLO class."),
            ("kept", "Those that kept all targets of their class."),
            ("cost", "What they cost in the objective."),
        ):
            found = {slo: getattr(tally, name) for slo, tally in classes.items()}
            yield self._counters(f"trimaran:slo_{name}", text, "slo", found)

    def _about(self) -> Iterator[Metric]:
        core = self._core
        config, kv = core.config, core.scheduler.kv
        cache = {
            "block_size": str(kv.block_size),
            "cache_dtype": core.config.kv_format(),
            "enable_prefix_caching": str(config.prefix_cache),
            "num_gpu_blocks": str(kv.num_blocks),
            "kv_host_bytes": str(config.kv_host_bytes),
            "index": config.index,
        }
        yield self._info("vllm:cache_config_info", "The cache's configuration, in labels.", cache)
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        yield self._info(
            "vllm:lora_requests_info",
            "Adapters in use; this engine has none. The value is the time of the answer.",
            adapters,
            time.time(),
        )

    # ------------------------------------------------------------------ forms

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(self._values, value)
        return gauge

    def _info(self, name: str, text: str, labels: Mapping[str, str], value: float = 1.0) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=(*LABELS, *labels))
        gauge.add_metric((*self._values, *labels.values()), value)
        return gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=LABELS)
        counter.add_metric(self._values, value)
        return counter

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        counter = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            counter.add_metric((*self._values, key), value)
        return counter

    def _histogram(self, name: str, text: str, own: Histogram) -> Metric:
        counts, total = list(own.counts), own.sum
        cumulated: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip((*own.bounds, float("inf")), counts, strict=True):
            below += count
            cumulated.append(("+Inf" if bound == float("inf") else str(bound), below))
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, cumulated, total)
        return family


class Renamed(Collector):
    """A metric under a second name."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], old: str, new: str) -> None:
        self._collect = collect
        self._old = old
        self._new = new

    def collect(self) -> Iterator[Metric]:
        for metric in self._collect():
            own = Metric(self._new, metric.documentation, metric.type)
            for sample in metric.samples:
                own.samples.append(sample._replace(name=sample.name.replace(self._old, self._new)))
            yield own
