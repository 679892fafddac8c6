import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimaran.core.sampling_params import SamplingParams
from trimaran.engine.adjustments import Adjustments, adjustments_for

VOCAB = 40
tokens = st.integers(0, VOCAB - 1)


def naive(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], eos: int
) -> np.ndarray:
    """The processors by the letter, over the whole vocabulary."""
    values = logits.astype(np.float64)
    if len(output) < params.min_tokens:
        values[eos] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for token in set(prompt) | set(output):
        rate = params.repetition_penalty
        values[token] = values[token] / rate if values[token] > 0 else values[token] * rate
    for token in set(output):
        values[token] -= params.presence_penalty
        values[token] -= params.frequency_penalty * output.count(token)
    return values


@given(
    st.lists(tokens, min_size=1, max_size=40),
    st.lists(tokens, max_size=60),
    st.dictionaries(tokens, st.floats(-3, 3), max_size=30),
    st.sampled_from([1.0, 1.3, 0.7]),
    st.sampled_from([0.0, 0.5, -0.5]),
    st.sampled_from([0.0, 0.25]),
    st.integers(0, 5),
)
def test_incremental_adjustments_equal_the_definition(
    prompt: list[int],
    output: list[int],
    bias: dict[int, float],
    repetition: float,
    presence: float,
    frequency: float,
    min_tokens: int,
) -> None:
    params = SamplingParams(
        logit_bias=bias,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        min_tokens=min_tokens,
        max_tokens=100,
    )
    eos = 3
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 3
    adjustments = Adjustments(params, prompt, frozenset({eos}))
    for length in range(len(output) + 1):
        if length:
            adjustments.record(output[length - 1], length)
        ids, add, rate, subtract = adjustments.arrays()
        assert len(set(ids.tolist())) == len(ids)
        values = logits.copy()
        picked = values[ids] + add
        values[ids] = np.where(picked > 0, picked / rate, picked * rate) - subtract
        want = naive(logits, params, prompt, output[:length], eos)
        np.testing.assert_allclose(values, want, rtol=1e-4, atol=1e-4)


def test_nothing_to_adjust_costs_nothing() -> None:
    assert adjustments_for(SamplingParams(), [1, 2], frozenset({3})) is None
    assert adjustments_for(SamplingParams(min_tokens=1), [1, 2], frozenset({3})) is not None
