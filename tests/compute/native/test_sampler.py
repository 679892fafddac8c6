"""What only the native sampler promises: the same bits everywhere, clear refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import compute_threads, started_threads
from support.tiny import tiny_model

from trimaran.compute.native import _native
from trimaran.compute.native.backend import NativeBackend
from trimaran.compute.native.sampler import NativeSampler
from trimaran.core.errors import BackendError
from trimaran.core.sampling_batch import SamplingBatch

ISAS = _native.available_isas()
VOCAB = 20_011  # prime: a tail in every pass


def batch(count: int, **values: object) -> SamplingBatch:
    """`count` choices, of row i each unless `rows` is given; scalars are repeated."""
    defaults: dict[str, tuple[object, type]] = {
        "rows": (np.arange(count), np.int32),
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "uniforms": (0.5, np.float64),
    }
    columns = {
        name: np.broadcast_to(np.asarray(values.get(name, value), kind), (count,)).copy()
        for name, (value, kind) in defaults.items()
    }
    return SamplingBatch(
        **columns,
        adjust_starts=np.zeros(count + 1, np.int32),
        adjust_ids=np.zeros(0, np.int32),
        adjust_bias=np.zeros(0, np.float32),
        adjust_repetition=np.zeros(0, np.float32),
        adjust_penalty=np.zeros(0, np.float32),
    )


def adjusting(token: int) -> SamplingBatch:
    one = np.ones(1, np.float32)
    return replace(
        batch(1),
        adjust_starts=np.asarray([0, 1], np.int32),
        adjust_ids=np.asarray([token], np.int32),
        adjust_bias=one,
        adjust_repetition=one,
        adjust_penalty=one,
    )


def test_every_instruction_set_gives_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((6, VOCAB)) * [[0.1], [1], [3], [8], [50], [1]]).astype(
        np.float32
    )
    logits[5] = np.round(logits[5])  # ties
    count = 600
    choices = batch(
        count,
        rows=rng.integers(0, 6, count),
        temperature=rng.choice([0.0, 0.2, 0.9, 1.0, 3.0], count),
        top_k=rng.choice([0, 0, 20, 3000], count),
        top_p=rng.choice([1.0, 0.99, 0.7], count),
        min_p=rng.choice([0.0, 0.01], count),
        uniforms=rng.random(count),
    )
    rows, tokens = choices.rows[:40], rng.integers(0, VOCAB, 40).astype(np.int32)
    samplers = [NativeSampler(isa) for isa in ISAS]
    first = samplers[0].choose(logits, choices)
    scores = samplers[0].score(logits, rows, tokens, 20)
    for sampler in samplers[1:]:
        assert np.array_equal(sampler.choose(logits, choices), first)
        others = sampler.score(logits, rows, tokens, 20)
        for field in fields(scores):
            ours, theirs = getattr(scores, field.name), getattr(others, field.name)
            assert ours.tobytes() == theirs.tobytes(), field.name


@pytest.fixture(scope="module", params=[2, 3, 7])
def shared(request: pytest.FixtureRequest) -> Iterator[NativeSampler]:
    """A sampler on the threads of a back end."""
    backend = NativeBackend(tiny_model(), threads=request.param)
    yield backend.sampler
    backend.close()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 40),
    spread=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
)
def test_any_number_of_threads_gives_the_same_bits(
    shared: NativeSampler, seed: int, count: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((4, VOCAB)) * spread).astype(np.float32)
    choices = batch(
        count,
        rows=rng.integers(0, 4, count),
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0], count),
        top_k=rng.choice([0, 0, 40, 2000], count),
        top_p=rng.choice([1.0, 0.999, 0.8], count),
        min_p=rng.choice([0.0, 0.05, 1e-6], count),
        uniforms=rng.random(count),
    )
    alone, tokens = NativeSampler(ISAS[-1]), rng.integers(0, VOCAB, count).astype(np.int32)
    assert np.array_equal(shared.choose(logits, choices), alone.choose(logits, choices))
    scores, others = (s.score(logits, choices.rows, tokens, 5) for s in (shared, alone))
    for field in fields(scores):
        ours, theirs = getattr(scores, field.name), getattr(others, field.name)
        assert ours.tobytes() == theirs.tobytes(), field.name


def test_on_threads_the_first_bad_row_is_named(shared: NativeSampler) -> None:
    logits = np.zeros((64, VOCAB), np.float32)
    logits[[21, 40, 63], 7] = np.nan
    for _ in range(20):
        with pytest.raises(BackendError, match="row 21 "):
            shared.choose(logits, batch(64))
    good = np.delete(np.arange(64), [21, 40, 63]).astype(np.int32)
    tokens = shared.choose(logits, batch(61, rows=good, temperature=0.0))
    assert tokens.tolist() == [0] * 61


def test_a_back_end_that_was_closed_holds_no_threads() -> None:
    before = compute_threads()
    backend = NativeBackend(tiny_model(), threads=5)
    tokens = backend.sampler.choose(np.eye(9, VOCAB, dtype=np.float32), batch(9, temperature=0.0))
    assert tokens.tolist() == list(range(9))
    started_threads(before, 4)
    backend.close()
    assert compute_threads() <= before
    logits = np.arange(2 * VOCAB, dtype=np.float32).reshape(2, VOCAB)
    assert backend.sampler.choose(logits, batch(2, temperature=0.0)).tolist() == [VOCAB - 1] * 2


def test_uniforms_at_the_ends() -> None:
    """0 gives the first token with any weight, and the largest below 1 the last."""
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, [100, 7000, 20_001]] = [0.0, 3.0, -20.0]
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.9999999999), (5000, 1.0)):
        tokens = NativeSampler("portable").choose(
            logits,
            batch(2, rows=0, top_k=top_k, top_p=top_p, uniforms=[0.0, np.nextafter(1.0, 0.0)]),
        )
        assert tokens.tolist() == [100, 20_001]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("first", [0.0, -0.0])
def test_zeros_of_either_sign_are_ties(isa: str, first: float) -> None:
    logits = np.full((1, VOCAB), first, np.float32)
    logits[0, 1::2] = -first
    choices = batch(3, rows=0, top_k=5000, uniforms=[0.0, 0.5, np.nextafter(1.0, 0.0)])
    assert NativeSampler(isa).choose(logits, choices).tolist() == [0, 2500, 4999]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_infinite_logit_is_named(temperature: float) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, -1] = np.inf
    sampler = NativeSampler("portable")
    with pytest.raises(BackendError, match="row 1 is infinite"):
        sampler.choose(logits, batch(2, temperature=temperature))
    with pytest.raises(BackendError, match="row 1 is infinite"):
        sampler.score(logits, np.asarray([1], np.int32), np.zeros(1, np.int32), 0)


def test_scores_of_a_row_of_nan_name_it() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[2, 5] = np.nan
    rows = np.asarray([0, 2], np.int32)
    with pytest.raises(BackendError, match="row 2.*NaN"):
        NativeSampler("portable").score(logits, rows, np.zeros(2, np.int32), 3)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (batch(1, rows=2), "row 2 is outside the 2 rows"),
        (batch(1, rows=-1), "row -1 is outside"),
        (batch(1, temperature=np.nan), "temperature of choice 0"),
        (batch(1, temperature=-1.0), "temperature of choice 0"),
        (adjusting(VOCAB), f"token {VOCAB} is outside the vocabulary"),
        (adjusting(-1), "token -1 is outside the vocabulary"),
        (
            replace(adjusting(0), adjust_starts=np.asarray([0, 2], np.int32)),
            "adjustments of choice",
        ),
        (replace(adjusting(0), adjust_bias=np.zeros(2, np.float32)), "adjust_bias has 2 entries"),
        (replace(batch(2), top_k=np.zeros(1, np.int32)), "top_k has 1 entries, not 2"),
    ],
)
def test_what_is_out_of_range_is_refused(choices: SamplingBatch, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        NativeSampler("portable").choose(np.zeros((2, VOCAB), np.float32), choices)


@pytest.mark.parametrize(
    ("row", "token", "top", "message"),
    [
        (2, 0, 0, "row 2 is outside the 2 rows"),
        (0, VOCAB, 0, f"token {VOCAB} is outside"),
        (0, 0, VOCAB + 1, "most likely tokens of a vocabulary"),
    ],
)
def test_scores_out_of_range_are_refused(row: int, token: int, top: int, message: str) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    with pytest.raises(BackendError, match=message):
        NativeSampler("portable").score(
            logits, np.asarray([row], np.int32), np.asarray([token], np.int32), top
        )


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="sse9"):
        NativeSampler("sse9")
