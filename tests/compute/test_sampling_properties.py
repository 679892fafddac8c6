"""Properties of every sampler: what may be chosen, how often, and of what it is independent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.compute.native import _native
from trimaran.compute.native.sampler import NativeSampler
from trimaran.compute.reference.sampler import ReferenceSampler
from trimaran.core.errors import BackendError
from trimaran.core.sampling_batch import Sampler, SamplingBatch

SAMPLERS: dict[str, Callable[[], Sampler]] = {"reference": ReferenceSampler} | {
    isa: (lambda isa=isa: NativeSampler(isa)) for isa in _native.available_isas()
}
EVERY = pytest.mark.parametrize("name", SAMPLERS)
TOLERANCE = 1e-6  # of probability, at every boundary


@dataclass(frozen=True)
class Choice:
    """One choice; `adjust` has rows (id, bias, repetition, penalty)."""

    row: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5
    adjust: tuple[tuple[int, float, float, float], ...] = ()


def batch_of(choices: list[Choice]) -> SamplingBatch:
    adjust = [a for choice in choices for a in choice.adjust]
    column = [np.asarray([a[i] for a in adjust], np.float32) for i in (1, 2, 3)]
    return SamplingBatch(
        rows=np.asarray([c.row for c in choices], np.int32),
        temperature=np.asarray([c.temperature for c in choices], np.float32),
        top_k=np.asarray([c.top_k for c in choices], np.int32),
        top_p=np.asarray([c.top_p for c in choices], np.float32),
        min_p=np.asarray([c.min_p for c in choices], np.float32),
        uniforms=np.asarray([c.uniform for c in choices], np.float64),
        adjust_starts=np.cumsum([0] + [len(c.adjust) for c in choices], dtype=np.int32),
        adjust_ids=np.asarray([a[0] for a in adjust], np.int32),
        adjust_bias=column[0],
        adjust_repetition=column[1],
        adjust_penalty=column[2],
    )


def adjusted(logits: npt.NDArray[np.float32], choice: Choice) -> npt.NDArray[np.float32]:
    values = logits.copy()
    for token, bias, repetition, penalty in choice.adjust:
        value = values[token] + np.float32(bias)
        factor = np.float32(repetition)
        value = value / factor if value > 0 else value * factor
        values[token] = value - np.float32(penalty)
    return values


def kept_tokens(values: npt.NDArray[np.float32], choice: Choice, slack: float) -> set[int]:
    """Tokens the filters keep, in float64, with top-p and min-p moved by `slack`."""
    scaled = values.astype(np.float64) / np.float64(np.float32(choice.temperature))
    weights = np.exp(scaled - scaled.max())
    ranking = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if choice.top_k:
        ranking = ranking[: choice.top_k]
    if choice.top_p < 1:
        mass = np.cumsum(weights[ranking])
        target = (np.float64(np.float32(choice.top_p)) + slack) * mass[-1]
        ranking = ranking[: 1 + int(np.searchsorted(mass, target))]
    if choice.min_p > 0:
        least = np.float64(np.float32(choice.min_p)) * (1 - slack)
        # The first stays whatever the slack, and alone where others only round to its weight.
        ranking = [i for i in ranking if weights[i] >= least or i == ranking[0]]
    return set(ranking)


def acceptable(logits: npt.NDArray[np.float32], choice: Choice, token: int) -> bool:
    """Whether `token` is right, or right for parameters within rounding of those given."""
    values = adjusted(logits, choice)
    if choice.temperature == 0:
        return token == int(np.argmax(values))
    scaled = values.astype(np.float64) / np.float64(np.float32(choice.temperature))
    weights = np.exp(scaled - scaled.max())
    for slack in (0.0, -TOLERANCE, TOLERANCE):
        kept = sorted(kept_tokens(values, choice, slack))
        if token not in kept:
            continue
        mass = np.cumsum(weights[kept]) / weights[kept].sum()
        place = kept.index(token)
        before = mass[place - 1] if place else 0.0
        if before - TOLERANCE <= choice.uniform <= mass[place] + TOLERANCE:
            return True
    return False


def random_logits(seed: int, vocab: int, kind: str) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(vocab)
    if kind == "peaked":
        values *= 8
    elif kind == "tied":
        values = np.round(values * 2) / 2
    elif kind == "equal":
        values[:] = 1.5
    elif kind == "forbidden":
        values[rng.random(vocab) < 0.9] = -np.inf
        values[rng.integers(vocab)] = 0.25
    elif kind == "wide":
        values *= 200
    elif kind == "huge":  # differences are beyond float32
        values = rng.uniform(-2e38, 2e38, vocab)
    elif kind == "subnormal":
        values *= 1e-42
    elif kind == "zeros":  # -0 and 0 are equal: ties
        values = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    return values.astype(np.float32)


KINDS = ("normal", "peaked", "tied", "equal", "forbidden", "wide", "huge", "subnormal", "zeros")


@st.composite
def cases(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], list[Choice]]:
    # From below one vector to above several blocks of each pass.
    vocab = draw(st.sampled_from([1, 2, 15, 16, 17, 100, 255, 257, 1023, 1025, 3000, 5001]))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    seed = draw(st.integers(0, 2**32 - 1))
    logits = np.stack([random_logits(seed + i, vocab, kind) for i, kind in enumerate(kinds)])
    adjustment = st.tuples(
        st.integers(0, vocab - 1),
        st.sampled_from([0.0, -np.inf, 3.5, -2.0]),
        st.sampled_from([1.0, 1.3, 0.7]),
        st.sampled_from([0.0, 0.5, -1.0]),
    )
    choice = st.builds(
        Choice,
        row=st.integers(0, len(kinds) - 1),
        temperature=st.sampled_from([0.0, 0.001, 0.3, 0.8, 1.0, 1.7, 100.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 40, 200, 1000, 4000, 2**31 - 1]),
        top_p=st.sampled_from([1.0, 0.9999999, 0.95, 0.5, 0.1, 1e-6]),
        min_p=st.sampled_from([0.0, 1e-5, 0.05, 0.5, 1.0]),
        uniform=st.floats(0, 1, exclude_max=True),
        adjust=st.lists(adjustment, max_size=4, unique_by=lambda a: a[0]).map(tuple),
    )
    return logits, draw(st.lists(choice, min_size=1, max_size=6))


def allowed(logits: npt.NDArray[np.float32], choices: list[Choice]) -> list[Choice]:
    """Choices that leave at least one token."""
    return [c for c in choices if (adjusted(logits[c.row], c) > -np.inf).any()]


@EVERY
@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_what_is_chosen(name: str, case: tuple[npt.NDArray[np.float32], list[Choice]]) -> None:
    logits, choices = case
    choices = allowed(logits, choices)
    before = logits.copy()
    tokens = SAMPLERS[name]().choose(logits, batch_of(choices))
    assert tokens.dtype == np.int32
    assert tokens.shape == (len(choices),)
    assert np.array_equal(logits, before), "the logits were modified"
    for choice, token in zip(choices, tokens, strict=True):
        assert acceptable(logits[choice.row], choice, int(token)), (choice, token)


@EVERY
@given(case=cases())
@settings(max_examples=50, deadline=None)
def test_independent_of_company(
    name: str, case: tuple[npt.NDArray[np.float32], list[Choice]]
) -> None:
    logits, choices = case
    choices = allowed(logits, choices)
    sampler = SAMPLERS[name]()
    together = sampler.choose(logits, batch_of(choices))
    for choice, token in zip(choices, together, strict=True):
        alone = logits[choice.row : choice.row + 1].copy()
        assert sampler.choose(alone, batch_of([replace(choice, row=0)]))[0] == token


@EVERY
@given(case=cases(), top=st.sampled_from([0, 1, 5, 100]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_scores(
    name: str,
    case: tuple[npt.NDArray[np.float32], list[Choice]],
    top: int,
    data: st.DataObject,
) -> None:
    logits, _ = case
    rows_of, vocab = logits.shape
    top = min(top, vocab)
    rows = np.asarray(
        data.draw(st.lists(st.integers(0, rows_of - 1), min_size=1, max_size=4)), np.int32
    )
    tokens = np.asarray([data.draw(st.integers(0, vocab - 1)) for _ in rows], np.int32)
    scores = SAMPLERS[name]().score(logits, rows, tokens, top)
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        values = logits[row].astype(np.float64)
        logprobs = values - values.max()
        with np.errstate(over="ignore"):
            logprobs = (logprobs - np.log(np.exp(logprobs).sum())).astype(np.float32)
        ranking = np.argsort(-logits[row], kind="stable")
        assert scores.ranks[i] == 1 + np.flatnonzero(ranking == token)[0]
        assert np.array_equal(scores.top_ids[i], ranking[:top])
        np.testing.assert_allclose(scores.logprobs[i], logprobs[token], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(
            scores.top_logprobs[i], logprobs[ranking[:top]], rtol=1e-6, atol=1e-6
        )
        alone = SAMPLERS[name]().score(
            logits[row : row + 1].copy(), np.zeros(1, np.int32), tokens[i : i + 1], top
        )
        for field in fields(scores):
            ours, theirs = getattr(scores, field.name)[i], getattr(alone, field.name)[0]
            assert ours.tobytes() == theirs.tobytes(), field.name


@EVERY
@pytest.mark.parametrize(
    "choice",
    [
        Choice(temperature=1.3),
        Choice(temperature=0.7, top_k=12),
        Choice(temperature=1.0, top_p=0.8),
        Choice(temperature=1.0, min_p=0.2),
        Choice(temperature=0.9, top_k=30, top_p=0.9, min_p=0.05, adjust=((3, 2.0, 1.2, 0.1),)),
    ],
)
def test_distribution(name: str, choice: Choice) -> None:
    """Frequencies follow the filtered softmax: chi-square below its 1 - 1e-6 quantile."""
    logits = random_logits(11, 40, "normal")[None] * 2
    rng = np.random.default_rng(2)
    count = 20_000
    draws = [replace(choice, uniform=float(u)) for u in rng.random(count)]
    tokens = SAMPLERS[name]().choose(logits, batch_of(draws))
    values = adjusted(logits[0], choice)
    kept = sorted(kept_tokens(values, choice, 0.0))
    weights = np.exp(values[kept].astype(np.float64) / choice.temperature)
    expected = count * weights / weights.sum()
    observed = np.bincount(tokens, minlength=len(values))
    assert observed[kept].sum() == count, "a token outside the kept ones"
    statistic = float(((observed[kept] - expected) ** 2 / expected).sum())
    freedom = len(kept) - 1
    # Wilson and Hilferty's approximation of the quantile; 4.75 is the normal one.
    quantile = freedom * (1 - 2 / (9 * freedom) + 4.75 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < quantile


@EVERY
def test_a_large_vocabulary(name: str) -> None:
    vocab = 152_000
    logits = np.stack([random_logits(i, vocab, kind) for i, kind in enumerate(KINDS)])
    choices = [
        Choice(row=row, temperature=temperature, top_k=top_k, top_p=top_p, uniform=0.37)
        for row in range(len(KINDS))
        for temperature, top_k, top_p in [
            (0.0, 0, 1.0),
            (1.0, 0, 1.0),
            (0.8, 50, 0.95),
            (1.0, 0, 0.9),
            (1.5, 20_000, 0.99),
        ]
    ]
    tokens = SAMPLERS[name]().choose(logits, batch_of(choices))
    expected = ReferenceSampler().choose(logits, batch_of(choices))
    for choice, token, other in zip(choices, tokens, expected, strict=True):
        assert token == other or acceptable(logits[choice.row], choice, int(token)), choice


@EVERY
def test_no_choice_is_no_token(name: str) -> None:
    tokens = SAMPLERS[name]().choose(np.zeros((0, 50), np.float32), batch_of([]))
    assert tokens.shape == (0,)


@EVERY
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nan_is_named(name: str, temperature: float) -> None:
    logits = np.zeros((3, 1100), np.float32)
    logits[2, 1090] = np.nan
    good = [Choice(row=0, temperature=temperature), Choice(row=1, temperature=temperature)]
    assert len(SAMPLERS[name]().choose(logits, batch_of(good))) == 2
    with pytest.raises(BackendError, match="row 2.*NaN"):
        SAMPLERS[name]().choose(logits, batch_of([*good, Choice(row=2, temperature=temperature)]))


@EVERY
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_is_named(name: str, temperature: float) -> None:
    logits = np.full((2, 30), -np.inf, np.float32)
    logits[0, 7] = 1.0
    banned = Choice(row=0, temperature=temperature, adjust=((7, -np.inf, 1.0, 0.0),))
    for choice, row in ((banned, 0), (Choice(row=1, temperature=temperature), 1)):
        with pytest.raises(BackendError, match=f"no token is allowed in row {row}"):
            SAMPLERS[name]().choose(logits, batch_of([choice]))
