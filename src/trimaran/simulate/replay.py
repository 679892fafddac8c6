"""Runs a trace through an engine on a virtual clock."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from trimaran.core.clock import VirtualClock
from trimaran.core.config import EngineConfig
from trimaran.core.outputs import RequestMetrics
from trimaran.core.request import FinishReason, Request
from trimaran.core.sampling_params import SamplingParams
from trimaran.engine.core import EngineCore
from trimaran.engine.tiers import make_cache
from trimaran.models.config import ModelConfig
from trimaran.models.rope import RopeSpec
from trimaran.models.tokenizer import Tokenizer
from trimaran.models.vocabulary import Vocabulary
from trimaran.schedule.scheduler import Scheduler
from trimaran.schedule.step import ScheduledStep
from trimaran.simulate.backends import Cost, SimulatedBackend
from trimaran.simulate.trace import TraceRequest


@dataclass(slots=True)
class Report:
    """What a replay gave; times in seconds on the virtual clock.

    Attributes:
        metrics: of each request that was answered, in the trace's order; None for others.
        decisions: a line a step: its time, and each request's first position and rows.
        seconds: from the first arrival to the end of the last answer.
        objective: Σ w·(α·TTFT + β·TPOT + γ·ITL), see `core/slo.py`.
        hit_rate: share of the prompts' tokens that the prefix cache supplied.
        preemptions: sequences whose blocks were taken back.
    """

    metrics: list[RequestMetrics | None]
    decisions: list[str] = field(default_factory=list)
    seconds: float = 0.0
    objective: float = 0.0
    hit_rate: float = 0.0
    preemptions: int = 0

    @property
    def answered(self) -> list[RequestMetrics]:
        """Metrics of the requests that were answered."""
        return [metrics for metrics in self.metrics if metrics is not None]

    def quantile(self, name: str, share: float) -> float:
        """Of `ttft`, `tpot` or `itl` over the requests; 0 where none was answered."""
        values = sorted(getattr(metrics, name) or 0.0 for metrics in self.answered)
        if not values:
            return 0.0
        return values[min(len(values) - 1, int(share * len(values)))]

    def mean(self, name: str) -> float:
        """Of `ttft`, `tpot` or `itl` over the requests; 0 where none was answered."""
        values = [getattr(metrics, name) or 0.0 for metrics in self.answered]
        return statistics.fmean(values) if values else 0.0


def replay(core: EngineCore, trace: Sequence[TraceRequest], clock: VirtualClock) -> Report:
    """Hands each request in when it arrives and steps until all have ended.

    Args:
        core: over a `SimulatedBackend` or a `PacedBackend` of `clock`; has no requests.
        trace: in order of arrival.
    """
    report = Report([None] * len(trace))
    begin = clock.now()
    names = {f"r{i}": i for i in range(len(trace))}

    def note(step: ScheduledStep) -> None:
        report.decisions.append(_line(step, clock.now() - begin))
        report.preemptions += len(step.preempted)

    core.on_step = note
    coming = 0
    while coming < len(trace) or core.has_work:
        while coming < len(trace) and begin + trace[coming].arrival <= clock.now():
            core.add(_request(trace[coming], f"r{coming}", begin))
            coming += 1
        if not core.has_work:
            clock.advance(begin + trace[coming].arrival - clock.now())
            continue
        for delta in core.step():
            if delta.finish_reason is FinishReason.LENGTH:
                report.metrics[names[delta.request_id]] = delta.metrics
    core.on_step = None
    usage = core.scheduler.kv.usage()
    report.seconds = clock.now() - begin
    report.objective = core.metrics.objective.value
    report.hit_rate = usage.hit_tokens / max(1, usage.queried_tokens)
    return report


def simulate(
    trace: Sequence[TraceRequest],
    config: EngineConfig,
    cost: Cost,
    *,
    cache_tokens: int,
    max_model_len: int,
) -> Report:
    """Replays a trace through a new engine that computes nothing.

    Args:
        config: its policies and limits.
        cost: of a step, such as `PlanCost(*engine.core.scheduler.cost.coefficients)`.
        cache_tokens: that the KV cache holds.
        max_model_len: longest prompt and output together.

    Raises:
        RequestError, CapacityError: a request of the trace could never be served.
    """
    clock = VirtualClock()
    vocabulary = 1 + max((max(request.prompt) for request in trace), default=0)
    model = _model(vocabulary, max_model_len)
    kv = make_cache(config, cache_tokens // config.block_size)
    scheduler = Scheduler(config, kv, clock, max_model_len=max_model_len)
    backend = SimulatedBackend(clock, cost, vocabulary)
    tokenizer = silent_tokenizer(vocabulary)
    core = EngineCore(model, tokenizer, backend, scheduler, config, max_model_len, clock)
    return replay(core, trace, clock)


def _request(each: TraceRequest, name: str, begin: float) -> Request:
    params = SamplingParams(temperature=0, max_tokens=each.output_tokens, ignore_eos=True)
    return Request(
        name,
        list(each.prompt),
        params,
        begin + each.arrival,
        each.priority,
        cache_salt=each.cache_salt,
        slo=each.slo,
    )


def _line(step: ScheduledStep, now: float) -> str:
    """A decision in words: "0.012500 r3:0+64 r1:70+1 | r2" (preempted ones at the end)."""
    parts = [f"{entry.sequence.id}:{entry.start}+{entry.count}" for entry in step.entries]
    lost = [sequence.id for sequence in step.preempted]
    return " ".join([f"{now:.6f}", *parts, *(["|", *lost] if lost else [])])


def _model(vocabulary: int, context: int) -> ModelConfig:
    """Only the sizes matter that a request is checked against."""
    return ModelConfig(
        architecture="llama",
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        context_length=context,
        rms_norm_eps=1e-5,
        rope=RopeSpec(dim=64, theta=10000.0),
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=None,
        eos_token_ids=(),
    )


class _NoText:
    def encode(self, text: str, parse_special: bool) -> list[int]:
        raise NotImplementedError("a trace has token ids, no text")


def silent_tokenizer(size: int) -> Tokenizer:
    """A tokenizer of `size` tokens without text, for traces, which are made of ids."""
    return Tokenizer(Vocabulary(_NoText(), size, lambda token: b"", frozenset(), None, None))
