"""The simulator against the real engine, and the presets' decisions on a fixed trace."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import tiny_model

from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.clock import VirtualClock
from trimaran.core.config import EngineConfig
from trimaran.core.errors import ParameterError
from trimaran.core.slo import BATCH, INTERACTIVE, STANDARD
from trimaran.engine.core import EngineCore
from trimaran.engine.tiers import make_cache
from trimaran.schedule.scheduler import Scheduler
from trimaran.simulate.backends import PacedBackend, PlanCost
from trimaran.simulate.replay import Report, replay, silent_tokenizer, simulate
from trimaran.simulate.trace import TraceRequest, read_trace, spread, write_trace

PRESETS = ("vllm", "sglang", "trtllm", "fastertransformer")
COST = PlanCost(step=2e-3, row=2e-4, token=3e-5, position=1e-7, pair=2e-8)
GOLDEN = Path(__file__).parent / "golden"
TOKENS = 384  # of the cache: some of the requests have to wait, or to be preempted


def a_trace(count: int = 24, seed: int = 0) -> list[TraceRequest]:
    """Conversations that share prefixes, of several classes, faster than they can be served."""
    rng = np.random.default_rng(seed)
    system = tuple(rng.integers(1, 250, 37).tolist())
    trace = []
    for i in range(count):
        own = tuple(rng.integers(1, 250, int(rng.integers(3, 60))).tolist())
        prompt = system + own if i % 3 else own
        trace.append(
            TraceRequest(
                arrival=float(np.round(i * 0.004, 6)),
                prompt=prompt,
                output_tokens=int(rng.integers(1, 24)),
                priority=int(rng.integers(-2, 3)),
                slo=(INTERACTIVE, STANDARD, BATCH)[i % 3],
            )
        )
    return trace


def options(preset: str, **changes: object) -> EngineConfig:
    given = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "max_model_len": 160}
    return EngineConfig(**(given | {"preset": preset} | changes))  # type: ignore[arg-type]


def simulated(trace: list[TraceRequest], config: EngineConfig) -> Report:
    return simulate(trace, config, COST, cache_tokens=TOKENS, max_model_len=160)


def real(trace: list[TraceRequest], config: EngineConfig) -> Report:
    """The same trace through an engine that really computes, on a clock of the same pace."""
    clock = VirtualClock()
    model = tiny_model()
    backend = PacedBackend(ReferenceBackend(model), clock, COST)
    blocks = TOKENS // config.block_size
    backend.allocate_cache(blocks, config.block_size)
    scheduler = Scheduler(config, make_cache(config, blocks), clock, max_model_len=160)
    tokenizer = silent_tokenizer(model.config.vocab_size)
    core = EngineCore(model.config, tokenizer, backend, scheduler, config, 160, clock)
    return replay(core, trace, clock)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_real_engine_makes_the_decisions_of_the_simulation(preset: str) -> None:
    trace = a_trace()
    config = options(preset)
    expected, found = simulated(trace, config), real(trace, config)
    assert found.decisions == expected.decisions
    assert found.metrics == expected.metrics
    assert len(found.answered) == len(trace)


@pytest.mark.parametrize("order", ["priority", "weighted-shortest"])
def test_so_it_does_with_policies_that_learn(order: str) -> None:
    trace = a_trace()
    config = options("vllm", order=order, chunking="fine")
    expected, found = simulated(trace, config), real(trace, config)
    assert found.decisions == expected.decisions


@pytest.mark.parametrize("preset", PRESETS)
def test_decisions_are_those_of_the_golden_log(preset: str) -> None:
    """A policy that decides otherwise shows here. TRIMARAN_WRITE_GOLDEN=1 writes them anew."""
    report = simulated(a_trace(), options(preset))
    log = "\n".join(report.decisions) + "\n"
    path = GOLDEN / f"{preset}.log"
    if os.environ.get("TRIMARAN_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(log)
    assert log == path.read_text()


def test_presets_differ_as_they_should() -> None:
    reports = {preset: simulated(a_trace(), options(preset)) for preset in PRESETS}
    assert reports["fastertransformer"].hit_rate == 0
    assert reports["sglang"].hit_rate > 0
    assert reports["trtllm"].preemptions == reports["fastertransformer"].preemptions == 0
    worst = max(reports.values(), key=lambda report: report.mean("ttft"))
    assert worst is reports["fastertransformer"]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(PRESETS),
    st.sampled_from(["fcfs", "priority", "weighted-shortest"]),
)
def test_every_request_of_any_trace_is_answered(seed: int, preset: str, order: str) -> None:
    trace = a_trace(16, seed)
    report = simulated(trace, options(preset, order=order))
    assert [m.output_tokens if m else 0 for m in report.metrics] == [
        request.output_tokens for request in trace
    ]
    assert all(m.first_token is not None and m.ttft >= 0 for m in report.answered)  # type: ignore[operator]


def test_an_idle_engine_is_as_fast_as_its_steps_cost() -> None:
    (alone,) = a_trace(1)
    report = simulated([alone], options("vllm"))
    (metrics,) = report.answered
    length = len(alone.prompt)
    pairs = length * (length + 1) // 2
    assert metrics.ttft == pytest.approx(COST.step + COST.token * length + COST.pair * pairs)
    later = spread([replace(alone, arrival=1.0)], 2)
    assert later[0].arrival == 2.0
    twice = simulated([alone, *later], options("vllm"))
    assert twice.answered[0].ttft == metrics.ttft


def test_a_trace_goes_to_a_file_and_back(tmp_path: Path) -> None:
    trace = a_trace()
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"arrival": 0, "prompt": [1]}, "output_tokens"),
        ({"arrival": 0, "prompt": [], "output_tokens": 1}, "prompt"),
        ({"arrival": 0, "prompt": [1], "output_tokens": 0}, "output_tokens"),
        ({"arrival": 0, "prompt": [1], "output_tokens": 1, "wen": 1}, "wen"),
        ([], "object"),
    ],
)
def test_an_unsound_line_is_named(tmp_path: Path, line: object, what: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(ParameterError, match=f"line 1.*{what}"):
        read_trace(path)
