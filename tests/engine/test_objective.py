"""TTFT, TPOT, ITL and the objective, on a clock that only the steps move."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny import make_core, tiny_model

from trimaran.compute.reference.backend import ReferenceBackend
from trimaran.core.clock import VirtualClock
from trimaran.core.outputs import RequestMetrics, SequenceDelta
from trimaran.core.request import Request
from trimaran.core.sampling_batch import Float32
from trimaran.core.sampling_params import SamplingParams
from trimaran.core.slo import BATCH, INTERACTIVE, STANDARD, SloClass
from trimaran.core.step_plan import PooledRows, StepPlan
from trimaran.engine.core import EngineCore
from trimaran.engine.objective import Objective


class TimedBackend(ReferenceBackend):
    """A step takes a second, and another for each ten rows."""

    clock: VirtualClock

    def run(self, plan: StepPlan, pooled: PooledRows | None = None) -> Float32:
        self.clock.advance(1.0 + plan.rows / 10)
        return super().run(plan, pooled)


def timed_core(**options: Any) -> EngineCore:
    backend = TimedBackend(tiny_model())
    core = make_core(backend, **options)
    assert isinstance(core.clock, VirtualClock)
    backend.clock = core.clock
    return core


def greedy(count: int, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **values)


def run(core: EngineCore) -> dict[str, RequestMetrics]:
    found: dict[str, RequestMetrics] = {}
    while core.has_work:
        for delta in core.step():
            assert delta.metrics is not None
            found[delta.request_id] = delta.metrics
    return found


def test_times_and_costs_of_two_requests() -> None:
    core = timed_core()
    fast = SloClass("fast", ttft=3.0, tpot=1.3, alpha=1.0, beta=10.0, gamma=2.0, weight=3.0)
    core.add(Request("a", [1] * 10, greedy(4), arrival=-1.0, slo=fast))
    core.step()  # ten rows: ends at 2.0
    core.add(Request("b", [2] * 19, greedy(1), arrival=core.clock.now(), slo=STANDARD))
    found = run(core)  # 1 + 19 rows: at 5.0; then two of one row each: 6.1, 7.2
    a, b = found["a"], found["b"]
    assert (a.ttft, a.itl, a.output_tokens) == (3.0, 3.0, 4)
    assert a.tpot == pytest.approx((7.2 - 2.0) / 3)
    assert (b.ttft, b.tpot, b.itl) == (3.0, 0.0, 0.0)
    assert a.cost == pytest.approx(3 * (3.0 + 10 * 5.2 / 3 + 2 * 3.0))
    assert b.cost == pytest.approx(3.0)
    objective = core.metrics.objective
    assert objective.value == pytest.approx(a.cost + b.cost)
    assert objective.requests == 2
    assert objective.attainment == 0.0  # a misses its TPOT, b its TTFT of 2 s


def test_sequences_of_one_request_have_gaps_of_their_own() -> None:
    core = timed_core()
    core.add(Request("n", [1] * 10, greedy(3, n=2)))
    metrics = run(core)["n"]
    assert (metrics.output_tokens, metrics.gaps) == (6, 4)
    assert metrics.tpot == pytest.approx(1.2) and metrics.itl == pytest.approx(1.2)
    assert core.metrics.objective.requests == 1


def test_who_was_not_answered_is_not_in_it() -> None:
    core = timed_core()
    core.add(Request("a", [1] * 5, greedy(50)))
    core.add(Request("b", [1] * 5, greedy(2), slo=BATCH))
    core.step()
    core.assemble(core.abort("a"))
    found = run(core)
    assert set(core.metrics.objective.classes) == {"batch"}
    assert found["b"].cost is not None


def test_the_end_by_a_stop_string_counts_once() -> None:
    core = timed_core()
    core.add(Request("free", [72, 101, 108], greedy(12)))
    text = "".join(_texts(core))
    core.add(Request("cut", [72, 101, 108], greedy(12, stop=text[2:4])))
    _texts(core)
    assert core.metrics.objective.requests == 2


def _texts(core: EngineCore) -> list[str]:
    deltas: list[SequenceDelta] = []
    while core.has_work:
        deltas += core.step()
    return [delta.text for delta in deltas]


def test_targets_that_were_kept() -> None:
    objective = Objective()
    good = RequestMetrics(0.0, first_token=0.4, decode_seconds=0.2, gaps=10, itl=0.05)
    objective.add(INTERACTIVE, good)
    late = RequestMetrics(0.0, first_token=0.6, decode_seconds=0.2, gaps=10)
    slow = RequestMetrics(0.0, first_token=0.1, decode_seconds=0.4, gaps=10)
    objective.add(INTERACTIVE, late)
    objective.add(INTERACTIVE, slow)
    objective.add(BATCH, slow)  # which has no targets
    assert objective.attainment == 0.5
    assert objective.classes["interactive"].kept == 1
    assert Objective().attainment == 1.0


def test_the_cost_model_sees_every_step_of_the_engine() -> None:
    core = timed_core()
    for number in range(6):
        core.add(Request(str(number), [number] * (5 + 7 * number), greedy(20)))
        core.step()
    run(core)
    a, b, c, _, _ = core.scheduler.cost.coefficients
    assert core.scheduler.cost.observations > 20
    assert a == pytest.approx(1.0, rel=0.1)
    assert b == pytest.approx(0.1, rel=0.2) and c == pytest.approx(0.1, rel=0.2)
