"""The step cost model finds what made the times, whatever else disturbs them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.core.request import Request, Sequence
from trimaran.core.sampling_params import SamplingParams
from trimaran.schedule.cost_model import StepCostModel, StepLoad
from trimaran.schedule.selection import Selection

SLOW = (4e-3, 0.4e-3, 0.09e-3, 3e-7, 2e-8)
FAST = (60e-6, 1e-6, 0.2e-6, 1e-10, 1e-12)
COEFFICIENTS = st.sampled_from([SLOW, FAST, (0.2, 2e-3, 1.5e-3, 2e-6, 0.0), (1e-3, 0, 1e-4, 0, 0)])


def loads(seed: int) -> Callable[[], StepLoad]:
    draw = random.Random(seed)

    def load() -> StepLoad:
        rows = draw.randrange(64)
        decode = StepLoad(rows, 0, rows * draw.randrange(50, 1500), 0)
        if rows and draw.random() < 0.6:
            return decode
        return decode.with_chunk(draw.choice([0, 0, draw.randrange(1500)]), draw.randrange(1, 2048))

    return load


def seconds(true: tuple[float, ...], load: StepLoad) -> float:
    a, b, c, d, e = true
    return (
        a + b * load.decode_rows + c * load.prefill_tokens + d * load.decode_context
        + e * load.prefill_pairs
    )  # fmt: skip


def worst_error(
    model: StepCostModel, true: tuple[float, ...], load: Callable[[], StepLoad]
) -> float:
    kinds = [load() for _ in range(200)]
    return max(abs(model.predict(each) / seconds(true, each) - 1) for each in kinds)


@settings(max_examples=12, deadline=None)
@given(true=COEFFICIENTS, seed=st.integers(0, 99))
def test_exact_times_are_learnt(true: tuple[float, ...], seed: int) -> None:
    model, load = StepCostModel(), loads(seed)
    for _ in range(120):
        each = load()
        model.observe(each, seconds(true, each))
    assert worst_error(model, true, load) < 0.05
    assert all(found >= 0 for found in model.coefficients)


@settings(max_examples=12, deadline=None)
@given(true=COEFFICIENTS, seed=st.integers(0, 99), first=st.booleans())
def test_noise_and_stops_of_the_process_do_little_harm(
    true: tuple[float, ...], seed: int, first: bool
) -> None:
    model, load, draw = StepCostModel(), loads(seed), random.Random(seed + 1)
    for number in range(400):
        each = load()
        taken = seconds(true, each) * draw.lognormvariate(0, 0.1)
        if number % 29 == (0 if first else 5):
            taken += draw.choice([0.5, 30.0])
        model.observe(each, taken)
        assert all(np.isfinite(model.coefficients)) and min(model.coefficients) >= 0
    assert worst_error(model, true, load) < 0.25
    assert model.relative_error < 0.4


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_a_lasting_change_is_believed(factor: float) -> None:
    model, load = StepCostModel(), loads(3)
    for _ in range(300):
        each = load()
        model.observe(each, seconds(SLOW, each))
    changed = tuple(factor * own for own in SLOW)
    for _ in range(500):
        each = load()
        model.observe(each, seconds(changed, each))
    assert worst_error(model, changed, load) < 0.15


def test_what_recent_steps_say_nothing_about_is_remembered() -> None:
    model, load = StepCostModel(), loads(5)
    for _ in range(200):
        each = load()
        model.observe(each, seconds(SLOW, each))
    for number in range(3000):  # all decode
        each = StepLoad(1 + number % 8, 0, (1 + number % 8) * (100 + number % 900))
        model.observe(each, seconds(SLOW, each))
    chunk = StepLoad(4, 0, 2000).with_chunk(500, 1000)
    assert model.predict(chunk) == pytest.approx(seconds(SLOW, chunk), rel=0.1)


def test_it_is_a_function_of_what_was_observed() -> None:
    def run() -> tuple[float, ...]:
        model, load, draw = StepCostModel(), loads(1), random.Random(2)
        for _ in range(100):
            model.observe(load(), draw.random())
        return model.coefficients

    assert run() == run()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_ignored(bad: float) -> None:
    model = StepCostModel()
    before = model.coefficients
    model.observe(StepLoad(3, 0, 50), bad)
    assert model.coefficients == before and model.observations == 0


@settings(max_examples=25, deadline=None)
@given(
    true=COEFFICIENTS,
    rows=st.integers(0, 40),
    start=st.integers(0, 3000),
    budget=st.floats(1e-4, 3.0),
)
def test_the_largest_chunk_within_a_time(
    true: tuple[float, ...], rows: int, start: int, budget: float
) -> None:
    model, load = StepCostModel(), loads(7)
    for _ in range(80):
        each = load()
        model.observe(each, seconds(true, each))
    given_load = StepLoad(rows, 0, rows * 100)
    count = model.chunk_within(given_load, budget, start)
    assert count >= 0
    if count:
        assert model.predict(given_load.with_chunk(start, count)) <= budget * (1 + 1e-6)
    elif model.predict(given_load) < budget:
        assert model.predict(given_load.with_chunk(start, 1)) > budget * (1 - 1e-6)
    if count < 1 << 30 and model.predict(given_load) < budget:
        assert model.predict(given_load.with_chunk(start, count + 1)) > budget * (1 - 1e-6)


def test_the_parts_of_a_service_add_up_to_its_steps() -> None:
    model, load = StepCostModel(), loads(9)
    for _ in range(200):
        each = load()
        model.observe(each, seconds(SLOW, each))
    idle, chunk = StepLoad(), StepLoad().with_chunk(100, 400)
    assert model.prefill_seconds(100, 400) == pytest.approx(
        model.predict(chunk) - model.predict(idle)
    )
    model.decode_rows = 1.0  # alone, it pays for the whole step
    steps = sum(model.predict(StepLoad(1, 0, context)) for context in range(500, 600))
    assert model.decode_seconds(500, 100) == pytest.approx(steps, rel=0.01)


PARTS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=6
)


@given(parts=PARTS)
def test_the_load_of_a_step_counts_every_row_and_what_it_attends_to(
    parts: list[tuple[int, int, int]],
) -> None:
    sequence = Sequence(Request("", [1], SamplingParams()), 0, [1])
    chosen = Selection.of(
        [(sequence, 0, 0, start, count + more, count) for start, count, more in parts]
    )
    load = StepLoad.of(chosen)
    rows = [(start, count, count + more == 1) for start, count, more in parts]
    assert load.decode_rows == sum(decode for *_, decode in rows)
    assert load.prefill_tokens == sum(count for _, count, decode in rows if not decode)
    attended = [(sum(range(s + 1, s + n + 1)), decode) for s, n, decode in rows]
    assert load.decode_context == sum(pairs for pairs, decode in attended if decode)
    assert load.prefill_pairs == sum(pairs for pairs, decode in attended if not decode)
    chosen.decodes = all(count == 1 and more == 0 for _, count, more in parts)
    assert StepLoad.of(chosen) == load
